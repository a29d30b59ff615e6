"""Equally many layers on every device; one forward and one backward in turn.

Reference:
    Narayanan et al. 2021 (Megatron-LM), arXiv:2104.04473, §2.2.1: every device holds an
    equal number of (transformer) layers; 1F1B with a flush.
    Objective: none beyond equal counts. Cost model: none, layers count as equal.
    Differs: if the layers do not divide evenly, earlier stages get one more. If there are more
    devices than layers, the remaining devices stay unused. Missing links as in `gpipe`.

Complexity: O(S).
"""

from pipeplan.planning.baselines.cuts import even_ends, stages_from_ends
from pipeplan.planning.baselines.view import chained_ranks, execute
from pipeplan.planning.problem import Draft, Problem

__all__ = ["plan_even_1f1b"]


def plan_even_1f1b(problem: Problem) -> Draft:
    """One stage for each device, all of equal length, under 1F1B."""
    devices = chained_ranks(problem.cost)
    num_stages = min(len(devices), problem.model.num_layers)
    ends = even_ends(problem.model.num_layers, num_stages)
    return execute(problem, stages_from_ends(ends, [[d] for d in devices[:num_stages]]), "1f1b")
