"""Where local search starts: the best plans that really differ, and plain ones.

The best plans of the recursions are often near copies of one another: searches from them end in the
same place. Plain starts, even splits on the first devices of some order, are far from good, and now
and then a search from one of them ends in a better place than all others.
"""

import random
from collections.abc import Sequence

from pipeplan.cost import CostModel
from pipeplan.pipeline import Stage
from pipeplan.planning.limits import Limits
from pipeplan.planning.planner.settings import SearchStep, Starts

__all__ = ["different_plans", "even_split", "plain_plan", "starts_of", "with_ends"]

NEAR_COPY = 0.5
"""Plans with at least this part of their device sets in common are near copies."""


def starts_of(
    step: SearchStep,
    ranked: Sequence[tuple[Stage, ...]],
    cost: CostModel,
    orders: Sequence[tuple[int, ...]],
    rng: random.Random,
) -> Sequence[tuple[Stage, ...]]:
    """The plans from which a step of local search sets out; `ranked` has the best ones first."""
    match step.starts:
        case Starts.PLAIN:
            return [plain_plan(cost, orders, rng) for _ in range(step.num_searches)]
        case Starts.DIFFERENT:
            return different_plans(ranked, step.num_searches)
        case Starts.MIXED:
            half = step.num_searches // 2
            plain = [plain_plan(cost, orders, rng) for _ in range(step.num_searches - half)]
            return [*different_plans(ranked, half), *plain]
        case Starts.BEST:
            return ranked[: step.num_searches]


def different_plans(ranked: Sequence[tuple[Stage, ...]], count: int) -> list[tuple[Stage, ...]]:
    """The first plans of a ranking that are no near copies; filled up with the next ones."""
    chosen: list[tuple[Stage, ...]] = []
    for plan in ranked:
        if len(chosen) == count:
            return chosen
        if not any(_are_near_copies(plan, other) for other in chosen):
            chosen.append(plan)
    rest = (plan for plan in ranked if plan not in chosen)
    return [*chosen, *(plan for plan, _ in zip(rest, range(count - len(chosen)), strict=False))]


def _are_near_copies(one: tuple[Stage, ...], other: tuple[Stage, ...]) -> bool:
    sets = {frozenset(stage.devices) for stage in one}
    common = sum(frozenset(stage.devices) in sets for stage in other)
    return common >= NEAR_COPY * max(len(one), len(other))


def with_ends(order: tuple[int, ...], limits: Limits) -> tuple[int, ...]:
    """The order with the devices of `first_on` and `last_on` at its ends."""
    first, last = limits.first_on, limits.last_on
    middle = [device for device in order if device not in (first, last)]
    front = [] if first is None else [first]
    back = [] if last is None or last == first else [last]
    return (*front, *middle, *back)


def even_split(order: Sequence[int], num_layers: int) -> tuple[Stage, ...]:
    """As many stages as there can be, one device each, with equally many layers."""
    num_stages = min(num_layers, len(order))
    cuts = [num_layers * n // num_stages for n in range(num_stages + 1)]
    return tuple(
        Stage(layers=range(cuts[n], cuts[n + 1]), devices=(order[n],)) for n in range(num_stages)
    )


def plain_plan(
    cost: CostModel, orders: Sequence[tuple[int, ...]], rng: random.Random
) -> tuple[Stage, ...]:
    """Even work on even sets: some number of stages, on all or half of the devices of an order."""
    order = list(rng.choice(orders))
    if rng.random() < 0.25:
        rng.shuffle(order)
    num_layers, num_devices = len(cost.forward_ms_L), len(order)
    most = min(num_layers, num_devices)
    num_stages = rng.choice([n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if n <= most] or [1])
    used = num_devices if rng.random() < 0.5 else num_devices // 2
    replicas = max(1, min(used // num_stages, cost.max_replicas))
    ends = _even_ends(cost, num_stages)
    return tuple(
        Stage(
            layers=range(first, end),
            devices=tuple(sorted(order[n * replicas : (n + 1) * replicas])),
        )
        for n, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
    )


def _even_ends(cost: CostModel, num_stages: int) -> list[int]:
    """One past the last layer of each stage, so that all have about the same work."""
    work_ms = (cost.forward_ms_L + cost.backward_ms_L).cumsum()
    num_layers = len(work_ms)
    ends: list[int] = []
    for n in range(1, num_stages):
        even = int(work_ms.searchsorted(work_ms[-1] * n / num_stages)) + 1
        least = (ends[-1] if ends else 0) + 1
        ends.append(min(max(even, least), num_layers - (num_stages - n)))
    return [*ends, num_layers]
