"""Alpa's inter-operator dynamic program.

Reference:
    Zheng et al. 2022 (Alpa), arXiv:2201.12023, §5. Layers are cut into stages, each on a submesh;
    with t_i the latency of a stage and M microbatches (their B), it minimises

        sum of t_i + (M - 1) * max t_i

    by trying every possible value t_max of the maximum: F(l, d) is the least sum for layers l.. on
    d devices if no stage exceeds t_max. All devices are used. A submesh has a power of two of
    devices within a host, or whole hosts. Larger submeshes are placed first.
    Objective: as above. Cost model: no transfers between stages; within a stage one bandwidth
    inside and one between hosts, equal devices.
    Differs: the intra-operator pass is data parallelism alone: t = compute/d + all-reduce/M,
    because gradients are synchronised once an iteration. Memory is left to the checker, so their
    axis of the number of stages is not needed. Unequal hosts count as one flat host. Ranges of
    t_max that cannot improve the result are skipped; the result stays exact. Run with 1F1B.

Complexity: O(L^2 D K) for one t_max and K sizes of submeshes. There are up to L^2 K / 2 values of
t_max; some tens of them are tried.
"""

from dataclasses import dataclass

import numpy as np

from pipeplan import _core
from pipeplan.cost import CostModel, Floats
from pipeplan.pipeline import Stage
from pipeplan.planning.baselines.cuts import Split
from pipeplan.planning.baselines.view import ClusterView, execute, range_sums, view_cluster
from pipeplan.planning.problem import Draft, Problem

__all__ = ["plan_alpa", "split_alpa", "submesh_sizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """The best stages for one t_max."""

    sum_ms: float
    spans: list[tuple[int, int, int]]
    """Start, end, number of devices."""


def plan_alpa(problem: Problem) -> Draft:
    """Alpa's stages under 1F1B."""
    view = view_cluster(problem.cost)
    split = split_alpa(problem.cost, view, problem.num_microbatches)
    return execute(problem, split.stages, "1f1b")


def split_alpa(cost: CostModel, view: ClusterView, num_microbatches: int) -> Split:
    """The stages with the least latency by Alpa's formula."""
    sizes = submesh_sizes(view)
    stage_ms_KLL = _stage_times(cost, view, sizes, num_microbatches)
    values = np.sort(stage_ms_KLL[np.isfinite(stage_ms_KLL)])
    candidates = values[np.concatenate(([True], np.diff(values) > 0))]
    solved: dict[int, _Choice] = {}

    def solve(index: int) -> float:
        if index not in solved:
            solved[index] = _least_sum(stage_ms_KLL, sizes, view.num_devices, candidates[index])
        return solved[index].sum_ms

    def latency_ms(index: int) -> float:
        return solve(index) + (num_microbatches - 1) * float(candidates[index])

    # As t_max grows, the sum can only fall. So between two solved values no latency is below
    # the sum at the upper one plus (M - 1) times the least t_max in between.
    last = len(candidates) - 1
    best = last if latency_ms(last) < latency_ms(0) else 0
    stretches = [(0, last)]
    while stretches:
        low, high = stretches.pop()
        if high - low < 2:
            continue
        limit_ms = solve(high) + (num_microbatches - 1) * float(candidates[low + 1])
        if limit_ms >= latency_ms(best) or solve(low) <= solve(high):
            continue
        middle = (low + high) // 2
        if latency_ms(middle) < latency_ms(best):
            best = middle
        stretches += [(middle, high), (low, middle)]
    return Split(stages=_place(view, solved[best].spans), objective_ms=latency_ms(best))


def submesh_sizes(view: ClusterView) -> list[int]:
    """Powers of two within a host, and whole hosts."""
    host = len(view.hosts[0]) if view.has_equal_hosts else view.num_devices
    powers = [1 << p for p in range(host.bit_length()) if 1 << p < host]
    return powers + [host * n for n in range(1, view.num_devices // host + 1)]


def _stage_times(
    cost: CostModel, view: ClusterView, sizes: list[int], num_microbatches: int
) -> Floats:
    """[size, l, j]: the time of layers l..j-1 on that many devices; infinite without a layer."""
    compute_ms_LL = range_sums(cost.forward_ms_L + cost.backward_ms_L) / view.speed
    parameter_bytes_LL = range_sums(cost.parameter_bytes_L)
    no_layer = np.tril(np.ones(compute_ms_LL.shape, dtype=bool))
    host = len(view.hosts[0]) if view.has_equal_hosts else 0
    times = []
    for d in sizes:
        rate = view.inside_bytes_per_ms if d <= host else view.between_bytes_per_ms
        reduce_ms_LL = 2 * (d - 1) / d * parameter_bytes_LL / rate
        stage_ms_LL = compute_ms_LL / d + reduce_ms_LL / num_microbatches
        times.append(np.where(no_layer, np.inf, stage_ms_LL))
    return np.array(times)


def _least_sum(
    stage_ms_KLL: Floats, sizes: list[int], num_devices: int, t_max_ms: float
) -> _Choice:
    """F for one t_max: the stages with the least sum, none longer than `t_max_ms`."""
    sum_ms, ends, counts = _core.least_sum(
        stage_ms_KLL, np.array(sizes, dtype=np.int32), num_devices, t_max_ms
    )
    return _Choice(sum_ms=sum_ms, spans=list(zip([0, *ends], ends, counts, strict=False)))


def _place(view: ClusterView, spans: list[tuple[int, int, int]]) -> tuple[Stage, ...]:
    """Devices for each submesh, larger ones first, so that small ones do not span two hosts."""
    devices: dict[int, tuple[int, ...]] = {}
    first = 0
    for index in sorted(range(len(spans)), key=lambda index: -spans[index][2]):
        devices[index] = view.ranks[first : first + spans[index][2]]
        first += spans[index][2]
    return tuple(
        Stage(layers=range(start, end), devices=devices[index])
        for index, (start, end, _) in enumerate(spans)
    )
