"""The best grid of pipeline and data parallelism: pp * dp = number of devices.

Reference:
    Narayanan et al. 2021 (Megatron-LM), arXiv:2104.04473, §3: degrees of parallelism whose product
    is the number of devices, equal layers per stage, 1F1B; users try them and keep the fastest.
    Objective: the iteration time of a trial run, which is our simulation. Cost model: ours, on
    the real cluster. So it is the strongest of the simple designs.
    Differs: no tensor parallelism. Replicas of a stage have consecutive ranks, as in Megatron's
    default order of ranks. On a cluster with missing links, only devices that can all talk to one
    another take part.

Complexity: one simulation for each divisor of the number of devices.
"""

from pipeplan.planning.baselines.cuts import even_ends, stages_from_ends
from pipeplan.planning.baselines.view import execute, fastest, view_cluster
from pipeplan.planning.problem import Draft, Problem

__all__ = ["plan_grid"]


def plan_grid(problem: Problem) -> Draft:
    """The stages of the fastest grid, under 1F1B."""
    ranks = view_cluster(problem.cost).ranks
    num_layers = problem.model.num_layers
    drafts = []
    for depth in range(1, min(len(ranks), num_layers) + 1):
        width, rest = divmod(len(ranks), depth)
        if rest:
            continue
        devices = [ranks[n * width : (n + 1) * width] for n in range(depth)]
        stages = stages_from_ends(even_ends(num_layers, depth), devices)
        drafts.append(execute(problem, stages, "1f1b"))
    return fastest(drafts)
