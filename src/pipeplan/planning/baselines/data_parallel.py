"""Every device holds the whole model; gradients are all-reduced once an iteration.

Objective: none, because there is nothing to choose.
Cost model: none.
Differs: on a cluster with missing links, only devices that can all talk to one another take part.

Complexity: O(1).
"""

from pipeplan.pipeline import Stage
from pipeplan.planning.baselines.view import execute, view_cluster
from pipeplan.planning.problem import Draft, Problem

__all__ = ["plan_data_parallel"]


def plan_data_parallel(problem: Problem) -> Draft:
    """One stage on all devices."""
    devices = view_cluster(problem.cost).ranks
    stage = Stage(layers=range(problem.model.num_layers), devices=devices)
    return execute(problem, [stage], "1f1b")
