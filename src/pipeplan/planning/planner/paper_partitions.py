"""The paper's partitions as starts for `best`, on each connected part in the paper's order."""

from collections.abc import Iterator

from pipeplan.pipeline import Stage
from pipeplan.planning.planner import settings
from pipeplan.planning.planner.coarsening import CoarseModel
from pipeplan.planning.planner.device_order import connected_parts, recursive_device_order
from pipeplan.planning.planner.incumbent import Incumbent
from pipeplan.planning.planner.partition import best_partitions
from pipeplan.planning.problem import Problem

__all__ = ["paper_stages"]


def paper_stages(
    problem: Problem, coarse: CoarseModel, best: Incumbent
) -> Iterator[tuple[Stage, ...]]:
    """The stages of all partitions whose bottleneck is not above the best time so far.

    Of merged layers, where the model has too many for the time.
    """
    steps = len(problem.cost.forward_ms_L) * len(problem.cost.speed_D) ** 2
    is_whole = steps <= settings.MAX_PARTITION_STEPS
    for part in connected_parts(problem.cost):
        for partition in best_partitions(
            problem.cost if is_whole else coarse.cost,
            recursive_device_order(problem.cost, part, deadline=problem.deadline),
            problem.num_microbatches,
            limit_ms=best.iteration_ms,
            num_threads=problem.num_threads,
            deadline=problem.deadline,
        ):
            yield partition.stages if is_whole else coarse.refine(partition.stages)
