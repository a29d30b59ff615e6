"""Tiny random chains, a solver that proves their optimum, and a plain replay of their orders."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from pipeplan import _core

__all__ = ["Costs", "optimum_ms", "random_costs", "replay"]

FORWARD, BACKWARD, WEIGHT = range(3)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a chain costs, in whole numbers; lists by stage, `room` by group."""

    num_microbatches: int
    group: list[int]
    forward: list[int]
    backward: list[int]
    weight: list[int]
    there: list[int]
    back: list[int]
    reduce: list[int]
    parts: list[int]
    """Equal parts of each all-reduce, 1 or 2."""
    is_split: list[bool]
    held: list[int]
    kept: list[int]
    room: list[float]

    @property
    def num_stages(self) -> int:
        return len(self.group)

    def for_kernels(self) -> _core.Chain:
        return _core.Chain(
            num_microbatches=self.num_microbatches,
            group=self.group,
            forward_ms=self.forward,
            backward_ms=self.backward,
            weight_ms=self.weight,
            there_ms=self.there,
            back_ms=self.back,
            reduce_ms=self.reduce,
            early_ms=[self.early(stage) for stage in range(self.num_stages)],
            last_part_ms=[ms // n for ms, n in zip(self.reduce, self.parts, strict=True)],
            is_split=self.is_split,
            held_bytes=self.held,
            kept_bytes=self.kept,
            room_bytes=self.room,
        )

    def lengths(self, stage: int) -> tuple[int, int, int]:
        return self.forward[stage], self.backward[stage], self.weight[stage]

    def early(self, stage: int) -> int:
        """How long before the end of the stage's last block the first part is ready."""
        last = self.weight[stage] if self.is_split[stage] else self.backward[stage]
        return last // 2 if self.parts[stage] == 2 else 0

    def channel(self, sender: int, receiver: int) -> tuple[int, int] | None:
        ends = self.group[sender], self.group[receiver]
        return None if ends[0] == ends[1] else ends


def random_costs(rng: random.Random, *, most_stages: int = 4, most_microbatches: int = 3) -> Costs:
    """A chain of a few stages, with split or whole backwards, with or without a memory limit."""
    stages = rng.randint(1, most_stages)
    order = [rng.randrange(rng.randint(1, 3)) for _ in range(stages)]
    numbers = {group: n for n, group in enumerate(dict.fromkeys(order))}
    group = [numbers[each] for each in order]
    splits = rng.random() < 0.6
    is_split = [splits and rng.random() < 0.85 for _ in range(stages)]

    def draw(low: int, high: int) -> list[int]:
        return [rng.randint(low, high) for _ in range(stages)]

    between = [one != other for one, other in pairwise(group)] + [False]
    replicated = [rng.random() < 0.5 for _ in numbers]
    held = draw(1, 4)
    backward, weight = draw(1, 8), [rng.randint(1, 6) if split else 0 for split in is_split]
    reduce = [rng.randint(1, 12) if replicated[g] else 0 for g in group]
    # Two parts where halves are whole numbers.
    parts = [
        1 + (ms % 2 == 0 and (w if split else b) % 2 == 0 and rng.random() < 0.8)
        for ms, b, w, split in zip(reduce, backward, weight, is_split, strict=True)
    ]
    room = [inf] * len(numbers)
    if rng.random() < 0.5:
        for number in range(len(numbers)):
            least = sum(max(h, 4) for h, g in zip(held, group, strict=True) if g == number)
            room[number] = float(least + rng.randint(0, 6))
    return Costs(
        num_microbatches=rng.randint(1, most_microbatches),
        group=group,
        forward=draw(1, 6),
        backward=backward,
        weight=weight,
        there=[rng.randint(0, 5) if there else 0 for there in between],
        back=[rng.randint(0, 5) if there else 0 for there in between],
        reduce=reduce,
        parts=parts,
        is_split=is_split,
        held=held,
        kept=[rng.randint(0, 4) if split else 0 for split in is_split],
        room=room,
    )


def optimum_ms(costs: Costs) -> tuple[float, float]:
    """Two times between which the least of any order lies; mostly they are the same.

    Transfers may be sent in any order.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    horizon = costs.num_microbatches * sum(
        map(sum, (costs.forward, costs.backward, costs.weight, costs.there, costs.back))
    ) + sum(costs.reduce)
    on_group: dict[int, list[object]] = {}
    on_channel: dict[tuple[int, int], list[object]] = {}
    held: dict[int, list[tuple[object, int]]] = {}
    last = model.new_int_var(0, horizon, "last")
    starts: dict[tuple[int, int, int], cp_model.IntVar] = {}

    def new(length: int, lane: list[object]) -> cp_model.IntVar:
        start = model.new_int_var(0, horizon, "")
        lane.append(model.new_fixed_size_interval_var(start, length, ""))
        model.add(start + length <= last)
        return start

    for p in range(costs.num_stages):
        for m in range(costs.num_microbatches):
            for kind, length in enumerate(costs.lengths(p)):
                if kind != WEIGHT or costs.is_split[p]:
                    lane = on_group.setdefault(costs.group[p], [])
                    starts[p, kind, m] = new(length, lane)

    def send(p: int, q: int, kind: int, m: int, ms: int) -> None:
        end = starts[p, kind, m] + costs.lengths(p)[kind]
        channel = costs.channel(p, q)
        if channel is not None:
            start = new(ms, on_channel.setdefault(channel, []))
            model.add(start >= end)
            end = start + ms
        model.add(starts[q, kind, m] >= end)

    def hold(p: int, start: object, end: object, amount: int) -> None:
        size = model.new_int_var(0, horizon, "")
        until = model.new_int_var(0, horizon, "")
        model.add(until == end)
        held.setdefault(costs.group[p], []).append(
            (model.new_interval_var(start, size, until, ""), amount)
        )

    for p in range(costs.num_stages):
        ring = on_group.setdefault(-1 - costs.group[p], [])
        part_ms = costs.reduce[p] // costs.parts[p]
        first, last_part = new(costs.reduce[p] - part_ms, ring), new(part_ms, ring)
        for m in range(costs.num_microbatches):
            if p + 1 < costs.num_stages:
                send(p, p + 1, FORWARD, m, costs.there[p])
                send(p + 1, p, BACKWARD, m, costs.back[p])
            else:
                model.add(starts[p, BACKWARD, m] >= starts[p, FORWARD, m] + costs.forward[p])
            end = starts[p, BACKWARD, m] + costs.backward[p]
            hold(p, starts[p, FORWARD, m], end, costs.held[p])
            if costs.is_split[p]:
                model.add(starts[p, WEIGHT, m] >= end)
                hold(p, end, starts[p, WEIGHT, m] + costs.weight[p], costs.kept[p])
                end = starts[p, WEIGHT, m] + costs.weight[p]
            model.add(first >= end - costs.early(p))
            model.add(last_part >= end)
    for lane in (*on_group.values(), *on_channel.values()):
        model.add_no_overlap(lane)
    for group, uses in held.items():
        if costs.room[group] < inf:
            intervals, amounts = zip(*uses, strict=True)
            model.add_cumulative(intervals, amounts, int(costs.room[group]))
    model.minimize(last)
    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # it would drop Python's own handler for good
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = 2
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
    return round(solver.best_objective_bound), round(solver.objective_value)


def replay(costs: Costs, order: Sequence[int]) -> float:
    """The time of an order of decisions, which has to be complete and to keep all rooms."""
    stages, many = costs.num_stages, costs.num_microbatches
    free = dict.fromkeys(costs.group, 0.0)
    used = dict.fromkeys(costs.group, 0.0)
    channel_free: dict[tuple[int, int], float] = {}
    there: dict[tuple[int, int, int], float] = {(0, FORWARD, m): 0.0 for m in range(many)}
    done: dict[int, float] = {}
    seen = set()
    for block in order:
        rest, m = divmod(block, many)
        p, kind = divmod(rest, 3)
        g = costs.group[p]
        start = max(free[g], there[p, kind, m])
        end = free[g] = start + costs.lengths(p)[kind]
        seen.add((p, kind, m))
        if kind == FORWARD:
            used[g] += costs.held[p]
            assert used[g] <= costs.room[g] * (1 + 1e-9)
        elif kind == BACKWARD:
            used[g] += (costs.kept[p] if costs.is_split[p] else 0) - costs.held[p]
            assert used[g] <= costs.room[g] * (1 + 1e-9)
            there[p, WEIGHT, m] = end
        else:
            used[g] -= costs.kept[p]
        if kind != FORWARD:
            done[p] = end
        q = p + 1 if kind == FORWARD else p - 1
        if kind == FORWARD and q == stages:
            there[p, BACKWARD, m] = end
        elif kind != WEIGHT and q >= 0:
            channel = costs.channel(p, q)
            if channel is not None:
                end = max(end, channel_free.get(channel, 0.0))
                end += (costs.there if kind == FORWARD else costs.back)[min(p, q)]
                channel_free[channel] = end
            there[q, kind, m] = end
    assert len(seen) == len(order) == many * (2 * stages + sum(costs.is_split))
    rings = dict.fromkeys(costs.group, 0.0)
    parts = []
    for p in range(stages):
        part_ms = costs.reduce[p] // costs.parts[p]
        parts.append((done[p] - costs.early(p), p, costs.reduce[p] - part_ms))
        parts.append((done[p], p, part_ms))
    for ready, p, ms in sorted(parts):
        if ms:
            rings[costs.group[p]] = max(rings[costs.group[p]], ready) + ms
    return max(*free.values(), *rings.values())
