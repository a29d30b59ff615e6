"""Whether a problem's layers fit at all, in a fraction of the time of planning.

Only memory counts. Each stage keeps its activations and holds one microbatch, which needs the least
(`_core/front_room.hpp`). Links, constraints and times do not count, so a problem that fits may have
no plan. If devices differ, one that does not fit on these orders may fit on others.
"""

import random
from collections.abc import Iterable, Iterator

import numpy as np

from pipeplan import _core
from pipeplan.planning.planner.settings import NUM_RANDOM_ORDERS, Sizes, replica_counts
from pipeplan.planning.problem import Problem

__all__ = ["may_fit", "may_fit_on", "orders_by_memory", "orders_to_fit"]

MAX_ALL_SIZES = 64
"""Devices up to which stages of every size are looked at."""


def may_fit(problem: Problem) -> bool:
    """Whether all layers fit on the devices in their own order, or by their memory."""
    if not problem.limits_memory or problem.options.shard_optimizer:
        return True
    problem = problem.within_samples()
    own = tuple(range(problem.cluster.num_devices))
    orders = dict.fromkeys((own, *orders_by_memory(problem)))
    return may_fit_on(problem.kernel_instance(), orders, problem.deadline)


def orders_by_memory(problem: Problem) -> list[tuple[int, ...]]:
    """The device with the most memory first, and last."""
    rooms_gb = [device.memory_gb or np.inf for device in problem.cluster.devices]
    roomiest = tuple(sorted(range(len(rooms_gb)), key=lambda u: -rooms_gb[u]))
    return [roomiest, roomiest[::-1]]


def orders_to_fit(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Orders by memory, then random ones."""
    yield from orders_by_memory(problem)
    rng, num_devices = random.Random(problem.seed), problem.cluster.num_devices
    for _ in range(NUM_RANDOM_ORDERS):
        yield tuple(rng.sample(range(num_devices), num_devices))


def may_fit_on(
    instance: _core.Instance, orders: Iterable[tuple[int, ...]], deadline: float = np.inf
) -> bool:
    """Whether all layers fit on one of these orders of the devices."""
    num_devices = instance.num_devices
    kind = Sizes.ALL if num_devices <= MAX_ALL_SIZES else Sizes.QUARTERS
    sizes = np.array(replica_counts(kind, num_devices), dtype=np.int32)
    return any(_core.fits_on_order(instance.on_devices(o), sizes, deadline) for o in orders)
