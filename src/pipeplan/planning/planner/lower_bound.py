"""Lower bounds on the time of all plans: the certificate that comes with a plan.

There are three. Each holds for every plan with even shares and without recomputation
(docs/theory.md has the proofs):

- exact-sets: the least fixed-plan bound over all cuts and all sets of devices
  (`_core/plan_on_sets.cpp`); for small clusters only;
- relaxed: the same, but it knows only the number of devices in a set, and takes the best links that
  a set of this size could have (`_core/relaxed_bound.cpp`);
- work: all work divided by the speed of all devices together.
"""

from collections.abc import Sequence

import numpy as np

from pipeplan import _core
from pipeplan.cost import CostModel

__all__ = ["bucket_sizes", "relaxed_bound_ms", "work_bound_ms"]

EXACT_SIZES_UPTO = 32
"""Up to this number of devices every set size counts by itself; beyond, in groups."""


def work_bound_ms(cost: CostModel, num_microbatches: int) -> float:
    """All microbatches' work spread over all devices, without any loss."""
    work_ms = float((cost.forward_ms_L + cost.backward_ms_L).sum())
    return num_microbatches * work_ms / float(cost.speed_D.sum())


def relaxed_bound_ms(
    instance: _core.Instance, limit_ms: float, num_threads: int, deadline: float = np.inf
) -> float:
    """The bound from optimistic links; at most `limit_ms`, the time of a known plan."""
    num_devices = instance.num_devices
    capacity = 8 if num_devices <= EXACT_SIZES_UPTO else 1
    buckets = np.array(bucket_sizes(num_devices), dtype=np.int32)
    return _core.relaxed_bound(instance, buckets, capacity, limit_ms, num_threads, deadline)


def bucket_sizes(num_devices: int) -> Sequence[int]:
    """The largest set size of each group; groups of one size up to 8, wider ones beyond."""
    if num_devices <= EXACT_SIZES_UPTO:
        return range(1, num_devices + 1)
    sizes = list(range(1, 9))
    while sizes[-1] < num_devices:
        sizes.append(min(num_devices, sizes[-1] + max(1, sizes[-1] // 6)))
    return sizes
