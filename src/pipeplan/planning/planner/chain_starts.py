"""Where the search for chains of groups starts: regular shapes with even work, and known plans.

Groups are runs of a device order, equally large. The chain goes round them once or more
(interleaved), or down and up (V, W, ...)::

    interleaved   0 1 2 0 1 2         down and up   0 1 2 2 1 0
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from pipeplan import _core
from pipeplan.cost import CostModel
from pipeplan.pipeline import Stage, groups_of
from pipeplan.planning.limits import Limits
from pipeplan.planning.planner.device_orders import device_orders
from pipeplan.planning.planner.starts import with_ends

__all__ = ["chain_of", "regular_chains"]

NUM_ORDERS = 3
MAX_ROUNDS = 4


def regular_chains(
    model: _core.ChainModel,
    cost: CostModel,
    *,
    max_positions: int,
    is_split: bool,
    limits: Limits | None = None,
) -> list[_core.ChainPlan]:
    """Regular chains that begin and end on the devices asked for."""
    plans: list[_core.ChainPlan] = []
    num_devices, num_layers = len(cost.speed_D), len(cost.forward_ms_L)
    orders = _orders(cost)
    if limits is not None:
        orders = list(dict.fromkeys(with_ends(order, limits) for order in orders))
    for order in orders:
        for size in _group_counts(num_devices):
            cuts = [num_devices * n // size for n in range(size + 1)]
            devices = [list(order[a:b]) for a, b in pairwise(cuts)]
            if max(map(len, devices)) > cost.max_replicas:
                devices = [group[: cost.max_replicas] for group in devices]
            for group in _shapes(size, min(max_positions, MAX_ROUNDS), limits):
                if len(group) <= num_layers:
                    end_layer = _even_ends(cost, [devices[g] for g in group])
                    plans.append(
                        _core.ChainPlan(
                            model,
                            devices=devices,
                            group=group,
                            end_layer=end_layer,
                            is_split=is_split,
                        )
                    )
    return plans


def chain_of(model: _core.ChainModel, stages: Sequence[Stage], is_split: bool) -> _core.ChainPlan:
    """The chain of a plan's stages."""
    groups = groups_of(stages)
    return _core.ChainPlan(
        model,
        devices=[list(group.devices) for group in groups],
        group=[
            next(n for n, group in enumerate(groups) if index in group.stages)
            for index in range(len(stages))
        ],
        end_layer=[stage.layers.stop for stage in stages],
        is_split=is_split,
    )


def _orders(cost: CostModel) -> list[tuple[int, ...]]:
    own = tuple(range(len(cost.speed_D)))
    by_cuts = len(own) <= 128
    made = device_orders(cost, by_cuts=by_cuts, most=NUM_ORDERS)
    return list(dict.fromkeys((own, *made)))[:NUM_ORDERS]


def _group_counts(num_devices: int) -> list[int]:
    counts = {n for n in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if n <= num_devices}
    return sorted(counts | ({num_devices} if num_devices <= 64 else set()))


def _shapes(size: int, max_rounds: int, limits: Limits | None) -> Iterator[list[int]]:
    """Rounds and waves over the groups, the last of them shorter where fewer stages are asked for.

    Shapes with too few stages stay: moves of the search add some.
    """
    most = limits.max_stages if limits is not None else None
    down = list(range(size))
    for rounds in range(1, max_rounds + 1):
        if most is not None and most <= size * (rounds - 1):
            return
        yield (down * rounds)[:most]
        if rounds > 1:
            yield [g for n in range(rounds) for g in (down[::-1] if n % 2 else down)][:most]


def _even_ends(cost: CostModel, sets: Sequence[Sequence[int]]) -> list[int]:
    """One past the last layer of each stage, so that each takes about as long as the others."""
    speeds = np.array([len(devices) * cost.speed_D[list(devices)].min() for devices in sets])
    goals = np.cumsum(speeds / speeds.sum())
    work_ms = (cost.forward_ms_L + cost.backward_ms_L).cumsum()
    parts = work_ms / work_ms[-1] if work_ms[-1] > 0 else np.linspace(0, 1, len(work_ms))
    ends: list[int] = []
    for n, goal in enumerate(goals[:-1]):
        end = int(np.abs(parts - goal).argmin()) + 1
        least = (ends[-1] if ends else 0) + 1
        ends.append(min(max(end, least), len(parts) - (len(sets) - 1 - n)))
    return [*ends, len(parts)]
