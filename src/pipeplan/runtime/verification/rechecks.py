"""All ranks compute the same whole model, later too: they run it once more now and then.

A rank runs only its own layers, so a program that goes another way on one rank (a flag, a function,
the environment) would train another model there. Before the first step all ranks have the whole
model, and compare its losses and gradients (`digests`). Later they borrow it::

    batch        0       1   2       4               8    ...   16, 32, ... and whenever in doubt
    each rank    first   again: gets the other stages' tensors, runs a few rows of this batch
                 step           through the whole model, compares, and forgets them;
                                one microbatch through the whole model and through its own stages

So the cost vanishes. Doubts come from `code_agreement` and `attribute_watch`: what differs between
ranks, but may well be of no influence (times, texts, logs, the main rank's flag).
"""

import contextlib
import os
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.gathering import STEPPING, gather
from pipeplan.runtime.parameters import LOSS_NAME
from pipeplan.runtime.replica_setup import Replica
from pipeplan.runtime.verification.differences import first_line, is_of_memory
from pipeplan.runtime.verification.digests import WholeRun, find_other_run
from pipeplan.runtime.verification.later_looks import (
    LayerCalls,
    find_uneven_loss,
    require_no_problem,
)
from pipeplan.runtime.verification.later_stages import find_in_stages
from pipeplan.runtime.verification.runs import numbers_of_whole
from pipeplan.runtime.verification.stage_calls import Sample, StageCalls
from pipeplan.runtime.verification.whole_states import (
    CodeMarks,
    StageState,
    filled,
    filled_loss,
    give_remembered,
    take_state,
)
from pipeplan.splitting.torch_private import gradient_hooks

__all__ = ["Recheck"]

COPIES = 3
"""Of the whole model that have to fit into the host's memory: its tensors, gradients, a margin."""
NO_ROOM = "ranks do not compare what they compute after the first step"
NO_ROOM_FOR_STAGES = "ranks do not compare their stages with it after the first step"


@dataclass(slots=True, kw_only=True)
class Recheck:
    """One rank's part in the later comparisons; all ranks have one."""

    rank: int
    replica: Replica | None
    stages: tuple[StageCalls, ...]
    """Those of this rank; none for a rank that the plan does not use."""
    stage_ranks: tuple[tuple[int, ...], ...]
    owners: list[int]
    """For each stage, the rank whose values count."""
    remembers: Collection[str]
    """Buffers and numbers that forwards change; replicas have others."""
    is_certain: bool
    """Whether forwards change nothing that cannot be sent to other ranks: globals, objects."""
    rounding: float
    activation_bytes: float
    """What the whole model keeps from forward to backward, for one microbatch."""
    marks: CodeMarks | None = None
    problem: str | None = field(default=None, init=False)
    """What this rank has found in the whole model itself."""
    _is_possible: bool = field(default=True, init=False)
    """Whether ranks can compare what they compute."""
    _has_room: bool = field(default=True, init=False)
    _has_room_for_stages: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if self.replica is not None:
            self.marks = CodeMarks(self.replica.held.model)

    def run(self, samples: Sequence[Sample], microbatch: Sample | None = None) -> None:
        """Compare on these rows, the last sample has all of them; all ranks have to call it.

        With a `microbatch`, each rank compares its stages with the whole model, too.

        Raises:
            RuntimeMismatchError: on every rank, it names what differs and where.
        """
        if not self._has_room:
            return
        self._look_for_room()
        if not self._has_room:
            return
        others, remembered = self._exchange()
        found: WholeRun | str | None = None
        is_short = False
        if self.replica is not None and self.stages:
            stage = self.stages[-1]
            with self.replica.reducer.paused(), _keeping_gradients(stage.modules()), _silent():
                try:
                    if microbatch is not None and self._has_room_for_stages:
                        self.problem = find_in_stages(
                            self.stages,
                            microbatch,
                            self.replica.held_by,
                            lambda: self._being_whole(stage, others),
                        )
                    if self._is_possible:
                        found = self._run_whole(stage, samples, others, remembered)
                except Exception as error:
                    if not is_of_memory(error):
                        raise
                    is_short = True
        self._compare(found, is_short=is_short)

    def _tell(self, text: str) -> None:
        if self.rank == 0:
            sys.stderr.write(f"pipeplan: {text}\n")

    def _compare(self, found: WholeRun | str | None, *, is_short: bool) -> None:
        """Compare what all ranks have found, unless one `is_short` of memory."""
        own = (found, self._is_certain_now(), self._hooked(), is_short)
        everyone = gather(own, STEPPING)
        require_no_problem(self.problem)
        if any(is_short for *_, is_short in everyone):
            self._has_room = False
            self._tell(f"the whole model did not fit into a rank's memory, so {NO_ROOM}")
            return
        hooked = {name for _, _, names, _ in everyone for name in names}
        runs = {
            rank: each.without(hooked)
            for rank, (each, *_) in enumerate(everyone)
            if isinstance(each, WholeRun)
        }
        errors = {r: each for r, (each, *_) in enumerate(everyone) if isinstance(each, str)}
        text = find_other_run(runs, self.rounding) if runs else None
        if errors and runs:
            rank = min(errors)
            text = f"model: raises on rank {rank}, but not on rank {min(runs)}: {errors[rank]}"
        if text is None:
            return
        if all(is_certain for _, is_certain, *_ in everyone):
            raise RuntimeMismatchError(f'{text} (verify="off" leaves this comparison out)')
        self._is_possible = False
        self._tell(
            f"{text}; it is not refused, because forwards change globals or objects, or the program"
            " has replaced functions of layers, which one rank alone knows; from now on ranks"
            " compare their own stages with the whole model, but not each other"
        )

    def _hooked(self) -> list[str]:
        """Parameters of this rank whose gradients go through hooks, which other ranks have not."""
        if self.replica is None or not self.stages:
            return []
        names = self.stages[-1].first_name_of
        found = self.replica.held.model.named_parameters()
        return [names.get(name, name) for name, each in found if gradient_hooks(each)[0]]

    def _is_certain_now(self) -> bool:
        if self.replica is None or self.marks is None:
            return True
        return self.is_certain and self.marks.are_same(self.replica.held.model)

    def _look_for_room(self) -> None:
        """Note whether the whole model fits into all ranks, and a microbatch of it, too.

        All ranks have to call it. What does not fit once is left out from then on.
        """
        own, free = 0, float("inf")
        if self.replica is not None and self.stages:
            free = _free_bytes(self.stages[-1].device)
            if self.rank in self.owners:
                own = sum(p.nbytes for p in self.replica.held.model.parameters())
        everyone = gather((own, free), STEPPING)
        needed = COPIES * sum(size for size, _ in everyone)
        least = min(free for _, free in everyone)
        self._has_room = needed < least
        if not self._has_room:
            self._tell(f"the whole model does not fit into a rank's memory again, so {NO_ROOM}")
        elif self._has_room_for_stages and needed + COPIES * self.activation_bytes >= least:
            self._has_room_for_stages = False
            self._tell(
                "a microbatch of the whole model does not fit into a rank's memory, so"
                f" {NO_ROOM_FOR_STAGES}"
            )

    def _exchange(self) -> tuple[StageState, StageState]:
        """The states of stages that this rank does not hold, and what its own takes over."""
        others, remembered = StageState(), StageState()
        users = {rank for ranks in self.stage_ranks for rank in ranks}
        for owner in dict.fromkeys(self.owners):
            holders = set(self.stage_ranks[self.owners.index(owner)])
            if users <= holders and not self.remembers:
                continue
            box: list[Any] = [None]
            if self.rank == owner:
                assert self.replica is not None  # it owns a stage
                only = self.remembers if users <= holders else None
                box = [take_state(self.replica.held.model, only)]
            dist.broadcast_object_list(box, src=owner)
            if self.rank not in holders:
                others.add(box[0])
            elif self.rank != owner:
                remembered.add(box[0].only(self.remembers))
        return others, remembered

    @contextlib.contextmanager
    def _being_whole(self, stage: StageCalls, others: StageState) -> Iterator[None]:
        """Inside, the model is whole, with what other stages have now."""
        assert self.replica is not None  # it has a stage
        model = self.replica.held.model
        own = {id(module) for module in model.modules()}
        with (
            self.replica.held.whole(),
            filled(model, own, others),
            filled_loss(stage.loss.loss_fn, LOSS_NAME, others),
        ):
            yield

    def _run_whole(
        self,
        stage: StageCalls,
        samples: Sequence[Sample],
        others: StageState,
        remembered: StageState,
    ) -> WholeRun | str:
        """What the whole model gives; or why it raises."""
        model = stage.module.model
        with self._being_whole(stage, others):
            state = stage.state()
            try:
                give_remembered(model, remembered)
                calls = LayerCalls(stage.module.layout, model)
                with calls:
                    numbers = numbers_of_whole(stage, samples[0])
                self.problem = self.problem or calls.problem
                if self.problem is None and stage.module.is_last:
                    state.put_back()
                    self.problem = find_uneven_loss(stage, samples)
            except Exception as error:
                if is_of_memory(error):
                    raise
                return first_line(error)
            finally:
                state.put_back()
        return WholeRun(device=stage.device_kind, weights=0, numbers=numbers)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Inside, nothing warns: training itself will."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _keeping_gradients(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Afterwards, parameters have the gradients that they had: batches may be accumulated."""
    kept = [(p, p.grad) for module in modules for p in module.parameters(recurse=False)]
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _free_bytes(device: torch.device) -> float:
    """The memory that one rank may use now."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    if not info.exists():
        return float("inf")
    line = next(each for each in info.read_text().splitlines() if each.startswith("MemAvailable"))
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return float(line.split()[1]) * 1024 / num_ranks
