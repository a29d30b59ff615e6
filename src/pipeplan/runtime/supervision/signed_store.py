"""A store whose values are signed, since whoever reaches its port can write to it."""

import hashlib
import hmac
from typing import Any

import torch.distributed as dist

__all__ = ["SignedStore"]

DIGITS = 64
"""Of a signature, before the text that it signs."""


class SignedStore:
    """Writes signed texts, and reads only what is signed with the same key.

    A value that somebody else has written is as if it were not there, and is replaced.
    """

    def __init__(self, store: Any, key: bytes) -> None:
        self._store, self._key = store, key
        self.has_strangers = False
        """Whether a value without a valid signature was met."""

    def write(self, name: str, text: str) -> None:
        """Write a value."""
        self._store.set(name, self._sign(name, text))

    def read(self, name: str) -> str | None:
        """A value; None if there is none."""
        if not self._store.check([name]):
            return None
        try:
            return self._text_of(name, self._store.get(name))
        except dist.DistStoreError:  # somebody has deleted it in between
            return None

    def read_all(self, names: list[str]) -> list[str | None]:
        """Several values, with None for each that is missing; cheap if none is."""
        if not self._store.check(names):
            return [self.read(name) for name in names]
        try:
            values = self._store.multi_get(names)
        except dist.DistStoreError:
            return [None] * len(names)
        return [self._text_of(name, value) for name, value in zip(names, values, strict=True)]

    def write_first(self, name: str, text: str) -> str:
        """Write a value unless there is one; the value that is there now."""
        mine = self._sign(name, text)
        found = self._store.compare_set(name, "", mine)
        valid = self._text_of(name, found)
        if valid is None:
            found = self._store.compare_set(name, found, mine)
            valid = self._text_of(name, found)
        return text if valid is None else valid

    def _sign(self, name: str, text: str) -> str:
        return self._signature(name, text.encode()) + text

    def _text_of(self, name: str, value: bytes) -> str | None:
        given, text = value[:DIGITS], value[DIGITS:]
        if not hmac.compare_digest(self._signature(name, text).encode(), given):
            self.has_strangers = True
            return None
        return text.decode(errors="replace")

    def _signature(self, name: str, text: bytes) -> str:
        return hmac.new(self._key, name.encode() + b"\0" + text, hashlib.sha256).hexdigest()
