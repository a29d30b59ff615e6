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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    for stages in _candidates(cost, view):
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
    program = _PlacementProgram(cost, view, group_size, max_groups)
    return program.solve()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """How the last stage of a state was placed."""

    before: Counts
    """The state that it was added to."""
    added: Counts
    """Its devices on each host, in the order of the new state's hosts."""
    order: tuple[int, ...]
    """For each host of the new state its index in the old state."""


class _PlacementProgram:
    """The dynamic program over layers, groups and the occupation of hosts.

    A state is the number of free devices on each host, sorted: equally full hosts are equal. The
    front is the stages so far. For each state and each end of the front, the program keeps the
    least bottleneck and the placement of the last stage.
    """

    def __init__(
        self, cost: CostModel, view: ClusterView, group_size: int, max_groups: int
    ) -> None:
        self._view = view
        self._group_size = group_size
        self._max_groups = max_groups
        self._compute_ms_LL = range_sums(cost.forward_ms_L + cost.backward_ms_L) / view.speed
        self._no_layer = np.tril(np.ones(self._compute_ms_LL.shape, dtype=bool))
        self._ends = np.arange(len(self._compute_ms_LL))
        self._stage_ms_LL: dict[int, Floats] = {}
        self._rates: dict[tuple[Counts, Counts], float] = {}
        self._round_trip_bytes = 2 * np.concatenate(([0.0], cost.output_bytes_L))
        self._host_order = sorted(range(len(view.hosts)), key=lambda h: (len(view.hosts[h]), h))
        self._start = tuple(len(view.hosts[h]) for h in self._host_order)
        self._best_ms: dict[Counts, Floats] = {}
        self._arrival: dict[Counts, list[_Arrival]] = {}
        self._last: dict[Counts, NDArray[np.int64]] = {}
        self._cut: dict[Counts, NDArray[np.int64]] = {}

    def solve(self) -> dict[int, tuple[Stage, ...]]:
        """For each number of groups the best stages, if there are any."""
        size = len(self._compute_ms_LL)
        origin = np.full(size, np.inf)
        origin[0] = 0.0
        self._best_ms[self._start] = origin
        # For each number of groups used, the states reached. A dict keeps their order.
        states: list[dict[Counts, None]] = [{} for _ in range(self._max_groups + 1)]
        states[0][self._start] = None
        for used in range(self._max_groups):
            for state in states[used]:
                if not np.isfinite(self._best_ms[state]).any():  # more stages than layers
                    continue
                arrivals = [
                    (groups, arrival)
                    for groups in range(1, self._max_groups - used + 1)
                    for arrival in self._placements(state, groups * self._group_size)
                ]
                for groups, target in self._extend(state, arrivals):
                    states[used + groups][target] = None
        found = {}
        for used in range(2, self._max_groups + 1):
            ends = [(float(self._best_ms[state][-1]), state) for state in states[used]]
            if ends and min(ends)[0] < np.inf:
                found[used] = self._stages(min(ends)[1])
        return found

    def _placements(self, free: Counts, wanted: int) -> Iterator[_Arrival]:
        """The three placements of `wanted` devices, without repetitions."""
        if wanted > sum(free):
            return
        hosts = range(len(free))
        # Hosts are sorted by capacity first, so the list of capacities never changes.
        capacity = self._start
        fresh = [h for h in hosts if free[h] == capacity[h]]
        partly = [h for h in hosts if 0 < free[h] < capacity[h]]
        seen = set()
        for added in (
            _fill(free, fresh + partly, wanted),
            _fill(free, partly + fresh, wanted),
            _scatter(free, wanted),
        ):
            if added in seen:
                continue
            seen.add(added)
            left = [free[h] - added[h] for h in hosts]
            order = tuple(sorted(hosts, key=lambda h: (capacity[h], left[h], h)))
            yield _Arrival(before=free, added=tuple(added[h] for h in order), order=order)

    def _extend(
        self, state: Counts, arrivals: Sequence[tuple[int, _Arrival]]
    ) -> Iterator[tuple[int, Counts]]:
        """Append one stage to every front of the state; gives its groups and the new state."""
        if not arrivals:
            return
        for groups, arrival in arrivals:
            total_ms = np.maximum(self._front_ms(state, arrival), self._stage_times(groups))
            where = total_ms.argmin(axis=1)
            value = total_ms[self._ends, where]
            target = tuple(
                state[h] - added for h, added in zip(arrival.order, arrival.added, strict=True)
            )
            self._take(target, arrival, where, value)
            yield groups, target

    def _front_ms(self, state: Counts, arrival: _Arrival) -> Floats:
        """For each end of the front its bottleneck, with the transfer to the stage behind it."""
        if state == self._start:
            return self._best_ms[state]
        # The stages before and behind, both in the order of the hosts of this state.
        back_at = {old: new for new, old in enumerate(arrival.order)}
        receivers = tuple(arrival.added[back_at[h]] for h in range(len(state)))
        rates = np.array([self._ms_per_byte(last, receivers) for last in self._arrival[state]])
        transfer_ms = self._round_trip_bytes * rates[self._last[state]]
        front_ms: Floats = np.maximum(self._best_ms[state], transfer_ms)
        return front_ms

    def _take(
        self, target: Counts, arrival: _Arrival, where: NDArray[np.int64], value: Floats
    ) -> None:
        """Keep the fronts that are better than those known in the state."""
        if target not in self._best_ms:
            self._best_ms[target] = np.full(len(where), np.inf)
            self._arrival[target] = []
            self._last[target] = np.zeros(len(where), dtype=np.int64)
            self._cut[target] = np.zeros(len(where), dtype=np.int64)
        better = value < self._best_ms[target]
        if better.any():
            self._best_ms[target][better] = value[better]
            self._last[target][better] = len(self._arrival[target])
            self._cut[target][better] = where[better]
            self._arrival[target].append(arrival)

    def _stage_times(self, groups: int) -> Floats:
        """[j, i]: the time of layers i..j-1 on so many groups; infinite without a layer."""
        if groups not in self._stage_ms_LL:
            stage_ms_LL = self._compute_ms_LL / (groups * self._group_size)
            by_end = np.where(self._no_layer, np.inf, stage_ms_LL).T
            self._stage_ms_LL[groups] = np.ascontiguousarray(by_end)
        return self._stage_ms_LL[groups]

    def _ms_per_byte(self, front: _Arrival, receivers: Counts) -> float:
        """Milliseconds for a byte from the last stage of a front to the stage appended to it."""
        key = (front.added, receivers)
        if key not in self._rates:
            self._rates[key] = _ms_per_byte(self._view, *key)
        return self._rates[key]

    def _stages(self, state: Counts) -> tuple[Stage, ...]:
        """The stages of a state: back through the arrivals, then devices for stage after stage."""
        end = len(self._compute_ms_LL) - 1
        steps: list[tuple[int, int, _Arrival]] = []
        while state != self._start:
            arrival = self._arrival[state][int(self._last[state][end])]
            start = int(self._cut[state][end])
            steps.insert(0, (start, end, arrival))
            state, end = arrival.before, start
        hosts = [list(self._view.hosts[h]) for h in self._host_order]
        stages = []
        for start, end, arrival in steps:
            hosts = [hosts[h] for h in arrival.order]
            devices: list[int] = []
            for host, count in zip(hosts, arrival.added, strict=True):
                devices += host[:count]
                del host[:count]
            stages.append(Stage(layers=range(start, end), devices=tuple(devices)))
        return tuple(stages)


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
    num_layers, num_devices = len(cost.forward_ms_L), view.num_devices
    cuts = np.arange(1, num_layers)
    sums = [
        prefix_sums(values)
        for values in (cost.forward_ms_L, cost.backward_ms_L, cost.parameter_bytes_L)
    ]
    best_cut, best_front, best_ms = 0, tuple[int, ...](), np.inf
    free = tuple(len(host) for host in view.hosts)
    for ahead in range(1, num_devices):
        for front in dict.fromkeys((_fill(free, range(len(free)), ahead), _scatter(free, ahead))):
            behind = tuple(f - a for f, a in zip(free, front, strict=True))
            sent_ms = cost.output_bytes_L[:-1] * _ms_per_byte(view, front, behind)
            columns: list[Floats] = []
            for total, (first, second) in zip(
                sums,
                [(1 / (ahead * view.speed), 1 / ((num_devices - ahead) * view.speed))] * 2
                + [(_reduce_ms_per_byte(view, front), _reduce_ms_per_byte(view, behind))],
                strict=True,
            ):
                middle = sent_ms if len(columns) < 2 else np.zeros(len(cuts))
                before, after = total[cuts] * first, (total[-1] - total[cuts]) * second
                columns.append(np.stack([before, middle, after], axis=1))
            latency = pipeline_latency_ms(columns[0], columns[1], columns[2], num_microbatches)
            where = int(latency.argmin())
            if latency[where] < best_ms:
                best_cut, best_front, best_ms = int(cuts[where]), front, float(latency[where])
    chosen = [d for host, count in zip(view.hosts, best_front, strict=True) for d in host[:count]]
    rest = [d for d in view.ranks if d not in set(chosen)]
    stages = tuple(stages_from_ends([best_cut, num_layers], [chosen, rest]))
    return Split(stages=stages, objective_ms=best_ms)
