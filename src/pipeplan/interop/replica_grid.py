"""Frameworks number ranks in a grid: every group has the same number of replicas.

Rank = group * replicas + replica, as in Megatron-LM, torchtitan and DeepSpeed: the ranks of a group
stand side by side. Replica i of a stage talks to replica i of the next one. Most plans have one
stage a group.
"""

from dataclasses import dataclass

from pipeplan.documents.text import only_printable
from pipeplan.interop.exported import CannotExport
from pipeplan.pipeline import Plan, Stage

__all__ = ["ReplicaGrid", "require_grid", "require_same_recompute", "title_of"]

PAIRS_NOTE = (
    "replica i of a stage sends to replica i of the next;"
    " the plan's times count transfers between all pairs"
)
SAME_SHARE = 1e-9
LONGEST_NAME = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGrid:
    """Groups with equally many replicas."""

    num_groups: int
    """Ranks of the pipeline."""
    num_replicas: int
    samples_each: int
    """Samples of a microbatch that each replica takes."""
    rank_lines: tuple[str, ...]
    """For people: which device each rank has to run on."""

    @property
    def pair_notes(self) -> list[str]:
        """How transfers differ from the plan's, if there are any between replicas."""
        return [PAIRS_NOTE] if self.num_groups > 1 and self.num_replicas > 1 else []


def require_grid(plan: Plan) -> ReplicaGrid:
    """The grid that a plan's stages form; refused if they form none."""
    counts = [stage.num_replicas for stage in plan.stages]
    if len(set(counts)) > 1:
        shown = ", ".join(map(str, counts[:12])) + (", ..." if len(counts) > 12 else "")
        raise CannotExport(f"stages have {shown} replicas, and all need the same number")
    for index, stage in enumerate(plan.stages):
        if not _is_even(stage):
            raise CannotExport(f"the replicas of stage {index} have different shares")
    samples, num_replicas = plan.model.microbatch_size, counts[0]
    if samples % num_replicas:
        each = "1 sample" if samples == 1 else f"{samples} samples"
        raise CannotExport(
            f"a microbatch of {each} cannot be divided among {num_replicas} replicas"
            " (a larger microbatch_size may help)"
        )
    return ReplicaGrid(
        num_groups=len(plan.groups),
        num_replicas=num_replicas,
        samples_each=samples // num_replicas,
        rank_lines=_rank_lines(plan),
    )


def _is_even(stage: Stage) -> bool:
    shares = stage.device_shares
    return max(shares) - min(shares) <= SAME_SHARE


def _rank_lines(plan: Plan) -> tuple[str, ...]:
    devices = plan.cluster.devices
    lines, rank = [], 0
    for group in plan.groups:
        names = [_short(devices[device].name) for device in group.devices]
        last = rank + len(names) - 1
        ranks = f"rank {rank}" if last == rank else f"ranks {rank}-{last}"
        ranges = [plan.stages[stage].layers for stage in group.stages]
        layers = f"layers {', '.join(f'{each.start}-{each.stop - 1}' for each in ranges)}"
        stages = f"stage{'s' * (len(group.stages) > 1)} {', '.join(map(str, group.stages))}"
        lines.append(f"{ranks}: {stages}, {layers}, on {', '.join(names)}")
        rank = last + 1
    return tuple(lines)


def title_of(plan: Plan, what: str) -> str:
    """One line that says what a file holds, with nothing in it that a program could obey."""
    names = f"{_short(plan.model.name)} on {_short(plan.cluster.name)}"
    return f"{what} for {names}, planned by pipeplan ({_short(plan.planner)})."


def _short(name: str) -> str:
    """A name that is safe within a comment or a docstring."""
    plain = only_printable(name).replace("\\", "?").replace('"', "?")
    return plain if len(plain) <= LONGEST_NAME else f"{plain[: LONGEST_NAME - 3]}..."


def require_same_recompute(plan: Plan) -> bool:
    """Whether all stages recompute; refused if only some of them do."""
    recompute = {stage.recompute for stage in plan.stages}
    if len(recompute) > 1:
        raise CannotExport("some stages recompute activations and others do not")
    return recompute.pop()
