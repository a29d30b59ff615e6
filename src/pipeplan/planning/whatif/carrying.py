"""The old plan on a changed cluster: the same stages and orders, without lost devices."""

from dataclasses import dataclass, replace

from pipeplan.checker import memory_excesses
from pipeplan.errors import PipeplanError
from pipeplan.pipeline import Plan, Stage
from pipeplan.planning.whatif.changed_cluster import ChangedCluster
from pipeplan.replaying import replay_plan

__all__ = ["Carried", "carry_over"]

WHOLE_WITHIN = 1e-6
"""How far from a whole number of samples a rounded share may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The old plan on the new cluster, or why it does not run there."""

    plan: Plan | None = None
    problem: str | None = None
    """Why it does not run; with a plan: why it does not fit."""


def carry_over(plan: Plan, changed: ChangedCluster, *, ignore_memory: bool = False) -> Carried:
    """The old plan as it runs on the new cluster, with its new figures.

    A stage that loses some of its replicas goes on with the others. A stage that loses all of them
    stops the plan, and so does a link without a path.
    """
    stages = []
    shares_of: dict[frozenset[int], dict[int, float]] = {}
    for index, stage in enumerate(plan.stages):
        kept = [p for p, device in enumerate(stage.devices) if device in changed.index_of]
        if not kept:
            names = ", ".join(plan.cluster.devices[device].name for device in stage.devices)
            return Carried(problem=f"stage {index} has no device left ({names})")
        moved_stage = _stage_on(stage, kept, changed, plan.model.microbatch_size)
        stages.append(_as_in_group(moved_stage, shares_of))
    moved = replace(plan, cluster=changed.cluster, stages=tuple(stages), predicted=None)
    try:
        carried = replay_plan(moved).plan
    except PipeplanError as problem:
        return Carried(problem=str(problem))
    excesses = [] if ignore_memory else memory_excesses(carried)
    return Carried(plan=carried, problem=excesses[0] if excesses else None)


def _stage_on(stage: Stage, kept: list[int], changed: ChangedCluster, samples: int) -> Stage:
    devices = tuple(changed.index_of[stage.devices[position]] for position in kept)
    if len(kept) == len(stage.devices):
        return replace(stage, devices=devices)
    return replace(stage, devices=devices, shares=_shares_left(stage, kept, samples))


def _as_in_group(stage: Stage, shares_of: dict[frozenset[int], dict[int, float]]) -> Stage:
    """The stage with the shares that its devices have in their first stage."""
    mine = dict(zip(stage.devices, stage.device_shares, strict=True))
    first = shares_of.setdefault(frozenset(stage.devices), mine)
    if first is mine or stage.shares is None:
        return stage
    return replace(stage, shares=tuple(first[device] for device in stage.devices))


def _shares_left(stage: Stage, kept: list[int], samples: int) -> tuple[float, ...] | None:
    """The shares of the replicas that are left: even ones stay even, and whole samples whole."""
    old = [stage.device_shares[position] for position in kept]
    if all(_is_whole(share, samples) for share in stage.device_shares) and len(kept) <= samples:
        spread = (max(stage.device_shares) - min(stage.device_shares)) * samples
        is_even = spread < 1 + WHOLE_WITHIN
        counts = _whole_counts([1.0] * len(old) if is_even else old, samples)
        even = len(set(counts)) == 1
        return None if even else tuple(count / samples for count in counts)
    if stage.shares is None:
        return None
    return tuple(share / sum(old) for share in old)


def _is_whole(share: float, samples: int) -> bool:
    return abs(share * samples - round(share * samples)) < WHOLE_WITHIN


def _whole_counts(weights: list[float], samples: int) -> list[int]:
    """Whole samples in proportion to the weights, at least one each; ties go to the first."""
    counts = [max(1, int(samples * weight / sum(weights))) for weight in weights]
    while sum(counts) > samples:  # at least one each was too many
        most = max(
            (i for i in range(len(weights)) if counts[i] > 1),
            key=lambda i: (counts[i] / weights[i], i),
        )
        counts[most] -= 1
    while sum(counts) < samples:
        # The next sample goes to the device that would then have the least for its weight.
        best = min(range(len(weights)), key=lambda i: ((counts[i] + 1) / weights[i], i))
        counts[best] += 1
    return counts
