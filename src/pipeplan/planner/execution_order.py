"""Decide in which order every stage runs its blocks (PE), with a guarantee.

List scheduling: the priorities come from a pipeline in which every block and every transfer
takes one unit. There B(i) of stage n starts at unit i + 4(S-1) - 2n and F(j) at j + 2n
(in rounds of one microbatch), so a free stage with i backwards and j forwards begun prefers
its next B if i + 4(S-1) - 2n <= j + 2n, and else its next F; it runs whichever of the
two is there if the other is not::

    stage 0   F0 F1 F2 F3 .  .  B0 .  B1 .  B2 .  B3
    stage 1   .  .  F0 F1 B0 F2 B1 F3 B2 .  B3

Reference:
    Luo et al. 2022, arXiv:2204.10562, "pipeline execution".
    Differs: nothing in the rule. It runs as an event loop over stages and channels
    (`_core/simulate.cpp`) that the simulator shares, O(M S log S).

There is no cap: up to M microbatches may be in flight at a stage.
"""

from pipeplan.cost import PipelineCosts

__all__ = ["schedule_guarantee_ms"]


def schedule_guarantee_ms(costs: PipelineCosts, num_microbatches: int) -> float:
    """The theorem: under PE no iteration takes longer than (M + 4S - 4) * C + max all-reduce.

    C is the longest time that one microbatch, forward and backward, keeps any stage or channel
    busy; a full-duplex channel counts the longer of its two directions.
    """
    rounds = num_microbatches + 4 * (costs.num_stages - 1)
    busiest_ms = max([*(costs.forward_ms_S + costs.backward_ms_S), *costs.channel_ms_C])
    return float(rounds * busiest_ms + costs.all_reduce_ms_S.max())
