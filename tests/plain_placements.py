"""An oracle for `_core.place_groups`: the same dynamic program, one state at a time.

Slower by a factor of about fifty. Ties go to what was found first, as in the kernel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.cost import CostModel, Floats
from pipeplan.pipeline import Stage
from pipeplan.planning.baselines.dapple import Counts, _fill, _ms_per_byte, _scatter
from pipeplan.planning.baselines.view import ClusterView, range_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """How the last stage of a state was placed."""

    before: Counts
    """The state that it was added to."""
    added: Counts
    """Its devices on each host, in the order of the new state's hosts."""
    order: tuple[int, ...]
    """For each host of the new state its index in the old state."""


class PlacementProgram:
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
