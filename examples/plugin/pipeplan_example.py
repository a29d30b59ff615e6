"""A planner and a schedule in a package of their own: copy it, and put your idea in their place.

`balanced` gives each device a run of layers so that the busiest device has as little to compute as
possible. It knows the speeds of devices, but no links: it is what people often do by hand.

`two-ahead` runs two more forwards on each stage than 1F1B before the first backward, so that
transfers overlap. Three stages and four microbatches of equal units:

    stage 0   F0 F1 F2 F3 .  .  .  B0 .  B1 B2 B3
    stage 1   .  F0 F1 F2 F3 .  B0 .  B1 B2 B3
    stage 2   .  .  F0 F1 F2 B0 F3 B1 B2 B3
"""

from itertools import accumulate

from pipeplan import InfeasibleError, Stage
from pipeplan.cost import PipelineCosts
from pipeplan.planning.problem import Draft, Problem
from pipeplan.schedules import fixed_codes, run_pe
from pipeplan.simulator import Run, run_schedule

TWO_AHEAD = 2


def plan_balanced(problem: Problem) -> Draft:
    """One stage a device, in the order of the cluster, with the least largest compute time.

    A table over devices and layers: `least[end]` is the smallest largest time of the devices so far
    for the layers before `end`. O(D L^2).
    """
    model, devices = problem.model, problem.cluster.devices
    num_layers, num_stages = model.num_layers, min(len(devices), model.num_layers)
    if num_stages < 1:
        raise InfeasibleError("balanced: there is no device; add one to the cluster")
    work_ms = [layer.forward_ms + layer.backward_ms for layer in model.layers]
    before_ms = [0.0, *accumulate(work_ms)]
    least = [0.0] + [float("inf")] * num_layers
    cuts: list[list[int]] = []
    for stage in range(num_stages):
        speed = devices[stage].speed
        row, chosen = [float("inf")] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(stage + 1, num_layers + 1):
            for start in range(stage, end):
                time_ms = max(least[start], (before_ms[end] - before_ms[start]) / speed)
                if time_ms < row[end]:
                    row[end], chosen[end] = time_ms, start
        least = row
        cuts.append(chosen)
    stages, end = [], num_layers
    for stage in reversed(range(num_stages)):
        start = cuts[stage][end]
        stages.append(Stage(layers=range(start, end), devices=(stage,)))
        end = start
    stages.reverse()
    # Stages, costs and times are pipeplan's: the planner decides, the simulator judges.
    run = run_pe(problem.cost.pipeline_costs(tuple(stages)), problem.num_microbatches)
    return Draft(stages=tuple(stages), codes=run.order_SM2, iteration_ms=run.iteration_ms)


def run_two_ahead(costs: PipelineCosts, num_microbatches: int) -> Run:
    """One iteration: each stage runs two more forwards first than under 1F1B."""
    warm_ups = [costs.num_stages - stage + TWO_AHEAD for stage in range(costs.num_stages)]
    return run_schedule(costs, fixed_codes(warm_ups, num_microbatches))
