"""Judges a schedule CSV that somebody wrote: order, deadlock, memory, and what ours would gain."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeplan.checker import memory_excesses
from pipeplan.errors import ScheduleError
from pipeplan.interop.torch_actions import Action, parse_actions, require_received_as_sent
from pipeplan.pipeline import Block, Kind, Plan, Schedule
from pipeplan.replaying import Replayed, replay_plan
from pipeplan.schedules import PORTFOLIO, SCHEDULES

__all__ = ["ScheduleVerdict", "check_schedule", "read_schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleVerdict:
    """A valid schedule on the stages of a plan, and the best order that we know for them."""

    replayed: Replayed
    """The plan with the schedule in place of its own."""
    memory_excesses: tuple[str, ...]
    our_order: str
    """`the plan's own order`, or the name of one of our schedules."""
    our_iteration_ms: float

    @property
    def gain(self) -> float:
        """By which fraction of its time our order is faster; 0 if it is not."""
        theirs_ms = self.replayed.plan.iteration_ms
        return max(0.0, 1 - self.our_iteration_ms / theirs_ms) if theirs_ms else 0.0


def check_schedule(plan: Plan, text: str) -> ScheduleVerdict:
    """The verdict on the schedule in a CSV text, run on the plan's stages.

    `ScheduleError` says what is wrong: blocks missing or out of order, a deadlock.
    """
    own = replay_plan(plan)
    schedule = read_schedule(text, len(plan.stages))
    microbatches = len(schedule.codes(0)) // 2
    theirs = replace(plan, schedule=schedule, microbatches=microbatches, predicted=None)
    replayed = replay_plan(theirs)
    orders = {
        rule: SCHEDULES[rule](replayed.costs, microbatches).iteration_ms for rule in PORTFOLIO
    }
    if microbatches == plan.microbatches:
        orders = {"the plan's own order": own.run.iteration_ms, **orders}
    our_order = min(orders, key=lambda name: orders[name])
    return ScheduleVerdict(
        replayed=replayed,
        memory_excesses=tuple(memory_excesses(replayed.plan)),
        our_order=our_order,
        our_iteration_ms=orders[our_order],
    )


def read_schedule(text: str, num_stages: int) -> Schedule:
    """The order of each stage in a CSV of torch; refused if torch would run something else."""
    rows = parse_actions(text)
    require_received_as_sent(rows)
    orders: dict[int, list[Action]] = {}
    for rank, row in enumerate(rows):
        stages = sorted({action.stage for action in row})
        if len(stages) != 1:
            found = f"stages {', '.join(map(str, stages[:8]))}" if stages else "no stage"
            raise ScheduleError(
                f"rank {rank} runs {found}; only schedules with one stage a rank are judged here"
                " (those of plans made with --positions 1 --no-split-backward)"
            )
        if stages[0] in orders:
            raise ScheduleError(f"rank {rank}: stage {stages[0]} is on another rank already")
        orders[stages[0]] = [action for action in row if "_" not in action.kind]
    if sorted(orders) != list(range(num_stages)):
        found = ", ".join(map(str, sorted(orders)[:8])) or "none"
        raise ScheduleError(f"has the stages {found}; the plan has 0..{num_stages - 1}")
    blocks = [_blocks(orders[stage], stage) for stage in range(num_stages)]
    num_microbatches = 1 + max((b.microbatch for order in blocks for b in order), default=-1)
    for stage, order in enumerate(blocks):
        _require_complete(order, stage, num_microbatches)
    _require_ascending(blocks[-1])
    return Schedule(blocks)


def _blocks(order: Sequence[Action], stage: int) -> list[Block]:
    """The blocks of one stage; a W right behind its I makes a whole backward, as in torch."""
    blocks: list[Block] = []
    pending: Action | None = None
    for action in order:
        if pending is not None:
            if action != Action(pending.stage, "W", pending.microbatch):
                raise ScheduleError(
                    f"stage {stage}: {action} stands between {pending} and its W;"
                    " split backwards are not judged here (--no-split-backward plans without them)"
                )
            blocks.append(Block(Kind.BACKWARD, stage, pending.microbatch))
            pending = None
        elif action.kind == "I":
            pending = action
        elif action.kind == "W":
            raise ScheduleError(f"stage {stage}: {action} has no I before it")
        else:
            blocks.append(Block(Kind(action.kind), stage, action.microbatch))
    if pending is not None:
        raise ScheduleError(f"stage {stage}: {pending} has no W behind it")
    return blocks


def _require_complete(order: Sequence[Block], stage: int, num_microbatches: int) -> None:
    seen: set[tuple[Kind, int]] = set()
    for block in order:
        key = (block.kind, block.microbatch)
        if key in seen:
            raise ScheduleError(f"stage {stage}: {block} stands twice")
        if block.kind is Kind.BACKWARD and (Kind.FORWARD, block.microbatch) not in seen:
            raise ScheduleError(f"stage {stage}: {block} stands before its forward")
        seen.add(key)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for microbatch in range(num_microbatches):
            if (kind, microbatch) not in seen:
                missing = Block(kind, stage, microbatch)
                raise ScheduleError(f"stage {stage}: {missing} is missing")


def _require_ascending(order: Sequence[Block]) -> None:
    forwards = [block for block in order if block.kind is Kind.FORWARD]
    for expected, block in enumerate(forwards):
        if block.microbatch != expected:
            raise ScheduleError(
                f"stage {block.stage}: {block} stands where {block.stage}F{expected} is expected;"
                " the last stage has to run its forwards in ascending order, or torch computes"
                " wrong gradients"
            )
