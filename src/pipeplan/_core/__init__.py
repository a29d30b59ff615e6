"""The C++ kernels: classes that check themselves and plain arrays in, the GIL released.

Each has a plain Python oracle in `tests/oracles.py` that says what it computes. A kernel raises
ValueError for arguments that cannot be, KeyboardInterrupt at Ctrl-C, MemoryError where there is no
room, and `DeadlineError` at its deadline (seconds on the clock of `time.monotonic`).
"""

from pipeplan._core._kernels import (
    DeadlineError,
    Instance,
    PipelineCosts,
    PlacedPlan,
    device_classes,
    least_sum,
    local_search,
    min_cut,
    partition,
    plan_bound,
    plan_on_order,
    plan_on_sets,
    relaxed_bound,
    rule_times,
    run_list,
    run_schedule,
)

__all__ = [
    "DeadlineError",
    "Instance",
    "PipelineCosts",
    "PlacedPlan",
    "device_classes",
    "least_sum",
    "local_search",
    "min_cut",
    "partition",
    "plan_bound",
    "plan_on_order",
    "plan_on_sets",
    "relaxed_bound",
    "rule_times",
    "run_list",
    "run_schedule",
]
