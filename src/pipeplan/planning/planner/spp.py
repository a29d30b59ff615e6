"""The paper's whole planner: device order, then for each number of stages partition and schedule.

Reference:
    Luo et al. 2022, arXiv:2204.10562, SPP = RDO, PRM for every number of stages, PE for each,
    the fastest kept.
    Differs: if the cluster has parts without a path between them, each part is planned separately.
    An iteration never takes less than its bottleneck. So once a plan is known, PRM leaves out
    partitions with a larger bottleneck.

Guarantee: with W the bottleneck that PRM found for S stages, the iteration takes at most
(1 + (4S - 4)/M) * W + max all-reduce, and no plan on the same device order and number of
stages takes less than W.
"""

from collections.abc import Sequence

from pipeplan import _core
from pipeplan.cost import CostModel
from pipeplan.pipeline import Stage
from pipeplan.planning.planner.device_order import connected_parts, recursive_device_order
from pipeplan.planning.planner.partition import best_partitions
from pipeplan.planning.problem import Draft, Problem
from pipeplan.schedules import run_pe, schedule_guarantee_ms

__all__ = ["execute_pe", "plan_spp"]

FEW_STAGES = 4
"""Up to this number of stages is planned first: the best time prunes the other partitions."""


def plan_spp(problem: Problem) -> Draft:
    """The fastest plan over all numbers of stages, on the recursive device order."""
    drafts = [
        _plan_part(problem, recursive_device_order(problem.cost, part, deadline=problem.deadline))
        for part in connected_parts(problem.cost)
    ]
    return min(drafts, key=lambda draft: draft.iteration_ms)


def _plan_part(problem: Problem, order: Sequence[int]) -> Draft:
    cost, num_microbatches = problem.cost, problem.num_microbatches
    few = best_partitions(
        cost,
        order,
        num_microbatches,
        max_stages=FEW_STAGES,
        num_threads=problem.num_threads,
        deadline=problem.deadline,
    )
    best = min(
        (execute_pe(cost, partition.stages, num_microbatches) for partition in few),
        key=lambda draft: draft.iteration_ms,
    )
    try:
        partitions = best_partitions(
            cost,
            order,
            num_microbatches,
            limit_ms=best.iteration_ms,
            num_threads=problem.num_threads,
            deadline=problem.deadline,
        )
    except _core.DeadlineError:
        return best
    drafts = [execute_pe(cost, partition.stages, num_microbatches) for partition in partitions]
    return min([best, *drafts], key=lambda draft: draft.iteration_ms)


def execute_pe(cost: CostModel, stages: tuple[Stage, ...], num_microbatches: int) -> Draft:
    """The stages with the schedule PE."""
    costs = cost.pipeline_costs(stages)
    run = run_pe(costs, num_microbatches)
    return Draft(
        stages=stages,
        codes=run.order_SM2,
        iteration_ms=run.iteration_ms,
        schedule_guarantee_ms=schedule_guarantee_ms(costs, num_microbatches),
    )
