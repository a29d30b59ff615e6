"""Agrees, at the start of a step, on the batch: its rows, its shapes and its values.

The first rank of the first stage tells what it was given: the number of the step and its mode
(with an update or without, or evaluation), rows, key of the shapes, fingerprints of batch, targets
and the optimizer's options. The notice goes down the tree of all ranks (`rank_tree`), ahead of the
data. So it costs no time: a rank behind waits for data anyway. Each rank compares the notice with
what it was given itself, and passes it on. A rank that was given None takes the notice's word. In a
chain of stages with one rank each, the notice rides with the first output (`exchange.riding`).

Targets that the first rank does not have are compared among the ranks of the last stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.batches import num_rows
from pipeplan.runtime.exchange.rank_tree import TREE_TAG, RankTree
from pipeplan.runtime.exchange.transports import Transport
from pipeplan.runtime.fingerprints import fingerprint, shape_key
from pipeplan.runtime.rank_values import Likeness, compare_changes

__all__ = ["Agreed", "BatchAgreement", "Mode", "Notice"]

TAG, TARGETS_TAG = TREE_TAG, TREE_TAG + 1
REMEDY = (
    "a DistributedSampler or an unseeded shuffle gives ranks different rows, but all of them need"
    " the same batches: use no DistributedSampler, and shuffle with a generator of the same seed"
)


class Mode(IntEnum):
    """What the ranks do with the batch."""

    TRAINING = 0
    ACCUMULATION = 1
    """Training without an update yet."""
    EVALUATION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks know of a batch."""

    mode: Mode
    rows: int
    key: int
    """Stands for the shapes of the batch, and for evaluation or not."""


class Notice(NamedTuple):
    """What a rank says of its batch; -1 for a fingerprint of None, and no rows for no batch."""

    step: int
    mode: int
    rows: int
    key: int
    batch: int
    targets: int
    options: int
    """Of the optimizer; -1 if they are not compared."""
    variables: int
    """Those that the program has changed since the last step, and that the model's code reads."""

    def agreed(self) -> Agreed:
        """What it tells to all ranks."""
        return Agreed(mode=Mode(self.mode), rows=self.rows, key=self.key)


class BatchAgreement:
    """One rank's part in the agreement."""

    def __init__(
        self,
        rank: int,
        stage_ranks: Sequence[Sequence[int]],
        num_ranks: int,
        *,
        compares_values: bool = True,
    ) -> None:
        """`stage_ranks` are the ranks of each stage; other ranks are not used by the plan."""
        self._rank, self._compares_values = rank, compares_values
        self._tree = RankTree.of(rank, stage_ranks, num_ranks)
        last = list(stage_ranks[-1])
        self._is_last = rank in last
        self._first_of_last = last[0]
        self._others_of_last = last[1:] if rank == last[0] else []
        self._pending: list[tuple[torch.Tensor, dist.Work]] = []
        self.has_doubt = False
        """Whether the last notice differs in variables that may be a rank's own."""

    def agree(
        self,
        batch: Any,
        targets: Any,
        mode: Mode,
        step: int,
        transport: Transport,
        options: int = -1,
        variables: int = 0,
    ) -> Agreed:
        """What all ranks know of this step's batch.

        `options` stand for the optimizer's options, if they are the same on all ranks, and
        `variables` for what the program has changed that the model's code reads.

        Raises:
            RuntimeMismatchError: this rank was given something else than the first one.
        """
        for _, work in self._pending:  # the step before has ended, so they have arrived
            work.wait()
        self._pending.clear()
        own = self.describe(batch, targets, mode, step, options, variables)
        notice = own
        if self._tree.parent is not None:
            notice = self._receive(self._tree.parent, TAG, transport)
            self.compare(own, notice)
        self._send(notice, self._tree.children, TAG, transport)
        self._compare_targets(own, notice, transport)
        return notice.agreed()

    def describe(
        self, batch: Any, targets: Any, mode: Mode, step: int, options: int, variables: int
    ) -> Notice:
        """What this rank says of its batch."""
        rows = num_rows(batch, "batch") if batch is not None else 0
        prefix = f"{mode is Mode.EVALUATION}/{rows}"
        return Notice(
            step=step,
            mode=mode,
            rows=rows,
            key=shape_key(batch, prefix) if batch is not None else 0,
            batch=self._fingerprint(batch, step),
            targets=self._fingerprint(targets, step),
            options=options,
            variables=variables,
        )

    def _fingerprint(self, value: Any, step: int) -> int:
        return fingerprint(value, step) if value is not None and self._compares_values else -1

    def compare(self, own: Notice, notice: Notice) -> None:
        """Refuse what differs from the first rank's."""
        has_batch = bool(own.rows)
        first = f"rank {self._tree.root}"
        if (own.mode, own.step) != (notice.mode, notice.step):
            raise RuntimeMismatchError(
                f"step: rank {self._rank} is in {_where(own)}, but {first} in {_where(notice)};"
                " all ranks call step and evaluate in the same order"
            )
        if has_batch and own.rows != notice.rows:
            raise RuntimeMismatchError(
                f"batch: rank {self._rank} has {own.rows} rows, but {first} has {notice.rows};"
                f" {REMEDY}"
            )
        if has_batch and own.key != notice.key:
            raise RuntimeMismatchError(
                f"batch: rank {self._rank} has tensors of other shapes or types than {first};"
                f" {REMEDY}"
            )
        for name in ("batch", "targets"):
            mine, theirs = getattr(own, name), getattr(notice, name)
            if mine != -1 and theirs not in (-1, mine):
                raise RuntimeMismatchError(
                    f"{name}: rank {self._rank} has other values than {first}; {REMEDY}"
                )
        if own.options != notice.options:
            raise RuntimeMismatchError(
                f"optimizer: rank {self._rank} has other options than {first}, such as another"
                " learning rate; step schedulers and set options on every rank, or give"
                " scheduler_fn or param_groups_fn"
            )
        variables = own.variables, notice.variables
        if -1 in variables:
            return
        likeness = compare_changes(*variables)
        self.has_doubt = self.has_doubt or likeness is Likeness.DOUBTFUL
        if likeness is Likeness.OTHER:
            raise RuntimeMismatchError(
                f"variables: since the last step, the program has set globals or attributes that"
                f" code of the model or the loss reads, or the mode (train, eval); rank"
                f" {self._rank} has other values than {first}: set them alike on every rank"
            )

    def _compare_targets(self, own: Notice, notice: Notice, transport: Transport) -> None:
        """Compare targets among the ranks of the last stage, if the first rank has none."""
        if notice.targets != -1 or not self._is_last:
            return
        self._send(own, self._others_of_last, TARGETS_TAG, transport)
        if self._rank != self._first_of_last:
            first = self._receive(self._first_of_last, TARGETS_TAG, transport)
            if -1 not in (own.targets, first.targets) and own.targets != first.targets:
                raise RuntimeMismatchError(
                    f"targets: rank {self._rank} has other values than rank"
                    f" {self._first_of_last}; {REMEDY}"
                )

    def _send(self, notice: Notice, ranks: Sequence[int], tag: int, transport: Transport) -> None:
        if ranks:
            numbers = torch.tensor(notice)
            self._pending += [
                (numbers, transport.send_header(numbers, rank, tag)) for rank in ranks
            ]

    def _receive(self, rank: int, tag: int, transport: Transport) -> Notice:
        numbers = torch.empty(len(Notice._fields), dtype=torch.int64)
        transport.receive_header(numbers, rank, tag).wait()
        return Notice(*numbers.tolist())


def _where(notice: Notice) -> str:
    return f"{Mode(notice.mode).name.lower()} step {notice.step}"
