"""Balanced stages on single devices, all forwards before all backwards.

Reference:
    Huang et al. 2019, arXiv:1811.06965, §2.2: cells are cut so that the estimated costs of
    the stages vary as little as possible; microbatches run forward, then backward.
    Objective: the largest compute time of a stage. Cost model: compute alone, devices equal,
    communication free.
    Differs: "vary as little" means the least maximum here. If there are more devices than layers,
    the remaining devices stay unused. On a cluster with missing links the pipeline follows a chain
    of devices in which neighbours can talk.

Complexity: O(S L^2).
"""

from pipeplan.planning.baselines.cuts import balanced_ends, stages_from_ends
from pipeplan.planning.baselines.view import chained_ranks, execute
from pipeplan.planning.problem import Draft, Problem

__all__ = ["plan_gpipe"]


def plan_gpipe(problem: Problem) -> Draft:
    """One stage for each device, with balanced work, under GPipe's schedule."""
    devices = chained_ranks(problem.cost)
    num_stages = min(len(devices), problem.model.num_layers)
    work_ms_L = problem.cost.forward_ms_L + problem.cost.backward_ms_L
    ends = balanced_ends(work_ms_L, num_stages)
    return execute(problem, stages_from_ends(ends, [[d] for d in devices[:num_stages]]), "gpipe")
