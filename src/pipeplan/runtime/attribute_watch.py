"""What a program changes in a layer between two steps, it changes on all replicas of the stage.

A program may set an attribute (`layer.scale = 0.5`), replace a `forward`, register a hook or put a
layer into another mode. If it does so on some replicas only, they compute different models, and the
sum of their gradients belongs to none. So each rank notes its layers' attributes and classes at the
end of a step, and looks at the next step's start what was replaced::

    step 4       | gap: the program runs |      step 5
    ... marks ---|  layer.scale = 0.5    |--- looks: {"1.scale": 0.5} gives a number; sums tell
                                              whether all replicas have the same one

What a forward changes, inside of a step, is not compared: it may depend on the rows of a replica.
Attributes that no code of the model names are the program's own. A value that names the rank or the
main rank may differ, and so may texts and times, but all replicas have to set them; and then they
compare what they compute (`verification.rechecks`).
"""

import os
import types
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeplan.documents.text import excerpt, printable
from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.code_variables import words_of_code
from pipeplan.runtime.fingerprints import fingerprint
from pipeplan.runtime.function_watch import text_of_function
from pipeplan.runtime.module_state import OF_EVERY_MODULE
from pipeplan.runtime.rank_values import is_time

__all__ = ["AttributeWatch", "require_alike"]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (list, dict, set, deque)
MISSING = object()


class AttributeWatch:
    """One rank's view of the layers that it shares with other replicas."""

    def __init__(self, model: nn.Module, functions: Iterable[Any], ranks: Sequence[int]) -> None:
        """`ranks` are those of all replicas; `functions` get the outputs of the last stage."""
        functions = list(functions)
        self._rank = torch.distributed.get_rank()
        num_others = len(ranks) - 1
        self._factor = num_others if self._rank == min(ranks) else -1
        """Over all replicas, these are zero in sum. So equal numbers are, too."""
        named = {f"{name}." * bool(name): module for name, module in model.named_modules()}
        named |= {
            f"loss_fn.{name}." if name else "loss_fn.": module
            for function in functions
            if isinstance(function, nn.Module)
            for name, module in function.named_modules()
        }
        modules = list(named.values())
        kinds = {kind: None for module in modules for kind in type(module).__mro__[:-1]}
        self._spaces: list[tuple[str, Any]] = [
            *((name, vars(module)) for name, module in named.items()),
            *((f"{kind.__qualname__}.", vars(kind)) for kind in kinds),
        ]
        self._words = words_of_code(modules, functions)
        self._marks: list[dict[str, Any]] = []
        self._sized: list[tuple[str, dict[Any, Any]]] = []
        """What torch itself keeps in each module, such as hooks; looked at by number."""
        self._tables: list[dict[Any, Any]] = []
        """The same without paths: every step asks hundreds of them for their sizes."""
        self._held: list[tuple[str, Any]] = []
        """Containers of the model's own."""
        self._sizes: list[int] = []
        self._entries: list[list[Any]] = []
        self._find_containers()
        self.changes: dict[str, str] = {}
        """What was changed in the last gap, with values as texts."""
        self._strict: dict[str, str] = {}
        """The same, with equal texts for all texts and times."""
        self._local: dict[str, str] = {}
        """The same, with equal texts for what names the rank, too."""

    def _find_containers(self) -> None:
        self._sized, self._held = [], []
        for prefix, space in self._spaces:
            for name, value in space.items():
                if name in OF_EVERY_MODULE and isinstance(value, dict):
                    self._sized.append((f"{prefix}{name}", value))
                elif name in self._words and type(value) in CONTAINERS:
                    self._held.append((f"{prefix}{name}", value))
        self._tables = [value for _, value in self._sized]

    def settle(self) -> None:
        """Note all attributes: what changes from here on, the program changes."""
        if self.changes:
            self._find_containers()
        self._marks = [space.copy() for _, space in self._spaces]  # of classes, too; at once
        self._sizes = self._sizes_now()
        self._entries = [_entries(value) if value else [] for _, value in self._held]

    def look(self) -> tuple[float, ...]:
        """Three numbers for what has changed since then; over equal replicas they sum up to zero.

        The second does so, too, if only texts and times differ. The third does so if values name
        the rank: its number, a main rank's flag.
        """
        self.changes, self._strict, self._local = {}, {}, {}
        for (prefix, space), mark in zip(self._spaces, self._marks, strict=False):
            if len(space) != len(mark) or not all(map(is_, space.values(), mark.values())):
                for name in dict.fromkeys((*mark, *space)):
                    before, now = mark.get(name, MISSING), space.get(name, MISSING)
                    if name in self._words and not _are_alike(before, now):
                        self._note(f"{prefix}{name}", [now])
        if self._sizes and self._sizes != self._sizes_now():
            for (path, value), size in zip(self._sized, self._sizes, strict=True):
                if len(value) != size:
                    self._note(path, [len(value)])
        for (path, value), entries in zip(self._held, self._entries, strict=False):
            if not value and not entries:
                continue  # as most are
            now = _entries(value)
            if len(now) != len(entries) or not all(map(_are_alike, entries, now)):
                self._note(path, now[:256])
        self._marks, self._sizes, self._entries = [], [], []  # nothing stays alive by them
        if not self.changes:
            return 0.0, 0.0, 0.0
        views = (self.changes, self._strict, self._local)
        numbers = [
            1 + zlib.crc32(repr(sorted(each.items())).encode("utf-8", "replace")) for each in views
        ]
        return tuple(float(self._factor * number) for number in numbers)

    def _sizes_now(self) -> list[int]:
        return list(map(len, self._tables))

    def _note(self, path: str, values: Sequence[Any]) -> None:
        """Note what something is now: as it is, and by the view of its rank."""
        self.changes[path] = " ".join(map(_text, values))
        self._strict[path] = " ".join(map(_strict_text, values))
        self._local[path] = " ".join(map(self._as_local, values))

    def _as_local(self, value: Any) -> str:
        """The value as a text; what may be of the rank has the same text on all ranks."""
        if isinstance(value, bool):
            return f"main {value is (self._rank == 0)}"
        ranks = {str(self._rank), os.environ.get("LOCAL_RANK", "-")}
        is_rank = isinstance(value, int) and str(value) in ranks
        return "rank" if is_rank else _strict_text(value)


def _strict_text(value: Any) -> str:
    """The same for all texts, and for all times."""
    is_loose = isinstance(value, str | bytes) or is_time(value)
    return f"a {type(value).__name__}" if is_loose else _text(value)


def _text(value: Any) -> str:
    """A text that is equal for equal values on all ranks; objects have that of their class."""
    if value is MISSING:
        return "deleted"
    if isinstance(value, (*PLAIN, np.generic)):
        return repr(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        is_plain = isinstance(value, np.ndarray) or not value.is_meta
        return f"{tuple(value.shape)} {fingerprint(value, 0) if is_plain else ''}"
    if isinstance(getattr(value, "__func__", value), types.FunctionType):
        return text_of_function(value)
    return type(value).__qualname__


def _entries(container: Any) -> list[Any]:
    """What a container holds; of a dict the keys, too."""
    if isinstance(container, dict):
        return [*container, *container.values()]
    if isinstance(container, set):
        return sorted(container, key=repr)
    return list(container)


def _are_alike(before: Any, now: Any) -> bool:
    """Whether nothing has changed: the same object, or an equal plain value."""
    if before is now:
        return True
    return type(before) is type(now) and isinstance(now, PLAIN) and bool(before == now)


def require_alike(everyone: list[dict[str, str]], replicas: Iterable[Iterable[int]]) -> None:
    """Name what replicas have not changed alike; `everyone` are the changes of all ranks.

    Raises:
        RuntimeMismatchError: always; who comes here knows that something differs.
    """
    for ranks in replicas:
        first, *others = ranks
        for other in others:
            for name in dict.fromkeys((*everyone[first], *everyone[other])):
                mine, theirs = (everyone[rank].get(name, "as before") for rank in (first, other))
                if mine != theirs:
                    raise RuntimeMismatchError(
                        f"{printable(name)}: the program has changed it since the last step, and it"
                        f" is {excerpt(theirs)} on rank {other}, but {excerpt(mine)} on rank"
                        f" {first}, which is a replica of the same stage; change layers alike on"
                        " every rank"
                    )
    raise RuntimeMismatchError(
        "layers: the program has changed attributes on some replicas of a stage only; change them"
        " alike on every rank"
    )
