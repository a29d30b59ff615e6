"""Where the search for chains of groups starts: regular shapes with even work, and known plans.

Groups are runs of a device order, equally large. The chain goes round them once or more
(interleaved), or down and up (V, W, ...)::

    interleaved   0 1 2 0 1 2         down and up   0 1 2 2 1 0
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from pipeplan import _core
from pipeplan.cost import CostModel, Floats
from pipeplan.pipeline import Stage, groups_of
from pipeplan.planning.limits import Limits
from pipeplan.planning.planner.device_order import connected_parts
from pipeplan.planning.planner.device_orders import device_orders
from pipeplan.planning.planner.starts import with_ends

__all__ = ["chain_of", "ends_by_memory", "even_ends", "orders_of", "regular_chains"]

NUM_ORDERS = 3
NUM_PARTS = 4
"""Of a cluster without paths between its parts, the fastest."""
MAX_ROUNDS = 4


def regular_chains(
    model: _core.ChainModel,
    cost: CostModel,
    *,
    max_positions: int,
    is_split: bool,
    limits: Limits | None = None,
    by_memory: bool = False,
) -> list[_core.ChainPlan]:
    """Regular chains that begin and end on the devices asked for.

    Each stage has work in proportion to the speed of its devices, or, `by_memory`, bytes in
    proportion to their memory.
    """
    ends_of = ends_by_memory if by_memory else even_ends
    plans: list[_core.ChainPlan] = []
    num_layers = len(cost.forward_ms_L)
    orders = orders_of(cost)
    if limits is not None:
        orders = list(dict.fromkeys(with_ends(order, limits) for order in orders))
    for order in orders:
        num_devices = len(order)
        for size in _group_counts(num_devices):
            cuts = [num_devices * n // size for n in range(size + 1)]
            devices = [list(order[a:b]) for a, b in pairwise(cuts)]
            if max(map(len, devices)) > cost.max_replicas:
                devices = [group[: cost.max_replicas] for group in devices]
            for group in _shapes(size, min(max_positions, MAX_ROUNDS), limits):
                if len(group) <= num_layers:
                    end_layer = ends_of(cost, [devices[g] for g in group])
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


def orders_of(cost: CostModel) -> list[tuple[int, ...]]:
    """Orders of all devices, or of those of one part where there is no path to the others."""
    own = tuple(range(len(cost.speed_D)))
    by_cuts = len(own) <= 128
    made = device_orders(cost, by_cuts=by_cuts, most=NUM_ORDERS)
    orders = list(dict.fromkeys((own, *made)))[:NUM_ORDERS]
    parts = connected_parts(cost)
    if len(parts) == 1:
        return orders
    parts.sort(key=lambda part: -float(cost.speed_D[part].sum()))
    within = (
        tuple(u for u in order if u in part) for part in parts[:NUM_PARTS] for order in orders
    )
    return list(dict.fromkeys(within))


def _group_counts(num_devices: int) -> list[int]:
    counts = {n for n in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if n <= num_devices}
    return sorted(counts | ({num_devices} if num_devices <= 64 else set()))


def _shapes(size: int, max_rounds: int, limits: Limits | None) -> Iterator[list[int]]:
    """Rounds and waves over the groups, the last of them shorter where fewer stages are asked for.

    Those with fewer stages than asked for are left out: no search could start there.
    """
    least, most = (limits.min_stages, limits.max_stages) if limits is not None else (1, None)
    down = list(range(size))
    for rounds in range(1, max_rounds + 1):
        if most is not None and most <= size * (rounds - 1):
            return
        if size * rounds < least:
            continue
        yield (down * rounds)[:most]
        if rounds > 1:
            yield [g for n in range(rounds) for g in (down[::-1] if n % 2 else down)][:most]


def even_ends(cost: CostModel, sets: Sequence[Sequence[int]]) -> list[int]:
    """One past the last layer of each stage, so that each takes about as long as the others."""
    speeds = [len(devices) * float(cost.speed_D[list(devices)].min()) for devices in sets]
    return _ends_in_proportion(cost.forward_ms_L + cost.backward_ms_L, speeds)


def ends_by_memory(cost: CostModel, sets: Sequence[Sequence[int]]) -> list[int]:
    """The same, so that each fills about the same part of its memory.

    Stages on the same devices share the memory. Activations of one microbatch count.
    """
    known = [device.memory_gb for device in cost.cluster.devices]
    most = max((gb for gb in known if gb is not None), default=1.0)
    memory_gb = [most if gb is None else gb for gb in known]
    visits = Counter(map(tuple, sets))
    rooms = [min(memory_gb[u] for u in devices) / visits[tuple(devices)] for devices in sets]
    state = 1 + cost.model.optimizer_bytes_per_parameter_byte
    return _ends_in_proportion(cost.parameter_bytes_L * state + cost.activation_bytes_L, rooms)


def _ends_in_proportion(values_L: Floats, weights: Sequence[float]) -> list[int]:
    shares = np.array(weights)
    goals = np.cumsum(shares / shares.sum())
    sums = values_L.cumsum()
    parts = sums / sums[-1] if sums[-1] > 0 else np.linspace(0, 1, len(sums))
    ends: list[int] = []
    for n, goal in enumerate(goals[:-1]):
        end = int(np.abs(parts - goal).argmin()) + 1
        least = (ends[-1] if ends else 0) + 1
        ends.append(min(max(end, least), len(parts) - (len(weights) - 1 - n)))
    return [*ends, len(parts)]
