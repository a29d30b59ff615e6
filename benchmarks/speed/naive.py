"""The recursion of PRM without any short cut: every cut, every pair of replica counts, no pruning.

It is plain Python. So its times show how the work grows, not how fast C++ could be.
"""

from pipeplan.cost import CostModel
from pipeplan.pipeline import Stage


def least_bottlenecks_ms(cost: CostModel, order: list[int], num_microbatches: int) -> list[float]:
    """For each number of stages the least bottleneck, in O(L^2 D^3) steps each."""
    L, D, M = len(cost.forward_ms_L), len(order), num_microbatches
    inf = float("inf")

    def stage(first: int, end: int, i: int, r: int) -> Stage:
        return Stage(layers=range(first, end), devices=tuple(order[i : i + r]))

    stage_ms = {}
    for first in range(L):
        for end in range(first + 1, L + 1):
            for i in range(D):
                for r in range(1, D - i + 1):
                    here = stage(first, end, i, r)
                    work = cost.forward_ms(here) + cost.backward_ms(here)
                    stage_ms[first, end, i, r] = M * work + cost.all_reduce_ms(here)
    channel_ms = {}
    for cut in range(1, L):
        for j in range(1, D):
            for r_before in range(1, j + 1):
                for r in range(1, D - j + 1):
                    before, here = stage(cut - 1, cut, j - r_before, r_before), stage(cut, L, j, r)
                    there = cost.send_forward_ms(before, here)
                    back = cost.send_backward_ms(before, here)
                    busy = there + back if cost.half_duplex else max(there, back)
                    channel_ms[cut, j, r_before, r] = M * busy
    level = {
        (end, i, i): stage_ms[0, end, 0, i] for end in range(1, L + 1) for i in range(1, D + 1)
    }
    results = [min(level[L, i, i] for i in range(1, D + 1))]
    for x in range(2, min(L, D) + 1):
        following = {}
        for end in range(x, L + 1):
            for i in range(x, D + 1):
                for r in range(1, i):
                    j = i - r
                    following[end, i, r] = min(
                        (
                            max(
                                level.get((cut, j, r_before), inf),
                                channel_ms[cut, j, r_before, r],
                                stage_ms[cut, end, j, r],
                            )
                            for cut in range(x - 1, end)
                            for r_before in range(1, j + 1)
                        ),
                        default=inf,
                    )
        level = following
        results.append(min((v for (end, _, _), v in level.items() if end == L), default=inf))
    return results
