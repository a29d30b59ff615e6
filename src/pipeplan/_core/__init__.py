"""The C++ kernels. They take arrays and classes that validate themselves, and release the GIL.

Each kernel has a plain Python oracle in the tests that computes the same. A kernel raises
ValueError for wrong arguments, KeyboardInterrupt at Ctrl-C, MemoryError if memory runs out, and
`DeadlineError` at its deadline (seconds on the clock of `time.monotonic`).
"""

from pipeplan._core._kernels import (
    DeadlineError,
    Instance,
    PipelineCosts,
    PlacedPlan,
    PlanFlows,
    PlanLimits,
    SharedLinks,
    best_schedule,
    caps,
    device_classes,
    judge_plan,
    least_sum,
    local_search,
    min_cut,
    partition,
    plan_bound,
    plan_on_order,
    plan_on_sets,
    prove_on_near_sets,
    prove_on_sets,
    rate_changes,
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
    "PlanFlows",
    "PlanLimits",
    "SharedLinks",
    "best_schedule",
    "caps",
    "device_classes",
    "judge_plan",
    "least_sum",
    "local_search",
    "min_cut",
    "partition",
    "plan_bound",
    "plan_on_order",
    "plan_on_sets",
    "prove_on_near_sets",
    "prove_on_sets",
    "rate_changes",
    "relaxed_bound",
    "rule_times",
    "run_list",
    "run_schedule",
]
