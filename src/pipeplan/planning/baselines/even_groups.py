"""Even splits as Megatron-LM and torch make them, with several stages a device or split backwards.

References:
    interleaved-1f1b: Narayanan et al. 2021 (Megatron-LM), arXiv:2104.04473, section 2.2.2, with two
        stages a device.
    zb-h1: Qi et al. 2023, arXiv:2401.10241. One stage a device, backwards cut in two.
    zb-v: the same authors, arXiv:2405.15362. Two stages a device, down the devices and back up.
    Objective: none beyond equal counts of layers. Cost model: none.
    Differs: if the layers do not divide evenly, earlier stages get one more. If there are fewer
    layers than stages, devices stay unused; so they do where interleaving needs a number of groups
    that divides the microbatches.
"""

from pipeplan.errors import InfeasibleError, InputError
from pipeplan.group_costs import group_costs
from pipeplan.group_simulator import run_groups
from pipeplan.planning.baselines.cuts import even_ends, stages_from_ends
from pipeplan.planning.baselines.view import chained_ranks
from pipeplan.planning.group_order import in_group_order
from pipeplan.planning.problem import Draft, Problem

__all__ = ["plan_interleaved", "plan_zb_h1", "plan_zb_v"]


def plan_interleaved(problem: Problem) -> Draft:
    """Two stages a device, the chain twice round all devices."""
    devices = chained_ranks(problem.cost)
    most = min(len(devices), problem.model.num_layers // 2)
    size = next((n for n in range(most, 1, -1) if problem.num_microbatches % n == 0), 0)
    if not size:
        raise InfeasibleError(
            "interleaved-1f1b: no number of devices from 2 on divides the microbatches"
            f" ({problem.num_microbatches}) and leaves each two layers; use planner '1f1b'"
        )
    return _even(problem, [*devices[:size], *devices[:size]], "interleaved-1f1b")


def plan_zb_h1(problem: Problem) -> Draft:
    """One stage a device, backwards cut in two."""
    devices = chained_ranks(problem.cost)
    size = min(len(devices), problem.model.num_layers)
    return _even(problem, devices[:size], "zb-h1")


def plan_zb_v(problem: Problem) -> Draft:
    """Two stages a device, down the devices and back up, backwards cut in two."""
    devices = chained_ranks(problem.cost)
    size = min(len(devices), problem.model.num_layers // 2)
    if size < 1:
        raise InfeasibleError("zb-v: needs two layers; use planner 'zb-h1'")
    return _even(problem, [*devices[:size], *reversed(devices[:size])], "zb-v")


def _even(problem: Problem, devices: "list[int] | tuple[int, ...]", schedule: str) -> Draft:
    ends = even_ends(problem.model.num_layers, len(devices))
    stages = tuple(stages_from_ends(ends, [[device] for device in devices]))
    try:
        draft = in_group_order(problem, Draft(stages=stages, iteration_ms=0.0), schedule)
    except InputError as error:
        raise InfeasibleError(str(error).removeprefix("schedule: ")) from None
    costs = group_costs(problem.cost, stages)
    timeline = run_groups(costs, draft.orders, problem.num_microbatches)
    return Draft(stages=stages, orders=draft.orders, iteration_ms=timeline.iteration_ms)
