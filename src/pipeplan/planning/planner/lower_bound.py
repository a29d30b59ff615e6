"""How fast any plan at all could be: the certificate that comes with a plan.

Five bounds (docs/theory.md has the proofs). Where all devices are equally fast, each is valid for
every plan with even shares and without recomputation; where speeds differ, for every plan:

- exact-sets: the least fixed-plan bound over all cuts and all sets of devices
  (`_core/plan_on_sets.cpp`), up to where its states can be counted; then single plans are
  looked at;
- near-sets: the same with small sets only, of larger ones the size (`_core/near_topology.hpp`);
- relaxed: the same with links as good as the sizes of sets allow (`_core/relaxed_bound.cpp`);
- prices: no plan within a time can pay for its devices, each of which has a price
  (`_core/price_bound.cpp`), where speeds differ;
- work: all the work over all the speed there is.
"""

from collections.abc import Sequence

import numpy as np

from pipeplan import _core
from pipeplan.cost import CostModel
from pipeplan.pipeline import Bound, BoundLimit, BoundScope
from pipeplan.planning.problem import Problem

__all__ = ["bucket_sizes", "certificate", "relaxed_bound_ms", "work_bound_ms"]

EXACT_SIZES_UPTO = 32
"""More devices than this, and set sizes are taken in groups."""
INSTANT_MS = 1e-9
MAX_RELAXED_STEPS = 1.6e9
"""Devices times groups of sizes times layers squared: about two nanoseconds each."""


def work_bound_ms(cost: CostModel, num_microbatches: int) -> float:
    """All microbatches' work spread over all devices, without any loss."""
    cost = cost.with_least_times()
    work_ms = float((cost.forward_ms_L + cost.backward_ms_L).sum())
    return num_microbatches * work_ms / float(cost.speed_D.sum())


def certificate(problem: Problem, bound_ms: float, iteration_ms: float) -> Bound:
    """The bound as a plan carries it.

    Ends within an instant of 1e-9 ms count as one, so everything that runs may be shorter by that
    much than its length (rule 7). Each term of the bounds adds up at most 2M blocks or transfers
    and one way through all stages and back; by so many instants the bound is lowered.
    """
    most_stages = min(problem.model.num_layers, problem.cluster.num_devices)
    num_terms = 2 * problem.num_microbatches + 4 * most_stages + 8
    lower_bound_ms = min(bound_ms, iteration_ms) - num_terms * INSTANT_MS
    return Bound(
        lower_bound_ms=max(0.0, lower_bound_ms),
        scope=BoundScope.ANY if problem.any_shares else BoundScope.EVEN_SHARES,
        limits=_bound_limits(problem),
    )


def _bound_limits(problem: Problem) -> tuple[BoundLimit, ...]:
    """The limits that the bounds count on."""
    limits = problem.limits
    used = {
        BoundLimit.WHOLE_SAMPLES: limits.whole_samples,
        BoundLimit.MEMORY: problem.limits_memory,
    }
    return tuple(limit for limit, is_used in used.items() if is_used)


def relaxed_bound_ms(
    instance: _core.Instance,
    buckets: Sequence[int],
    limit_ms: float,
    num_threads: int,
    deadline: float = np.inf,
    most_points: int = 8,
) -> float:
    """The bound from optimistic links; at most `limit_ms`, the time of a plan that is known.

    Fronts have up to `most_points` on small clusters, one on large ones.
    """
    capacity = most_points if instance.num_devices <= EXACT_SIZES_UPTO else 1
    sizes = np.array(buckets, dtype=np.int32)
    return _core.relaxed_bound(instance, sizes, capacity, limit_ms, num_threads, deadline)


def bucket_sizes(num_devices: int, num_layers: int) -> Sequence[int] | None:
    """The largest sizes of the groups in which set sizes are taken.

    One each up to 32 devices, wider ones beyond 8 on larger clusters, still wider ones for long
    models; None where even that would take too long.
    """
    for sizes in (_fine_buckets(num_devices), _doubling_buckets(num_devices)):
        if num_devices * len(sizes) * num_layers**2 <= MAX_RELAXED_STEPS:
            return sizes
    return None


def _fine_buckets(num_devices: int) -> list[int]:
    if num_devices <= EXACT_SIZES_UPTO:
        return list(range(1, num_devices + 1))
    sizes = list(range(1, 9))
    while sizes[-1] < num_devices:
        sizes.append(min(num_devices, sizes[-1] + max(1, sizes[-1] // 6)))
    return sizes


def _doubling_buckets(num_devices: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < num_devices:
        sizes.append(min(num_devices, 2 * sizes[-1]))
    return sizes
