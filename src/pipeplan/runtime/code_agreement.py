"""What the code of model and loss reads besides its arguments is alike on all ranks.

A model may read a global, such as a temperature that the program lowers over time. If the program
sets it on some ranks only, their stages compute another model. So these variables are compared:
all of them when the pipeline is made, and later those that the program has changed between two
steps. What the model itself changes inside of a step (meters, counters) belongs to its stage, and
is not compared, even if the program sets it back.

Ranks, texts, times, logs and functions may differ. Whether they have any influence, the ranks find
out by computing (`verification.rechecks`): at once, and then now and then.

A variable may hold the batch itself, whose rows then are not those of the microbatch. Such
variables are refused: if they share the batch's memory, or if they get as many rows as the batch
again and again.
"""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from pipeplan.documents.text import printable
from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.code_variables import (
    ENVIRONMENT,
    Variable,
    find_held,
    find_variables,
    words_of_code,
)
from pipeplan.runtime.fingerprints import fingerprint, given_tensors, memory_of
from pipeplan.runtime.function_watch import FunctionWatch
from pipeplan.runtime.loss_terms import LossTerms
from pipeplan.runtime.rank_values import as_number, is_time
from pipeplan.runtime.settings_agreement import gather_if_unlike
from pipeplan.runtime.variable_leaves import (
    MOST_LEAVES,
    NUMBERS,
    Leaf,
    collect_leaves,
    leaves_of,
)
from pipeplan.splitting.torch_private import count_changes

__all__ = ["CodeAgreement", "agree_on_code"]

RECORD = re.compile(r"\[\d+\][.\[]")
"""Something inside of an entry of a list."""
INDEX = re.compile(r"\[\d+\]")


class _Text(NamedTuple):
    """A value as ranks compare it."""

    text: str
    is_local: bool
    """Whether it may well differ between ranks."""


Texts = dict[str, _Text]
NOTHING = _Text("nothing", False)


@dataclass(slots=True)
class _Watched:
    """A variable, and what it held when the program was left alone with it."""

    variable: Variable
    mark: Any = None
    begun: Any = None
    """The same at the start of the step that runs."""
    own: set[str] = field(default_factory=set)
    """What the model itself has changed inside of a step: meters, counters."""


class CodeAgreement:
    """One rank's part in the comparison."""

    def __init__(self, model: nn.Module, functions: Iterable[Any], rank: int) -> None:
        """`model` is the whole one, and `functions` are the loss and what else gets outputs."""
        functions = list(functions)
        of_losses = [m for each in functions if isinstance(each, nn.Module) for m in each.modules()]
        modules = [*model.modules(), *of_losses]
        found = (*find_variables(modules, functions), *find_held(modules))
        self._functions = FunctionWatch(modules, functions)
        if {"environ", "getenv"} & words_of_code(modules, functions):
            found = (*found, ENVIRONMENT)
        self._doubted: set[str] = set()
        """What has changed since the last step, and may well differ between ranks."""
        self._cleared: set[str] = set()
        """The same, after a comparison has shown that it is of no influence."""
        self._rank, self._watched = rank, [_Watched(variable) for variable in found]
        self._has_run = False
        self.settle()

    def require_same(self, model: nn.Module) -> None:
        """Refuse variables and attributes that differ between ranks; all ranks have to call it.

        Raises:
            RuntimeMismatchError: on every rank, it names the variable.
        """
        own = {
            each.variable.name: self._texts([*leaves_of(each.variable), *_weights(each.variable)])
            for each in self._watched
            if each.variable is not ENVIRONMENT  # it has the rank's own
        }
        own.update(self._attributes(model))
        everyone = gather_if_unlike(own)
        if not everyone:
            return
        for name, first in everyone[0].items():
            others = [each.get(name, {}) for each in everyone[1:]]
            for rank, other in enumerate(others, start=1):
                self._compare(first, other, rank, others)

    def _compare(self, first: "Texts", other: "Texts", rank: int, others: list["Texts"]) -> None:
        for path in dict.fromkeys((*first, *other)):
            mine, theirs = first.get(path, NOTHING), other.get(path, NOTHING)
            if mine.text == theirs.text:
                continue
            if {mine.text, theirs.text} == {"True", "False"}:  # of the main rank, if others agree
                is_flag = all(each.get(path, NOTHING).text == theirs.text for each in others)
                mine, theirs = mine._replace(is_local=is_flag), theirs._replace(is_local=is_flag)
            # An object that only one rank has is a logger rather than a number to compute with.
            is_local = (mine.is_local and theirs.is_local) or not first or not other
            if is_local and self._rank == 0:
                sys.stderr.write(
                    f"pipeplan: {printable(path)}, which code of the model or the loss reads, is"
                    f" not alike on rank 0 and {rank}; it must not change what they compute\n"
                )
            elif not is_local:
                raise RuntimeMismatchError(
                    f"{printable(path)}: code of the model or the loss reads this, which is"
                    f" {theirs.text} on rank {rank}, but {mine.text} on rank 0; set it alike on"
                    " every rank"
                )

    def _texts(self, leaves: Iterable[Leaf]) -> "Texts":
        return {leaf.path: _Text(_print(leaf.value), self._is_local(leaf.value)) for leaf in leaves}

    def _attributes(self, model: nn.Module) -> dict[str, "Texts"]:
        """Plain attributes of all modules; parameters and buffers are compared elsewhere."""
        found: dict[str, Texts] = {}
        for name, module in model.named_modules():
            leaves: list[Leaf] = []
            for attribute, value in vars(module).items():
                if attribute == "training" or attribute.startswith("_torch"):
                    continue  # compiled modules have addresses
                if isinstance(value, (*NUMBERS, list, tuple)):
                    path = f"{name}.{attribute}" if name else attribute
                    collect_leaves(value, path, frozenset(), 0, leaves, set())
            if leaves:
                found[f"module {name}"] = self._texts(leaves)
        return found

    def _is_local(self, value: Any) -> bool:
        """Whether a value may well differ: a rank's number, the main rank's flag, text or time."""
        if is_time(value):
            return True
        if isinstance(value, bool):
            return False
        ranks = {self._rank, int(os.environ.get("LOCAL_RANK", self._rank))}
        return isinstance(value, str | bytes) or (isinstance(value, int) and value in ranks)

    def _as_local(self, value: Any) -> str:
        """What a value is by the view of its rank, as a text; none if it is nothing of that."""
        if isinstance(value, bool):
            return f"main {value is (self._rank == 0)}"
        return "local" if self._is_local(value) else ""

    def changes(self, batch: Any, targets: Any, training: bool = True) -> int:
        """A number for what the program has changed since the last step; 0 if nothing.

        The mode of this rank's layers belongs to it. `compare_changes` compares two of them.

        Raises:
            RuntimeMismatchError: a variable holds the batch.
        """
        for each in self._watched:
            each.begun = _mark(each.variable)
        changed = [each for each in self._watched if each.begun != each.mark]
        asked = changed if self._has_run else self._watched
        if asked:
            self._require_no_batch(asked, [*given_tensors(batch), *given_tensors(targets)])
        everything, strict, local = self._functions.changes(), [], []
        for each in changed:
            for leaf in _new_leaves(each):
                text = _print(leaf.value)
                if not _is_loose(leaf, each):
                    everything.append((leaf.path, text))
                    strict.append((leaf.path, text))
                    local.append((leaf.path, self._as_local(leaf.value) or text))
                elif _general(leaf.path) not in self._cleared:
                    everything.append((leaf.path, text))
                    self._doubted.add(_general(leaf.path))
        return as_number(everything, strict, local, training=training)

    def clear_doubts(self) -> None:
        """What has differed has no influence on what the ranks compute; it may go on so."""
        self._cleared |= self._doubted

    def settle(self) -> None:
        """Take note of all values: what changes from here on, the program changes."""
        for watched in self._watched:
            watched.mark = _mark(watched.variable)
        self._functions.settle()
        self._doubted.clear()

    def end_step(self) -> None:
        """The same, at the end of a step; learns what the model itself changes."""
        self._has_run = True
        self.settle()
        for each in self._watched:
            if each.begun is not None and each.mark != each.begun:
                each.own |= _changed_paths(each)

    def _require_no_batch(self, asked: Iterable[_Watched], given: Sequence[Any]) -> None:
        """Refuse a variable that holds as many rows as the batch, and probably its rows."""
        rows = {len(each) for each in given if each.ndim}
        memories = {memory_of(each) for each in given}
        for watched in asked:
            for path, value in leaves_of(watched.variable):
                if not isinstance(value, torch.Tensor | np.ndarray) or not value.ndim:
                    continue
                if len(value) in rows and (self._has_run or memory_of(value) in memories):
                    raise RuntimeMismatchError(
                        f"{printable(path)}: code of the model or the loss reads this variable,"
                        f" which holds {len(value)} rows as the batch does, but is called for each"
                        " microbatch; make it part of the batch or the targets (in"
                        " pipeplan.runtime.Whole, if every microbatch shall see all of it)"
                    )


def agree_on_code(model: nn.Module, loss: LossTerms, rank: int) -> CodeAgreement:
    """Compare what the code of a whole model and its loss reads; all ranks have to call it.

    Raises:
        RuntimeMismatchError: it differs between ranks.
    """
    functions = [loss.loss_fn, *loss.metrics.values(), *filter(None, [loss.weight_fn])]
    agreement = CodeAgreement(model, functions, rank)
    agreement.require_same(model)
    return agreement


def _changed_paths(watched: _Watched) -> set[str]:
    """Where a variable holds something else at the end of a step than at its start."""
    begun, ended = (_by_path(watched, mark) for mark in (watched.begun, watched.mark))
    return {path for path in {*begun, *ended} if begun.get(path) != ended.get(path)}


def _by_path(watched: _Watched, mark: Any) -> dict[str, Any]:
    return (
        {entry[0]: entry for entry in mark}
        if isinstance(mark, list)
        else {watched.variable.name: mark}
    )


def _new_leaves(watched: _Watched) -> list[Leaf]:
    """What has other values than before."""
    leaves, mark = leaves_of(watched.variable), watched.mark
    leaves = [leaf for leaf in leaves if leaf.path not in watched.own]
    if not isinstance(mark, list):  # it was a number or a text
        return leaves or ([] if "" in watched.own else [Leaf("", None)])
    before = _by_path(watched, mark)
    found = [leaf for leaf in leaves if before.get(leaf.path) != _mark_of(leaf)]
    gone = before.keys() - {leaf.path for leaf in leaves} - watched.own
    return found + [Leaf(path, None) for path in sorted(gone)]


def _is_loose(leaf: Leaf, watched: _Watched) -> bool:
    """Whether a value may well differ: texts, times, and records that were added to a list."""
    if isinstance(leaf.value, str | bytes) or is_time(leaf.value):
        return True
    is_new = leaf.value is None or leaf.path not in _by_path(watched, watched.mark)
    return is_new and RECORD.search(leaf.path) is not None


def _general(path: str) -> str:
    """A path that is the same for all entries of a list."""
    return INDEX.sub("[]", path)


def _weights(variable: Variable) -> list[Leaf]:
    """The values of a module that a variable holds, such as a teacher's."""
    module = variable.get()
    if not isinstance(module, nn.Module):
        return []
    named = [*module.named_parameters(), *module.named_buffers()]
    return [Leaf(f"{variable.name}.{name}", tensor) for name, tensor in named[:MOST_LEAVES]]


def _print(value: Any) -> str:
    """A text that is equal for equal values on all ranks."""
    if isinstance(value, torch.Tensor | np.ndarray):
        kind = f"{tuple(value.shape)} {value.dtype}"
        is_plain = isinstance(value, np.ndarray) or not value.is_meta
        return f"{kind} {fingerprint(value, 0):x}" if is_plain else kind
    return repr(value)


def _mark(variable: Variable) -> Any:
    """Something that is equal as long as a variable holds the same, in this process."""
    value = variable.get()
    if isinstance(value, (*NUMBERS, str, bytes)):
        return type(value), repr(value)
    return [_mark_of(leaf) for leaf in leaves_of(variable)]


def _mark_of(leaf: Leaf) -> Any:
    value = leaf.value
    if isinstance(value, torch.Tensor):
        return leaf.path, id(value), count_changes(value)
    if isinstance(value, np.ndarray):
        return leaf.path, id(value), fingerprint(value, 0)
    return leaf.path, type(value), repr(value)
