"""DAPPLE: candidates from three placements, the best by the latency of a synchronous pipeline.

Reference:
    Fan et al. 2021 (DAPPLE), arXiv:2007.01045, §4, and its released planner for the candidates.
    Objective: the paper's pipeline latency, `pipeline_latency_ms`. Cost model: two bandwidths,
    inside and between hosts; equal devices; each transfer counts as a stage of its own.
    Candidates, each stage on a multiple of r devices, r = floor(V / i) for every i = 2..V:
        1. the dynamic program `A = min max( A of the front, compute/(m' r), transfer of 2 o(k) )`
           over the end k of the front, the m' groups of the stage behind, and its placement: on
           fresh hosts first, appended to partly used hosts first, or scattered over all hosts;
        2. straight pipelines: i balanced stages of r devices each, in the order of ranks;
        3. every split into two stages that use all devices.
    All devices are used up to the remainder of V / i. There is no purely data-parallel candidate.
    Early-backward schedule with either of the paper's warm-ups: S - n or 2 (S - n) - 1 forwards.
    Differs: bandwidths come from the cluster instead of constants. If the receiving stage spans
    several hosts, all bytes of a cut cross the slower link. Otherwise only the fraction from other
    hosts does. The number of microbatches is given, so each is divided among the replicas. We
    simulate both warm-ups and take the faster one; the paper decides by the ratio of transfers to
    compute. Hosts that are equally full count as equal. A model of one layer cannot be split; it is
    replicated on all devices. The dynamic program runs with up to 16 groups (i <= 16) on up to 64
    devices. Beyond, only straight pipelines and splits in two are tried: the states of the program
    are the ways to occupy the hosts, and the released planner does not finish at 32 devices either.

Complexity: O(L^2) for each reachable occupation of hosts, number of groups and placement.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from pipeplan import _core
from pipeplan.cost import CostModel, Floats, prefix_sums
from pipeplan.pipeline import Stage
from pipeplan.planning.baselines.cuts import Split, balanced_ends, stages_from_ends
from pipeplan.planning.baselines.view import ClusterView, execute, fastest, range_sums, view_cluster
from pipeplan.planning.problem import Draft, Problem

__all__ = ["least_bottleneck_splits", "pipeline_latency_ms", "plan_dapple", "split_dapple"]

MAX_GROUPS = 16
MAX_PROGRAM_DEVICES = 64
"""The dynamic program takes 5 s with 64 devices and 23 s with 128."""

Counts = tuple[int, ...]
"""A number of devices for each host."""


def plan_dapple(problem: Problem) -> Draft:
    """DAPPLE's stages under its schedule, with the better of its two warm-ups."""
    view = view_cluster(problem.cost)
    stages = split_dapple(problem.cost, view, problem.num_microbatches).stages
    return fastest([execute(problem, stages, rule) for rule in ("1f1b", "eager-1f1b")])


def split_dapple(cost: CostModel, view: ClusterView, num_microbatches: int) -> Split:
    """The candidate with the least pipeline latency."""
    num_layers = len(cost.forward_ms_L)
    if view.num_devices == 1 or num_layers == 1:
        whole = (Stage(layers=range(num_layers), devices=view.ranks),)
        return _judge(cost, view, whole, num_microbatches)
    best = _best_of_two(cost, view, num_microbatches)
    for stages in dict.fromkeys(_candidates(cost, view)):
        split = _judge(cost, view, stages, num_microbatches)
        if split.objective_ms < best.objective_ms:
            best = split
    return best


def pipeline_latency_ms(
    forward_ms_KS: Floats, backward_ms_KS: Floats, reduce_ms_KS: Floats, num_microbatches: int
) -> Floats:
    """The paper's latency for K pipelines at once; transfers are some of the S stages.

    With Q the pivot stage, L = Tw + Ts + Te:
        Tw = sum of F up to Q                                       warm-up
        Ts = (M - 1) (F_Q + B_Q)                                    steady state
        Te = max over s of AR_s + sum of B from s to Q (s <= Q),    end
                           AR_s - sum of B from Q to s (s > Q)
    The pivot starts at the last stage and moves towards the first. It moves to s if the steady
    state of s is longer than that of Q plus the work between the two.
    """
    num_cases, num_stages = forward_ms_KS.shape
    cases = np.arange(num_cases)
    work = forward_ms_KS + backward_ms_KS
    steady = (num_microbatches - 1) * work
    before = prefix_sums(work)
    pivot = np.full(num_cases, num_stages - 1)
    for s in range(num_stages - 2, -1, -1):
        between = before[cases, pivot] - before[:, s + 1]
        pivot = np.where(steady[:, s] > steady[cases, pivot] + between, s, pivot)
    warm_up = forward_ms_KS.cumsum(axis=1)[cases, pivot]
    returned = prefix_sums(backward_ms_KS)
    to_pivot = returned[cases, pivot + 1][:, None] - returned[:, :-1]
    from_pivot = returned[:, 1:] - returned[cases, pivot][:, None]
    is_front = np.arange(num_stages)[None, :] <= pivot[:, None]
    end = (reduce_ms_KS + np.where(is_front, to_pivot, -from_pivot)).max(axis=1)
    latency: Floats = warm_up + steady[cases, pivot] + end
    return latency


def least_bottleneck_splits(
    cost: CostModel, view: ClusterView, group_size: int, max_groups: int
) -> dict[int, tuple[Stage, ...]]:
    """Candidate 1: for each number of groups used the stages with the least bottleneck."""
    found = _core.place_groups(
        range_sums(cost.forward_ms_L + cost.backward_ms_L) / view.speed,
        2 * np.concatenate(([0.0], cost.output_bytes_L)),
        sorted((list(host) for host in view.hosts), key=len),
        view.inside_bytes_per_ms,
        view.between_bytes_per_ms,
        group_size,
        max_groups,
    )
    return {used: tuple(stages_from_ends(ends, devices)) for used, ends, devices in found}


def _candidates(cost: CostModel, view: ClusterView) -> Iterator[tuple[Stage, ...]]:
    num_devices, num_layers = view.num_devices, len(cost.forward_ms_L)
    work_ms_L = cost.forward_ms_L + cost.backward_ms_L
    counts_with: dict[int, list[int]] = {}
    for i in range(2, num_devices + 1):
        counts_with.setdefault(num_devices // i, []).append(i)
        if i <= num_layers:
            size = num_devices // i
            devices = [view.ranks[n * size : (n + 1) * size] for n in range(i)]
            yield tuple(stages_from_ends(balanced_ends(work_ms_L, i), devices))
    if num_devices > MAX_PROGRAM_DEVICES:
        return
    for size, counts in counts_with.items():
        within = [i for i in counts if i <= MAX_GROUPS]
        if within:
            found = least_bottleneck_splits(cost, view, size, max(within))
            yield from (found[i] for i in within if i in found)


def _fill(free: Counts, order: Sequence[int], wanted: int) -> Counts:
    """How many devices to take from each host: all of one host before the next."""
    added = [0] * len(free)
    for host in order:
        added[host] = min(free[host], wanted)
        wanted -= added[host]
    return tuple(added)


def _scatter(free: Counts, wanted: int) -> Counts:
    """How many devices to take from each host: one of every host in turn."""
    added = [0] * len(free)
    while wanted:
        for host in range(len(free)):
            if wanted and added[host] < free[host]:
                added[host] += 1
                wanted -= 1
    return tuple(added)


def _ms_per_byte(view: ClusterView, senders: Counts, receivers: Counts) -> float:
    """Milliseconds for a byte between stages with these numbers of devices on each host."""
    if sum(count > 0 for count in receivers) > 1:
        return 1 / view.between_bytes_per_ms
    home = next(host for host, count in enumerate(receivers) if count)
    outside = 1 - senders[home] / sum(senders)
    return max(outside / view.between_bytes_per_ms, (1 - outside) / view.inside_bytes_per_ms)


def _reduce_ms_per_byte(view: ClusterView, counts: Counts) -> float:
    """Milliseconds for a byte of an all-reduce among these numbers of devices on each host."""
    n = sum(counts)
    is_inside = sum(count > 0 for count in counts) == 1
    rate = view.inside_bytes_per_ms if is_inside else view.between_bytes_per_ms
    return 2 * (n - 1) / n / rate


def _counts(view: ClusterView, devices: Sequence[int]) -> Counts:
    mine = set(devices)
    return tuple(len(mine.intersection(host)) for host in view.hosts)


def _judge(
    cost: CostModel, view: ClusterView, stages: tuple[Stage, ...], num_microbatches: int
) -> Split:
    """One candidate with its latency; transfers count as stages of their own."""
    forward, backward, reduce = [], [], []
    counts = [_counts(view, stage.devices) for stage in stages]
    for n, stage in enumerate(stages):
        layers = slice(stage.layers.start, stage.layers.stop)
        if n:
            per_byte = _ms_per_byte(view, counts[n - 1], counts[n])
            sent_ms = float(cost.output_bytes_L[layers.start - 1]) * per_byte
            forward.append(sent_ms)
            backward.append(sent_ms)
            reduce.append(0.0)
        share = 1 / (stage.num_replicas * view.speed)
        forward.append(float(cost.forward_ms_L[layers].sum()) * share)
        backward.append(float(cost.backward_ms_L[layers].sum()) * share)
        parameter_bytes = float(cost.parameter_bytes_L[layers].sum())
        reduce.append(parameter_bytes * _reduce_ms_per_byte(view, counts[n]))
    latency = pipeline_latency_ms(
        np.array([forward]), np.array([backward]), np.array([reduce]), num_microbatches
    )
    return Split(stages=stages, objective_ms=float(latency[0]))


def _best_of_two(cost: CostModel, view: ClusterView, num_microbatches: int) -> Split:
    """Candidate 3: every cut, every number of devices for the first stage, filled or scattered."""
    num_layers, free = len(cost.forward_ms_L), tuple(len(host) for host in view.hosts)
    fronts = [
        front
        for ahead in range(1, view.num_devices)
        for front in dict.fromkeys((_fill(free, range(len(free)), ahead), _scatter(free, ahead)))
    ]
    sides = [(front, tuple(np.subtract(free, front).tolist())) for front in fronts]
    sent_ms = np.outer([_ms_per_byte(view, *pair) for pair in sides], cost.output_bytes_L[:-1])
    shares = [[1 / (sum(side) * view.speed) for side in pair] for pair in sides]
    rates = [[_reduce_ms_per_byte(view, side) for side in pair] for pair in sides]
    columns = [
        _two_stages(cost.forward_ms_L, shares, sent_ms),
        _two_stages(cost.backward_ms_L, shares, sent_ms),
        _two_stages(cost.parameter_bytes_L, rates, np.zeros_like(sent_ms)),
    ]
    latency_ms = pipeline_latency_ms(columns[0], columns[1], columns[2], num_microbatches)
    where = int(latency_ms.argmin())
    best, cut = divmod(where, num_layers - 1)
    chosen = [d for host, count in zip(view.hosts, fronts[best], strict=True) for d in host[:count]]
    rest = [d for d in view.ranks if d not in set(chosen)]
    stages = tuple(stages_from_ends([cut + 1, num_layers], [chosen, rest]))
    return Split(stages=stages, objective_ms=float(latency_ms[where]))


def _two_stages(values_L: Floats, factors: Sequence[Sequence[float]], middle: Floats) -> Floats:
    """For each pair of factors and each cut: before the cut, in the middle, and behind it."""
    before = prefix_sums(values_L)
    first, second = np.array(factors).T[:, :, None]
    both = [before[1:-1] * first, middle, (before[-1] - before[1:-1]) * second]
    return np.stack(both, axis=2).reshape(-1, 3)
