"""Look for plans that fit into memory, whatever time they take.

Of some used devices the longest front of layers counts: it leaves the least to the others. So there
is one state for each set of used devices; where paths are missing, one for each set and its last
stage. Each state is extended by every stage that may follow. If there are too many states of so
many devices, those that waste the least memory are kept.

Three searches: stages of one device; of several with even shares; with shares as memory allows.
Complexity: at most `MAX_STEPS` steps each.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.planning.planner.stage_room import ROUNDING, Ends, StageRoom
from pipeplan.planning.problem import Problem, check_deadline

__all__ = ["Found", "stages_that_fit"]

MAX_DEVICES = 64
"""Sets of devices are the bits of a number."""
MAX_OPTIONS = 1100
"""Sets of devices that a stage may have: all sets of 10 devices, pairs and triples of 16."""
MAX_STEPS = 2e7
"""States times options in a search, about 50 nanoseconds each."""
MAX_FOUND = 8
"""Plans of a search."""
MAX_ALL_ENDS = 64
"""Layers up to which stages are tried with every end, where devices cannot be left out."""
NO_STATE = -1

Masks = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was found: for each plan the ends of its stages and their devices."""

    plans: tuple[tuple[tuple[range, tuple[int, ...]], ...], ...] = ()
    is_complete: bool = False
    """Whether any shares were tried and no plan was left out: if there is none, none fits."""


def stages_that_fit(problem: Problem, *, free_shares: bool = False) -> Found:
    """Some plans that fit, with even shares or with any. Raises `DeadlineError`."""
    if not problem.limits_memory:
        return Found()
    room = StageRoom(problem)
    if room.memory_bytes.sum() * (1 + ROUNDING) < room.needed_bytes[-1]:
        return Found(is_complete=True)  # each layer is on some device, with all its samples
    if problem.cluster.num_devices > MAX_DEVICES:
        return Found()
    several = _Options.of(problem, problem.cost.max_replicas)
    if free_shares:
        search = _Search(problem, room, several, room.free_ends)
        return Found(plans=tuple(search.run()), is_complete=search.is_complete)
    for options in (_Options.of(problem, 1), several):
        plans = _Search(problem, room, options, room.even_ends).run()
        if plans:
            return Found(plans=tuple(plans))
    return Found()


@dataclass(frozen=True, slots=True)
class _Options:
    """The sets of devices that a stage may have."""

    sets: list[tuple[int, ...]]
    is_complete: bool
    """Whether these are all sets."""

    @classmethod
    def of(cls, problem: Problem, max_replicas: int) -> "_Options":
        """The smaller sets come first; of larger ones only neighbours by memory and in order."""
        most = min(problem.cluster.num_devices, max_replicas)
        if _are_all_equal(problem):
            return cls(list(_runs([range(problem.cluster.num_devices)], 1, most)), True)
        connected_DD = problem.cost.connected_DD()
        sets: list[tuple[int, ...]] = [(u,) for u in range(problem.cluster.num_devices)]
        last = sets
        for size in range(2, most + 1):
            larger = _extended(last, connected_DD, MAX_OPTIONS - len(sets))
            if larger is None:
                runs = itertools.islice(_runs(_orders(problem), size, most), MAX_OPTIONS)
                linked = [run for run in runs if connected_DD[np.ix_(run, run)].all()]
                return cls([*sets, *dict.fromkeys(linked)], False)
            last = larger
            sets = [*sets, *larger]
        return cls(sets, True)


def _are_all_equal(problem: Problem) -> bool:
    """Whether it does not matter which device a stage has, so that neighbours will do."""
    limits, memory = problem.limits, {device.memory_gb for device in problem.cluster.devices}
    has_ends = limits.first_on is not None or limits.last_on is not None
    return len(memory) == 1 and problem.cost.is_connected and not has_ends


def _extended(
    sets: Sequence[tuple[int, ...]], connected_DD: NDArray[np.bool_], most: int
) -> list[tuple[int, ...]] | None:
    """All connected sets with one device more; None if there are too many."""
    larger: list[tuple[int, ...]] = []
    for one in sets:
        after = np.flatnonzero(connected_DD[list(one)].all(axis=0))
        larger += [(*one, int(u)) for u in after if u > one[-1]]
        if len(larger) > most:
            return None
    return larger


def _orders(problem: Problem) -> list[Sequence[int]]:
    """The devices by memory, and in the cluster's own order."""
    num_devices = problem.cluster.num_devices
    memory = [device.memory_gb or np.inf for device in problem.cluster.devices]
    return [sorted(range(num_devices), key=lambda u: -memory[u]), range(num_devices)]


def _runs(orders: Sequence[Sequence[int]], least: int, most: int) -> Iterator[tuple[int, ...]]:
    """Neighbours in some orders, so many at least and at most."""
    for size in range(least, most + 1):
        for order in orders:
            for first in range(len(order) - size + 1):
                yield tuple(sorted(order[first : first + size]))


class _Search:
    """One search over states of used devices."""

    def __init__(
        self,
        problem: Problem,
        room: StageRoom,
        options: _Options,
        ends_of: Callable[[Sequence[int]], Ends],
    ) -> None:
        self.problem, self.room, self.sets = problem, room, options.sets
        self.is_complete = options.is_complete
        self.num_devices = problem.cluster.num_devices
        self.is_linked = problem.cost.is_connected
        self.ends_of = ends_of
        self._ends: dict[int, Ends] = {}
        self.masks = [sum(1 << u for u in one) for one in self.sets]
        self.near = [self._neighbours(one) for one in self.sets]
        self.before = [self._equals_before(one) for one in self.sets]
        self.shorter = self._shorter_ends()
        self.width = int(MAX_STEPS / len(self.sets) / self.num_devices) + 1
        limits = problem.limits
        self.min_stages = limits.min_stages
        self.max_stages = limits.max_stages or self.num_devices
        # Every state: [used devices, front, stages, last option, state before].
        self.used: list[Masks] = []
        self.columns: list[NDArray[np.int64]] = []

    @property
    def _may_skip(self) -> bool:
        """Whether a device that holds no layer may be left out, so that longer is always better."""
        limits = self.problem.limits
        has_ends = limits.first_on is not None or limits.last_on is not None
        return self.is_linked and limits.min_stages == 1 and not has_ends

    def _shorter_ends(self) -> Ends:
        """For each end one that is worth a try as well.

        A device that has to follow may be too small for the layer behind the longest front. Of many
        layers, only ends are tried from which the next layer needs less.
        """
        shorter = np.full(self.room.num_layers + 1, NO_STATE)
        if self._may_skip:
            return shorter
        self.is_complete = False
        if self.room.num_layers <= MAX_ALL_ENDS:
            return np.arange(-1, self.room.num_layers)
        needs = [*np.diff(self.room.needed_bytes).tolist(), np.inf]
        for end in range(1, len(needs)):
            last = end - 1
            while last > 0 and not needs[last] < needs[end]:
                last = int(shorter[last])
            shorter[end] = last if last > 0 else NO_STATE
        return shorter

    def _neighbours(self, devices: Sequence[int]) -> int:
        """The devices that have paths to all of these."""
        if self.is_linked:
            return (1 << self.num_devices) - 1
        all_of = self.problem.cost.connected_DD()[list(devices)].all(axis=0)
        return sum(1 << int(u) for u in np.flatnonzero(all_of))

    def _equals_before(self, devices: Sequence[int]) -> int:
        """Where only memory tells devices apart: the equal ones that have to be used before."""
        if not self._may_skip:
            return 0
        memory = self.room.memory_bytes
        return sum(
            1 << v
            for v in range(self.num_devices)
            if v not in devices and any(v < u and memory[v] == memory[u] for u in devices)
        )

    def run(self) -> list[tuple[tuple[range, tuple[int, ...]], ...]]:
        """The plans found, by the number of devices that they use."""
        found: list[tuple[tuple[range, tuple[int, ...]], ...]] = []
        waiting: dict[int, list[tuple[Masks, NDArray[np.int64]]]] = {}
        used = np.zeros(1, dtype=np.uint64)
        columns = np.array([[0], [0], [NO_STATE], [NO_STATE]])
        waiting[0] = [(used, columns)]
        num_before = 0
        for num_used in range(self.num_devices + 1):
            if num_used not in waiting:
                continue
            check_deadline(self.problem.deadline)
            used, columns = self._kept(waiting.pop(num_used))
            self.used.append(used)
            self.columns.append(columns)
            done = np.flatnonzero(self._is_plan(columns))
            found += [self._stages(num_before + int(i)) for i in done[:MAX_FOUND]]
            if len(found) >= MAX_FOUND:
                break
            for size, part in self._next(used, columns, num_before):
                waiting.setdefault(num_used + size, []).append(part)
            num_before += len(used)
        return found[:MAX_FOUND]

    def _is_plan(self, columns: NDArray[np.int64]) -> NDArray[np.bool_]:
        front, num_stages, option, _ = columns
        done: NDArray[np.bool_] = (front == self.room.num_layers) & (num_stages >= self.min_stages)
        last_on = self.problem.limits.last_on
        if last_on is not None:
            has_last = np.array([last_on in one for one in self.sets] + [False])
            done &= has_last[option]
        return done

    def _next(
        self, used: Masks, columns: NDArray[np.int64], num_before: int
    ) -> Iterator[tuple[int, tuple[Masks, NDArray[np.int64]]]]:
        """The states with one stage more, by the number of its devices."""
        front, num_stages, option, _ = columns
        near = np.array([*self.near, (1 << self.num_devices) - 1], dtype=np.uint64)[option]
        is_open = (front < self.room.num_layers) & (num_stages < self.max_stages)
        first_on, last_on = self.problem.limits.first_on, self.problem.limits.last_on
        if last_on is not None:
            is_open &= (used & np.uint64(1 << last_on)) == 0
        for index, (one, mask) in enumerate(zip(self.sets, self.masks, strict=True)):
            bits, before = np.uint64(mask), np.uint64(self.before[index])
            allowed = is_open & ((used & bits) == 0) & ((bits & ~near) == 0)
            if before:
                allowed &= (before & ~used) == 0
            if first_on is not None and first_on not in one:
                allowed &= num_stages > 0
            chosen = np.flatnonzero(allowed)
            number = num_stages[chosen] + 1
            # So many layers are left to the stages that have to follow.
            most = self.room.num_layers - np.maximum(0, self.min_stages - number)
            ends = np.minimum(self._ends_on(index)[front[chosen]], most)
            while (is_longer := ends > front[chosen]).any():
                chosen, number, ends = chosen[is_longer], number[is_longer], ends[is_longer]
                made = np.stack([ends, number, np.full(len(ends), index), num_before + chosen])
                yield len(one), (used[chosen] | bits, made)
                ends = self.shorter[ends]

    def _ends_on(self, index: int) -> Ends:
        if index not in self._ends:
            self._ends[index] = self.ends_of(self.sets[index])
        return self._ends[index]

    def _kept(
        self, parts: Sequence[tuple[Masks, NDArray[np.int64]]]
    ) -> tuple[Masks, NDArray[np.int64]]:
        """The longest front of each state, and of all states those that waste the least."""
        used = np.concatenate([part[0] for part in parts])
        columns = np.concatenate([part[1] for part in parts], axis=1)
        keys = [-columns[0], used]
        if not self._may_skip:
            keys += [columns[0], columns[2]]
        if self.min_stages > 1 or self.max_stages < self.num_devices:
            keys.append(columns[1])
        order = np.lexsort(keys)
        same = np.ones(len(order) - 1, dtype=bool)
        for key in keys[1:]:
            same &= key[order][1:] == key[order][:-1]
        order = order[np.concatenate(([True], ~same))]
        if len(order) > self.width:
            self.is_complete = False
            waste = self._waste(used[order], columns[0][order])
            order = np.sort(order[np.argsort(waste, kind="stable")[: self.width]])
        return used[order], columns[:, order]

    def _waste(self, used: Masks, front: NDArray[np.int64]) -> NDArray[np.float64]:
        memory = np.minimum(self.room.memory_bytes, self.room.needed_bytes[-1])
        waste = -self.room.needed_bytes[front]
        for u in range(self.num_devices):
            waste += np.where(used >> np.uint64(u) & np.uint64(1), memory[u], 0.0)
        return waste

    def _stages(self, state: int) -> tuple[tuple[range, tuple[int, ...]], ...]:
        """The stages that lead to a state, by its number."""
        stages = []
        columns = np.concatenate(self.columns, axis=1)
        while columns[3, state] != NO_STATE:
            front, _, option, before = columns[:, state].tolist()
            stages.append((range(int(columns[0, before]), front), self.sets[option]))
            state = before
        return tuple(reversed(stages))
