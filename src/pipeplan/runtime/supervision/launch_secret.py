"""A secret that the ranks of a launch share, and that whoever reaches the store's port has not.

::

    PIPEPLAN_SECRET                         if it is set; the same on all hosts
    ~/.local/state/pipeplan/secret          else; made on first use, for this user's eyes only

The secret itself never leaves the process. Ranks prove that they have the same one by a keyed hash
of names that they have just made up. Each run signs with a key of its own, so nothing that was
recorded in an earlier run is accepted.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from pipeplan.documents.text import printable

__all__ = ["SecretError", "derive_key", "find_secret", "proof_of"]

VARIABLE = "PIPEPLAN_SECRET"
LEAST_CHARACTERS = 16


class SecretError(Exception):
    """There is no secret that can be trusted; the text says why."""


def find_secret() -> bytes:
    """The secret of the environment, or of this user's file, which is made if there is none.

    Raises:
        SecretError: there is none, or others can read or replace it.
    """
    given = os.environ.get(VARIABLE)
    if given is not None:
        if len(given) < LEAST_CHARACTERS:
            raise SecretError(f"{VARIABLE} is shorter than {LEAST_CHARACTERS} characters")
        return given.encode(errors="surrogateescape")
    try:
        return _read_or_make(_path())
    except (OSError, RuntimeError) as error:  # pathlib: no home folder
        raise SecretError(f"there is no file for a secret ({printable(str(error))})") from error


def derive_key(secret: bytes, name: str) -> bytes:
    """The key that signs in the run of this name."""
    return _keyed(secret, f"key/{name}")


def proof_of(secret: bytes, name: str) -> str:
    """Tells those who have the same secret, and nobody else, that the caller has it, too."""
    return _keyed(secret, f"proof/{name}").hex()


def _keyed(secret: bytes, text: str) -> bytes:
    return hmac.new(secret, text.encode(), hashlib.sha256).digest()


def _path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or ""
    folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return folder / "pipeplan" / "secret"


def _read_or_make(path: Path) -> bytes:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.parent.stat()
    if folder.st_uid != os.getuid() or folder.st_mode & 0o022:
        raise SecretError(f"others can write to {printable(str(path.parent))}; chmod it to 700")
    if not path.exists():
        _make(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise SecretError(f"{printable(str(path))} is not a file of this user")
        if status.st_mode & 0o077:
            raise SecretError(f"others can read {printable(str(path))}; remove it")
        found = file.read(4096)
    if len(found) < LEAST_CHARACTERS:
        raise SecretError(f"{printable(str(path))} is too short; remove it")
    return found


def _make(path: Path) -> None:
    """Make the file whole or not at all; the first of several ranks wins."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(32).encode())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
