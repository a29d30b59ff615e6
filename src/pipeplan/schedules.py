"""In which order every stage runs its blocks: each published rule by its name.

`pe` is the paper's scheduler, and the only one with a guarantee. It is list scheduling: the
priorities come from a pipeline in which every block and every transfer takes one unit. There B(i)
of stage n starts at unit i + 4(S-1) - 2n and F(j) at j + 2n (counted in rounds of one
microbatch), so a free stage with i backwards and j forwards begun prefers its next B if
i + 4(S-1) - 2n <= j + 2n, and else its next F; it runs whichever of the two is there if
the other is not. Two stages, all units equal::

    stage 0   F0 F1 F2 F3 .  B0 .  B1 .  B2 .  B3
    stage 1   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

References:
    pe: Luo et al. 2022, arXiv:2204.10562, "pipeline execution". Nothing differs.
    gpipe: Huang et al. 2019, arXiv:1811.06965. All forwards, then all backwards.
    1f1b: Narayanan et al. 2019 (PipeDream), with the barrier of Narayanan et al. 2021: stage n
        runs min(M, S - n) forwards, then one backward and one forward in turn.
    eager-1f1b: the same with 2(S - 1 - n) + 1 forwards first, so that transfers overlap
        (Zhuang et al. 2023, arXiv:2211.05322).
    backward-first, capped-4, capped-2: list schedulers with another preference or with a cap on
        the microbatches that a stage holds.

Each takes O(M S log S).
"""

from collections.abc import Callable
from itertools import accumulate

import numpy as np

from pipeplan.cost import PipelineCosts
from pipeplan.simulator import Codes, Preference, Run, run_list, run_schedule

__all__ = [
    "PORTFOLIO",
    "SCHEDULES",
    "ScheduleRule",
    "fixed_codes",
    "run_pe",
    "schedule_guarantee_ms",
]

ScheduleRule = Callable[[PipelineCosts, int], Run]
"""From costs and a number of microbatches to one iteration in the rule's order.

A rule keeps the caps of the costs: no stage holds more microbatches than its memory allows.
"""


def run_pe(costs: PipelineCosts, num_microbatches: int) -> Run:
    """One iteration under the paper's scheduler."""
    return run_list(costs, num_microbatches, Preference.UNIT_PIPELINE, costs.caps)


def schedule_guarantee_ms(costs: PipelineCosts, num_microbatches: int) -> float:
    """The theorem: under PE no iteration takes longer than (M + 4S - 4) * C + max all-reduce.

    C is the longest time that one microbatch, forward and backward, keeps any stage or channel
    busy; a full-duplex channel counts the longer of its two directions. Where links are shared,
    every transfer and all-reduce counts with the longest time that it can take.
    """
    costs = costs.at_most()
    rounds = num_microbatches + 4 * (costs.num_stages - 1)
    busiest_ms = max([*(costs.forward_ms_S + costs.backward_ms_S), *costs.channel_ms_C])
    return float(rounds * busiest_ms + costs.all_reduce_ms_S.max())


def fixed_codes(warm_ups: list[int], num_microbatches: int) -> Codes:
    """Each stage runs its warm-up of forwards, then one backward and one forward in turn."""
    rows = []
    for warm_up in warm_ups:
        row = list(range(min(warm_up, num_microbatches)))
        for microbatch in range(num_microbatches):
            row.append(-1 - microbatch)
            if warm_up + microbatch < num_microbatches:
                row.append(warm_up + microbatch)
        rows.append(row)
    return np.array(rows, dtype=np.int32)


def _run_gpipe(costs: PipelineCosts, num_microbatches: int) -> Run:
    return _run_fixed(costs, [num_microbatches] * costs.num_stages, num_microbatches)


def _run_1f1b(costs: PipelineCosts, num_microbatches: int) -> Run:
    return _run_fixed(costs, _caps(costs, 1), num_microbatches)


def _run_eager_1f1b(costs: PipelineCosts, num_microbatches: int) -> Run:
    return _run_fixed(costs, _caps(costs, 2), num_microbatches)


def _run_fixed(costs: PipelineCosts, warm_ups: list[int], num_microbatches: int) -> Run:
    """Fixed orders within the caps.

    With a longer warm-up than the stage in front, a stage would wait for ever.
    """
    if costs.caps is not None:
        warm_ups = list(accumulate(map(min, warm_ups, costs.caps), min))
    return run_schedule(costs, fixed_codes(warm_ups, num_microbatches))


def _run_backward_first(costs: PipelineCosts, num_microbatches: int) -> Run:
    return run_list(costs, num_microbatches, Preference.BACKWARD, costs.caps)


def _run_capped_4(costs: PipelineCosts, num_microbatches: int) -> Run:
    return run_list(costs, num_microbatches, Preference.FORWARD, _caps(costs, 4))


def _run_capped_2(costs: PipelineCosts, num_microbatches: int) -> Run:
    return run_list(costs, num_microbatches, Preference.FORWARD, _caps(costs, 2))


def _caps(costs: PipelineCosts, per_stage_behind: int) -> list[int]:
    """Room for the round trip to the last stage and for one more, as far as memory allows."""
    last = costs.num_stages - 1
    wanted = [per_stage_behind * (last - n) + 1 for n in range(costs.num_stages)]
    return wanted if costs.caps is None else list(map(min, wanted, costs.caps))


SCHEDULES: dict[str, ScheduleRule] = {
    "pe": run_pe,
    "1f1b": _run_1f1b,
    "eager-1f1b": _run_eager_1f1b,
    "gpipe": _run_gpipe,
    "backward-first": _run_backward_first,
    "capped-4": _run_capped_4,
    "capped-2": _run_capped_2,
}

PORTFOLIO = ("pe", "1f1b", "eager-1f1b", "backward-first", "capped-4", "capped-2")
"""The rules of which the best is kept, numbered as the kernels number them; `gpipe` never wins."""
