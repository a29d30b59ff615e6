"""The C++ kernels: plain arrays in, plain arrays out, the GIL released.

Each has a plain Python oracle in `tests/oracles.py` that says what it computes.
"""

from pipeplan._core._kernels import (
    least_sum,
    local_search,
    min_cut,
    partition,
    plan_bound,
    plan_on_order,
    plan_on_sets,
    relaxed_bound,
    run_list,
    run_schedule,
)

__all__ = [
    "least_sum",
    "local_search",
    "min_cut",
    "partition",
    "plan_bound",
    "plan_on_order",
    "plan_on_sets",
    "relaxed_bound",
    "run_list",
    "run_schedule",
]
