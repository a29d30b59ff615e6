"""What was measured, and where it parts from the prediction.

Times are those of the plan: what this machine took, divided by the time factor. The iteration that
is looked at block by block is the one with the median time.

A block has a *slip*: how much longer than predicted its start came after what it waited for. One
that waited for its input slips by what the transfer took longer. One that began when its device was
free slips by what it waited nevertheless. So slips say where a delay comes from, and not where it
is only passed on.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipeplan.pipeline import Block, GroupTimeline, Kind, Plan, Timeline
from pipeplan.testbed.orders import IterationTimes, RankTimes, Way
from pipeplan.testbed.scaling import Scale

__all__ = ["Measurement", "Slip", "Span", "parse_block"]

MS_IN_S = 1e3
SAME_MS = 1e-6
NUM_SLIPS = 5
FEEDERS = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
"""Blocks whose gradients the stage before waits for."""


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when, in the plan's milliseconds."""

    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slip:
    """Something that took longer, or less long, than predicted."""

    what: str
    predicted_ms: float
    measured_ms: float

    @property
    def slip_ms(self) -> float:
        """The difference."""
        return self.measured_ms - self.predicted_ms


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A plan as it was predicted, and as it ran. Without `slots`, because answers are kept."""

    plan: Plan
    timeline: Timeline | GroupTimeline
    """The prediction."""
    scale: Scale
    way: Way
    note: str
    """What kept the machine from the better way; empty where nothing did."""
    ranks: tuple[RankTimes, ...]

    @property
    def predicted_ms(self) -> float:
        """The iteration's time by the cost model."""
        return self.timeline.iteration_ms

    @cached_property
    def iterations_ms(self) -> tuple[float, ...]:
        """The time of each iteration: from the end of the one before, on all ranks, to its own end.

        Ranks begin an iteration one after another, while others still end the one before.
        """
        return tuple(
            self._plan_ms(
                max(times.end_s for times in all_times)
                - max(times.before_end_s for times in all_times)
            )
            for all_times in zip(*(rank.iterations for rank in self.ranks), strict=True)
        )

    @property
    def measured_ms(self) -> float:
        """The median of the iterations."""
        return statistics.median(self.iterations_ms)

    @property
    def error(self) -> float:
        """By which fraction the prediction was too short."""
        return self.measured_ms / self.predicted_ms - 1

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of each iteration."""
        return tuple(times.loss for times in self.ranks[0].iterations)

    @property
    def over_ms(self) -> float:
        """By how much the real computation of some block took longer than its time, at most."""
        return max(
            self._plan_ms(block.over_s)
            for rank in self.ranks
            for times in rank.iterations
            for block in times.blocks
        )

    # ------------------------------------------------------------------ the median iteration

    @cached_property
    def median_iteration(self) -> int:
        """The number of an iteration with the median time, or the next shorter one."""
        ranked = sorted(range(len(self.iterations_ms)), key=lambda i: self.iterations_ms[i])
        return ranked[(len(ranked) - 1) // 2]

    @cached_property
    def shown(self) -> tuple[tuple[RankTimes, IterationTimes], ...]:
        """Each rank with its times in that iteration."""
        return tuple((rank, rank.iterations[self.median_iteration]) for rank in self.ranks)

    @cached_property
    def start_s(self) -> float:
        """When that iteration began: when the one before had ended."""
        return max(times.before_end_s for _, times in self.shown)

    @cached_property
    def blocks(self) -> Mapping[Block, Span]:
        """When each stage ran each block, by the last of its replicas."""
        spans: dict[Block, Span] = {}
        for _, times in self.shown:
            for each in times.blocks:
                block = parse_block(each.name)
                start_ms, end_ms = self.moment_ms(each.start_s), self.moment_ms(each.end_s)
                old = spans.get(block)
                if old is not None:
                    start_ms, end_ms = max(start_ms, old.start_ms), max(end_ms, old.end_ms)
                spans[block] = Span(start_ms, end_ms)
        return spans

    @cached_property
    def arrivals_ms(self) -> Mapping[Block, float]:
        """When each block's input had arrived, at the last of its replicas."""
        found: dict[Block, float] = {}
        for _, times in self.shown:
            for each in times.blocks:
                if each.arrival_s:
                    block = parse_block(each.name)
                    moment_ms = self.moment_ms(each.arrival_s)
                    found[block] = max(found.get(block, 0.0), moment_ms)
        return found

    @cached_property
    def reduce_ends_ms(self) -> tuple[float, ...]:
        """When each stage's gradients were summed; with several stages, all of its group's."""
        ends_ms = [0.0] * self.plan.num_stages
        for rank, times in self.shown:
            end_ms = self.moment_ms(times.reduce_end_s)
            for stage in rank.stages:
                ends_ms[stage] = max(ends_ms[stage], end_ms)
        return tuple(ends_ms)

    def moment_ms(self, moment_s: float) -> float:
        """A moment of the shown iteration, from its start, in the plan's milliseconds."""
        return self._plan_ms(moment_s - self.start_s)

    def _plan_ms(self, seconds: float) -> float:
        return seconds * MS_IN_S / self.scale.time_factor

    # ------------------------------------------------------------------ where they part

    @cached_property
    def slips(self) -> tuple[Slip, ...]:
        """The largest slips, the largest first."""
        found = sorted(self._all_slips(), key=lambda slip: (-abs(slip.slip_ms), slip.what))
        return tuple(found[:NUM_SLIPS])

    def _all_slips(self) -> Iterator[Slip]:
        ends_ms = {timed.block: timed.end_ms for stage in self.timeline.blocks for timed in stage}
        groups = self.plan.groups
        for order, group in zip(self.timeline.blocks, groups, strict=True):
            before = None
            for timed in order:
                measured = self.blocks.get(timed.block)
                if measured is None:
                    continue
                feeder = self._feeder(timed.block)
                is_fed = before is None or timed.start_ms > ends_ms[before] + SAME_MS
                cause = feeder if is_fed else before
                if cause is not None:
                    yield Slip(
                        what=f"{timed.block} after {cause}"
                        + (", with its transfer" if is_fed else ""),
                        predicted_ms=timed.start_ms - ends_ms[cause],
                        measured_ms=measured.start_ms - self.blocks[cause].end_ms,
                    )
                before = timed.block
            if before is not None and group.num_replicas > 1:
                ends = [r.end_ms for r in self.timeline.all_reduces if r.stage in group.stages]
                first = group.stages[0]
                yield Slip(
                    what="all-reduce of "
                    + (
                        f"stage {first}"
                        if len(group.stages) == 1
                        else f"group {groups.index(group)}"
                    ),
                    predicted_ms=max(ends) - ends_ms[before],
                    measured_ms=self.reduce_ends_ms[first] - self.blocks[before].end_ms,
                )

    def _feeder(self, block: Block) -> Block | None:
        """The block whose result this one needs, if it is of another stage."""
        if block.kind is Kind.WEIGHT_GRADIENT:
            return None
        stage = block.stage - 1 if block.kind is Kind.FORWARD else block.stage + 1
        kinds = FEEDERS if block.kind is not Kind.FORWARD else (Kind.FORWARD,)
        found = [Block(kind, stage, block.microbatch) for kind in kinds]
        return next((each for each in found if each in self.blocks), None)

    def document(self) -> dict[str, Any]:
        """The measurement for machines."""
        return {
            "predicted_ms": self.predicted_ms,
            "measured_ms": self.measured_ms,
            "iterations_ms": list(self.iterations_ms),
            "error": self.error,
            "way": str(self.way),
            "note": self.note,
            "time_factor": self.scale.time_factor,
            "byte_factor": self.scale.byte_factor,
            "rows": self.scale.rows,
            "devices": len(self.ranks),
            "planner": self.plan.planner,
            "losses": list(self.losses),
            "slips": [
                {
                    "what": slip.what,
                    "predicted_ms": slip.predicted_ms,
                    "measured_ms": slip.measured_ms,
                }
                for slip in self.slips
            ],
            "blocks": [
                {
                    "block": str(timed.block),
                    "predicted_start_ms": timed.start_ms,
                    "predicted_end_ms": timed.end_ms,
                    "measured_start_ms": self.blocks[timed.block].start_ms,
                    "measured_end_ms": self.blocks[timed.block].end_ms,
                }
                for stage in self.timeline.blocks
                for timed in stage
                if timed.block in self.blocks
            ],
        }


def parse_block(name: str) -> Block:
    """The block of a name such as `2F3`."""
    kind = next(letter for letter in name if letter.isalpha())
    stage, _, microbatch = name.partition(kind)
    return Block(Kind(kind), int(stage), int(microbatch))
