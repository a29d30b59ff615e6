"""All ranks together decide whether the cut model is the whole one, before the first step."""

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.documents.text import printable
from pipeplan.errors import RuntimeMismatchError
from pipeplan.pipeline import Kind
from pipeplan.runtime.batches import as_call, mark_rows, select_rows
from pipeplan.runtime.gathering import STEPPING, gather
from pipeplan.runtime.loss_terms import LossTerms
from pipeplan.runtime.replica_setup import Part, Replica
from pipeplan.runtime.verification.loss_rows import LossOfRows, spread_rows
from pipeplan.runtime.verification.rechecks import Recheck
from pipeplan.runtime.verification.row_division import row_orders
from pipeplan.runtime.verification.row_records import RowRecords
from pipeplan.runtime.verification.stage_calls import Sample, StageCalls
from pipeplan.runtime.verification.stage_comparison import (
    Report,
    compare_stage,
    failed,
    first_difference,
)
from pipeplan.runtime.verification.whole_states import give_settings, take_settings
from pipeplan.splitting.nesting import map_tensors
from pipeplan.splitting.rehearsals import Outlines, Rehearsal

__all__ = ["Verdict", "Verification", "can_verify"]

MOST_SAMPLES = 2
"""Microbatches that are compared: a second one shows state that passes between microbatches."""
MOST_ROWS = 2
"""Rows of each. BatchNorm cannot normalise a single one."""
COPIES = 3
"""The whole model, its gradients and a margin."""


def can_verify(model: nn.Module, verify: str, rank: int) -> bool:
    """Whether stages are to be compared with the whole model; says so if they cannot be."""
    if verify not in ("first-step", "off"):
        raise RuntimeMismatchError(f"verify: is {verify!r}; use 'first-step' or 'off'")
    if verify == "off":
        return False
    if any(parameter.is_meta for parameter in model.parameters()):
        if rank == 0:
            sys.stderr.write(
                "pipeplan: the model was built on the meta device, so its stages are not compared"
                " with the whole model\n"
            )
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What follows if all stages are the whole model's."""

    doubt: str | None
    """A reason to refuse the step if no stage raises in it: the whole model does."""
    loss_rows: LossOfRows | None
    """By which the last stage looks at later targets."""
    input_records: RowRecords | None
    """By which it looks at later inputs, if the model computes its loss itself."""
    recheck: Recheck
    """By which ranks compare later what they compute."""
    is_due: bool
    """Whether that has to be done at once: some ranks have not been compared yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What one rank needs for the comparison."""

    rank: int
    replica: Replica | None
    """None for a rank that the plan does not use."""
    optimizer: torch.optim.Optimizer
    stage_ranks: tuple[tuple[int, ...], ...]
    first_name_of: dict[str, str]
    loss: LossTerms
    num_microbatches: int
    amp_dtype: torch.dtype | None
    recomputes: tuple[bool, ...]
    """By stage."""
    kinds: tuple[frozenset[Kind], ...]
    """By stage, the kinds of its blocks."""
    activation_bytes: float
    """What the whole model keeps from forward to backward, for one microbatch."""

    def run(self, batch: Any, targets: Any, num_rows: int) -> Verdict:
        """Compare; all ranks have to call it.

        If a stage raises as the whole model does, that is the model's own error.

        Raises:
            RuntimeMismatchError: a stage is not what the whole model is there, on every rank.
        """
        self._share_settings()
        samples = self.share(batch, targets, num_rows, reorders=any(self._divides))
        own: dict[int, Report] = {}
        if self.replica is not None and self.rank in self._comparing:
            try:
                for part in self.replica.parts:
                    own[part.stage] = self._compare(part, samples, (targets, num_rows))
            finally:
                self.replica.parts[0].module.forget_rest()
                self.replica.reducer.begin()
        loss_rows = own[max(own)].loss_rows if own else None
        sent = {stage: replace(report, loss_rows=None) for stage, report in own.items()}
        everyone = gather(sent, STEPPING)
        reports = [everyone[rank][stage] for stage, rank in enumerate(self._comparing)]
        found = first_difference(reports, self._rounding, self._comparing)
        if found is not None:
            raise RuntimeMismatchError(
                f'{found} (found by comparing the stages with the whole model; verify="off" leaves'
                " this out)"
            )
        if self.rank == self._comparing[0]:
            self._tell_notes(reports)
        self._begin_rehearsals(reports[0].outlines)
        has_replicas = any(len(ranks) > 1 for ranks in self.stage_ranks)
        return Verdict(
            doubt=next((each.whole_error for each in reports if each.whole_error), None),
            loss_rows=loss_rows,
            input_records=RowRecords(floats=False) if self._sees_own_loss(own, loss_rows) else None,
            recheck=self._make_recheck(reports),
            is_due=has_replicas or len({each.run.weights for each in reports if each.run}) > 1,
        )

    def _share_settings(self) -> None:
        """Let the whole model on each rank have the modes that programs have set since the cut.

        A program reaches only the layers that its rank holds, such as to freeze BatchNorm.
        """
        held = self.replica.held if self.replica is not None else None
        own = (
            take_settings(held.model) if held is not None and self.rank in self._comparing else None
        )
        everyone = gather(own, STEPPING)
        if held is None or own is None:
            return
        known = {id(module) for module in held.model.modules()}
        with held.whole() as model:
            for rank in dict.fromkeys(self._comparing):
                give_settings(model, known, everyone[rank])

    def _sees_own_loss(self, own: dict[int, Report], loss_rows: LossOfRows | None) -> bool:
        """Whether this rank looks at a loss that is a part of the model."""
        is_last = len(self.stage_ranks) - 1 in own
        return is_last and loss_rows is None and self.loss.weight_fn is None

    def _begin_rehearsals(self, outlines: Outlines | None) -> None:
        """Let the first stage look at the forward of a chain from now on."""
        for part in self.replica.parts if self.replica is not None else ():
            module = part.module
            if module.is_first and outlines is not None:
                standing = module.held.standing
                module.rehearsal = Rehearsal(module.model, module.layout, standing, outlines)

    def _make_recheck(self, reports: list[Report]) -> Recheck:
        parts = self.replica.parts if self.replica is not None else ()
        return Recheck(
            rank=self.rank,
            replica=self.replica,
            stages=tuple(self._stage_calls(part) for part in parts),
            stage_ranks=self.stage_ranks,
            owners=self._comparing,
            remembers=frozenset(name for each in reports for name in each.remembers),
            is_certain=not any(each.keeps_state for each in reports),
            rounding=self._rounding(1.0),
            activation_bytes=self.activation_bytes,
        )

    def _tell_notes(self, reports: list[Report]) -> None:
        """Say how training by microbatches differs from training by whole batches."""
        notes = [report.note for report in reports if report.note][-1:]  # the loss tells most
        names = list(dict.fromkeys(name for report in reports for name in report.remembers))
        num_parts = self.num_microbatches * max(map(len, self.stage_ranks))
        if names and num_parts > 1:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            notes.append(
                f"{printable(names[0])!r}{more} change in each forward: once for each microbatch,"
                " as with gradient accumulation, not once for each batch"
            )
        for note in notes:
            sys.stderr.write(f"pipeplan: {note}\n")

    @property
    def _comparing(self) -> list[int]:
        """For each stage the rank that compares it: the first replica of its group's first stage.

        The groups' stages have the same ranks, but may name them in another order.
        """
        first_of: dict[frozenset[int], int] = {}
        for ranks in self.stage_ranks:
            first_of.setdefault(frozenset(ranks), ranks[0])
        return [first_of[frozenset(ranks)] for ranks in self.stage_ranks]

    def _rounding(self, size: float) -> float:
        """How much numbers of a size may differ by rounding."""
        dtype = self.amp_dtype or torch.float32
        return float(torch.finfo(dtype).eps ** 0.75 * size)

    @property
    def _divides(self) -> list[bool]:
        """For each stage, whether what it sends is divided or joined by rows, there or later.

        An order of rows that is not theirs may reach a later cut.
        """
        pairs = itertools.pairwise(map(frozenset, self.stage_ranks))
        here = [a != b and max(len(a), len(b)) > 1 for a, b in pairs]
        return [any(here[stage:]) for stage in range(len(self.stage_ranks))]

    def share(
        self,
        batch: Any,
        targets: Any,
        num_rows: int,
        *,
        reorders: bool = False,
        wanted: Sequence[int] | None = None,
    ) -> list[Sample]:
        """A few rows, and then all of them together; all ranks have to call it.

        With `reorders`, the latter follow in other orders. `wanted` are rows that shall be among
        them; those of the last stage count.
        Ranks that were not given any get them from those that were.
        """
        # As the runtime runs them: no more microbatches and no larger ones.
        num_samples = min(MOST_SAMPLES, self.num_microbatches, num_rows)
        size = max(1, min(MOST_ROWS, num_rows // max(num_samples, self.num_microbatches)))
        chosen = spread_rows(num_rows, num_samples * size)
        if wanted is not None:
            box = [list(wanted)]
            dist.broadcast_object_list(box, src=self._comparing[-1])
            new = [row for row in box[0] if row not in chosen][: len(chosen) - 1]
            chosen[len(chosen) - len(new) :] = new
        rows = [chosen[i * size : (i + 1) * size] for i in range(num_samples)] + [chosen]
        others = row_orders(len(chosen)) if reorders else []
        orders = [()] * len(rows) + others
        rows += [[chosen[place] for place in order] for order in others]
        return self._select(batch, targets, num_rows, rows, orders)

    def share_microbatch(self, batch: Any, targets: Any, num_rows: int) -> Sample:
        """As many rows as a microbatch has; all ranks have to call it."""
        rows = spread_rows(num_rows, -(-num_rows // self.num_microbatches))
        return self._select(batch, targets, num_rows, [rows], [()])[0]

    def _select(
        self,
        batch: Any,
        targets: Any,
        num_rows: int,
        rows: list[list[int]],
        orders: Sequence[tuple[int, ...]],
    ) -> list[Sample]:
        """Samples of these rows; ranks that were given none get them from those that were."""
        given = gather((batch is not None, targets is not None), STEPPING)
        host = torch.device("cpu")
        calls = aims = None
        if batch is not None:
            marked = as_call(mark_rows(batch, num_rows, "batch"))
            calls = [select_rows(marked, r, host) for r in rows]
        if targets is not None:
            targets = mark_rows(targets, num_rows, "targets")
            aims = [select_rows(targets, r, host) for r in rows]
        sources = self._comparing[0], self._comparing[-1]
        users = {rank for ranks in self.stage_ranks for rank in ranks}
        shared: list[Any] = []
        for kind, (value, source) in enumerate(zip((calls, aims), sources, strict=True)):
            box = [value]
            is_missing = any(not given[rank][kind] for rank in users)
            if given[source][kind] and is_missing:
                dist.broadcast_object_list(box, src=source)
            shared.append(box[0] or [None] * len(rows))
        return [
            Sample(call=call, targets=aim, num_rows=len(r), order=order)
            for call, aim, r, order in zip(*shared, rows, orders, strict=True)
        ]

    def _compare(self, part: Part, samples: list[Sample], targets: tuple[Any, int]) -> Report:
        try:
            return self._compare_part(part, samples, targets)
        except RuntimeMismatchError as error:
            return failed(error)

    def _stage_calls(self, part: Part) -> StageCalls:
        assert self.replica is not None  # this is one of its parts
        groups = self.optimizer.param_groups
        decayed = {id(p) for group in groups if group.get("weight_decay") for p in group["params"]}
        return StageCalls(
            module=part.module,
            runner=part.runner,
            loss=self.loss,
            parameters=part.named,
            device=part.runner.device,
            amp_dtype=self.amp_dtype,
            decayed=frozenset(n for n, p in part.named.items() if id(p) in decayed),
            kinds=self.kinds[part.stage],
            first_name_of=self.first_name_of,
            own_stages=frozenset(each.stage for each in self.replica.parts),
        )

    def _compare_part(self, part: Part, samples: list[Sample], targets: tuple[Any, int]) -> Report:
        replica, stage = self.replica, self._stage_calls(part)
        assert replica is not None  # this is one of its parts
        with _on_one_device(stage) as placed:
            moved = [_move(sample, placed.device) for sample in samples]
            *parts, joint = (sample for sample in moved if not sample.order)
            others = [s for s in moved if s.order] if self._divides[part.stage] else []
            return compare_stage(
                placed,
                parts,
                replica.held_by,
                recomputes=self.recomputes[part.stage],
                has_replicas=len(replica.ranks) > 1,
                joint=joint,
                spread=targets if targets[0] is not None else None,
                reordered=others,
            )


def _move(sample: Sample, device: torch.device) -> Sample:
    call, targets = map_tensors([sample.call, sample.targets], lambda tensor: tensor.to(device))
    return replace(sample, call=call, targets=targets)


@contextlib.contextmanager
def _on_one_device(stage: StageCalls) -> Iterator[StageCalls]:
    """Inside, the whole model is on the stage's device; if it does not fit there, on the host."""
    if stage.device.type == "cpu":
        yield stage
        return
    host = torch.device("cpu")
    module, rest = stage.module, stage.module.rest.tensors
    free_bytes = torch.cuda.mem_get_info(stage.device)[0]
    if COPIES * sum(tensor.nbytes for tensor in rest) < free_bytes:
        for tensor in rest:
            tensor.data = tensor.data.to(stage.device)
        yield stage
        return
    module.model.to(host)
    try:
        yield replace(stage, runner=stage.runner.on(host), device=host)
    finally:
        module.model.to(stage.device)
