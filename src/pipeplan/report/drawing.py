"""Everything there is to see in a plan, computed once; terminal, SVG, HTML and trace draw from it.

Blocks, transfers and all-reduces are *items* with one numbering: blocks stage by stage in the
order in which they run, then transfers by channel, forward before backward, in the order in which
they are sent, then one all-reduce a stage. Each item knows the one item that it waited for, the
last to end of all it needed. Two stages, F and a transfer take 1, B takes 2::

    stage 0  F0 F1 .  .  .  .  B0 B0 .  B1 B1
    there    .  f0 f1
    back     .  .  .  .  .  b0 .  .  b1
    stage 1  .  .  F0 B0 B0 F1 B1 B1

B1 on stage 0 waited for b1, b1 for B1 on stage 1, that one for F1 before it, and so on to the
start: the critical path, whose lengths add up to the iteration.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipeplan.cost import BYTES_IN_GB, CostModel
from pipeplan.pipeline import Kind, Plan, Stage, Timeline
from pipeplan.report.units import humanise_gb

__all__ = [
    "NOTHING",
    "Cut",
    "CutChoice",
    "Drawing",
    "Gap",
    "Item",
    "Link",
    "Phase",
    "Shares",
    "StageFigures",
    "StageMemory",
    "humanise_bytes",
]

NOTHING = -1
"""What an item waited for that began with the iteration."""

SAME_INSTANT_MS = 1e-9
"""The cost model's: times this close are one instant."""


class Item(NamedTuple):
    """A block, a transfer or an all-reduce, whichever of the three its number says."""

    kind: Kind | None
    """None for an all-reduce."""
    place: int
    """The stage, or for a transfer the channel between stages `place` and `place + 1`."""
    microbatch: int
    """-1 for an all-reduce."""
    start_ms: float
    end_ms: float

    @property
    def length_ms(self) -> float:
        """How long it takes."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time in which a stage does nothing."""

    start_ms: float
    end_ms: float
    waited_for: int
    """The item that ended the gap; for the wait at the barrier the last all-reduce of all."""
    on_links_ms: float
    """The part in which what it waited for was on a link, or queued for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of the iteration: warm-up, steady or drain."""

    name: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Where the used devices' time goes; the four add up to 1."""

    compute: float
    communication: float
    """Idle while the awaited data was on a link: what overlap did not hide."""
    all_reduce: float
    bubble: float
    """Idle for any other reason: filling, draining, uneven stages or replicas, the barrier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """A stage's memory over time: a line in the number of microbatches that it holds."""

    times_ms: tuple[float, ...]
    in_flight: tuple[int, ...]
    """From the time at the same position on."""
    base_gb: tuple[float, ...]
    """By device of the stage: with no microbatch there."""
    per_microbatch_gb: tuple[float, ...]
    peak_gb: tuple[float, ...]
    limit_gb: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutChoice:
    """What one place to cut costs, between the device sets of two neighbouring stages."""

    bytes_across: float
    """Both directions, one microbatch."""
    busiest_ms: float
    """In one iteration: the busier of the two stages, or the link if that is busier still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The cut behind a stage, and the two beside it that the planner did not take."""

    here: CutChoice
    earlier: CutChoice | None
    """One layer earlier; None where the stage would be empty."""
    later: CutChoice | None

    @property
    def reason(self) -> str:
        """Why here, in a few words."""
        beside = [choice for choice in (self.earlier, self.later) if choice]
        if not beside:
            return "the only place"
        fewest = all(self.here.bytes_across <= c.bytes_across for c in beside) and any(
            self.here.bytes_across < c.bytes_across for c in beside
        )
        # Sums of the same layers in another order differ in their last digits.
        balanced = all(self.here.busiest_ms <= c.busiest_ms * (1 + 1e-9) for c in beside)
        if fewest and balanced:
            return "fewest bytes and best balance"
        if balanced:
            return "best balance"
        return "fewest bytes nearby" if fewest else "serves the plan as a whole"

    @property
    def evidence(self) -> str:
        """The numbers behind the reason."""
        parts = [f"{humanise_bytes(self.here.bytes_across)} cross"]
        for where, choice in (("earlier", self.earlier), ("later", self.later)):
            if choice:
                change = (
                    choice.busiest_ms / self.here.busiest_ms - 1 if self.here.busiest_ms else 0.0
                )
                parts.append(
                    f"a layer {where} {humanise_bytes(choice.bytes_across)},"
                    f" busier side {100 * change:+.1f} %"
                )
        return "; ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """One stage in numbers; times of one microbatch, but for the all-reduce."""

    forward_ms: float
    backward_ms: float
    send_ms: float | None
    """To the next stage; None for the last one."""
    return_ms: float | None
    all_reduce_ms: float
    utilisation: float
    """The part of its devices' time in which they compute."""
    shares: Shares
    cut: Cut | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one directed link carries in an iteration."""

    source: int
    target: int
    num_bytes: float
    busy: float
    """The part of the iteration in which it carries something."""
    gb_per_s: float


class Drawing:
    """A plan and its timeline, with all that people look for in them, each worked out once."""

    def __init__(self, plan: Plan, timeline: Timeline) -> None:
        self.plan = plan
        self.timeline = timeline
        self.cost = CostModel(plan.model, plan.cluster)
        self.costs = self.cost.pipeline_costs(plan.stages)
        self.iteration_ms = timeline.iteration_ms
        self.num_stages = len(plan.stages)
        self.first_transfer = sum(len(order) for order in timeline.blocks)
        """The number of the first transfer among the items."""
        self.first_all_reduce = self.first_transfer + len(timeline.transfers)
        self.num_used_devices = sum(stage.num_replicas for stage in plan.stages)

    # ------------------------------------------------------------------ items and waits

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """Blocks, transfers, all-reduces, in the numbering that the module states."""
        timeline = self.timeline
        blocks = [
            Item(t.block.kind, t.block.stage, t.block.microbatch, t.start_ms, t.end_ms)
            for order in timeline.blocks
            for t in order
        ]
        transfers = [
            Item(t.kind, t.channel, t.microbatch, t.start_ms, t.end_ms) for t in timeline.transfers
        ]
        reduces = [Item(None, r.stage, -1, r.start_ms, r.end_ms) for r in timeline.all_reduces]
        return (*blocks, *transfers, *reduces)

    @cached_property
    def waited_for(self) -> tuple[int, ...]:
        """For each item the one that it waited for; `NOTHING` if it began with the iteration."""
        items = self.items
        number_of = {
            (number >= self.first_transfer, item.kind, item.place, item.microbatch): number
            for number, item in enumerate(items[: self.first_all_reduce])
        }
        last_stage = self.num_stages - 1
        waits = [NOTHING] * len(items)
        previous = NOTHING
        for number in range(self.first_transfer):
            kind, stage, microbatch, _, _ = items[number]
            if previous != NOTHING and items[previous].place != stage:
                previous = NOTHING
            if kind is Kind.FORWARD:
                channel = stage - 1
                arrives = stage > 0
            else:
                channel = stage
                arrives = stage < last_stage
            waits[number] = previous
            if arrives:
                arrival = number_of[True, kind, channel, microbatch]
                if previous == NOTHING or (
                    items[arrival].end_ms > items[previous].end_ms + SAME_INSTANT_MS
                ):
                    waits[number] = arrival
            previous = number
        for lane in self._channel_lanes():
            holder = NOTHING  # the last transfer that kept this channel busy for any time
            for number in lane:
                kind, channel, microbatch, start_ms, end_ms = items[number]
                stage = channel if kind is Kind.FORWARD else channel + 1
                waits[number] = number_of[False, kind, stage, microbatch]
                if holder != NOTHING and (
                    items[waits[number]].end_ms + SAME_INSTANT_MS
                    < items[holder].end_ms
                    <= start_ms + SAME_INSTANT_MS
                ):
                    waits[number] = holder
                if end_ms - start_ms > SAME_INSTANT_MS:
                    holder = number
        end = 0
        for stage, order in enumerate(self.timeline.blocks):
            end += len(order)
            waits[self.first_all_reduce + stage] = end - 1
        return tuple(waits)

    def _channel_lanes(self) -> list[list[int]]:
        """Transfers that exclude each other, in the order in which they are sent."""
        num_microbatches = self.plan.microbatches
        lanes = [
            list(range(first, first + num_microbatches))
            for first in range(self.first_transfer, self.first_all_reduce, num_microbatches)
        ]
        if not self.costs.half_duplex:
            return lanes
        items = self.items
        return [
            sorted(there + back, key=lambda number: items[number][3:])
            for there, back in zip(lanes[::2], lanes[1::2], strict=True)
        ]

    @cached_property
    def last_item(self) -> int:
        """The all-reduce that ends the iteration."""
        reduces = self.timeline.all_reduces
        return self.first_all_reduce + max(
            range(self.num_stages), key=lambda stage: reduces[stage].end_ms
        )

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """From the start to the end of the iteration, each item the one that the next waited for.

        Waiting leads back in time, or along an order that cannot be circular: it ends.
        """
        path = [self.last_item]
        while self.waited_for[path[-1]] != NOTHING:
            path.append(self.waited_for[path[-1]])
        return tuple(reversed(path))

    @cached_property
    def critical_shares(self) -> Shares:
        """What the critical path consists of; it has no bubble."""
        compute = links = reduce = 0.0
        for number in self.critical_path:
            if number < self.first_transfer:
                compute += self.items[number].length_ms
            elif number < self.first_all_reduce:
                links += self.items[number].length_ms
            else:
                reduce += self.items[number].length_ms
        whole_ms = compute + links + reduce or 1.0
        return Shares(
            compute=compute / whole_ms,
            communication=links / whole_ms,
            all_reduce=reduce / whole_ms,
            bubble=0.0,
        )

    def name_of(self, number: int) -> str:
        """An item in words: `F3 on stage 1`."""
        if number == NOTHING:
            return "the start"
        kind, place, microbatch, _, _ = self.items[number]
        if kind is None:
            return f"all-reduce of stage {place}"
        if number < self.first_transfer:
            return f"{kind}{microbatch} on stage {place}"
        ends = (place, place + 1) if kind is Kind.FORWARD else (place + 1, place)
        return f"transfer of {kind}{microbatch} from stage {ends[0]} to {ends[1]}"

    # -------------------------------------------------------------------- idle and shares

    @cached_property
    def gaps(self) -> tuple[tuple[Gap, ...], ...]:
        """For each stage the times in which it does nothing, in order."""
        gaps: list[tuple[Gap, ...]] = []
        number = 0
        for order, reduce in zip(self.timeline.blocks, self.timeline.all_reduces, strict=True):
            mine: list[Gap] = []
            free_ms = 0.0
            for timed in order:
                if timed.start_ms > free_ms + SAME_INSTANT_MS:
                    mine.append(self._gap(free_ms, timed.start_ms, self.waited_for[number]))
                free_ms = timed.end_ms
                number += 1
            if self.iteration_ms > reduce.end_ms + SAME_INSTANT_MS:
                mine.append(
                    Gap(
                        start_ms=reduce.end_ms,
                        end_ms=self.iteration_ms,
                        waited_for=self.last_item,
                        on_links_ms=0.0,
                    )
                )
            gaps.append(tuple(mine))
        return tuple(gaps)

    def _gap(self, start_ms: float, end_ms: float, waited_for: int) -> Gap:
        on_links_ms = 0.0
        number = waited_for
        while number >= self.first_transfer and self.items[number].end_ms > start_ms:
            item = self.items[number]
            on_links_ms += min(item.end_ms, end_ms) - max(item.start_ms, start_ms)
            number = self.waited_for[number]
        return Gap(start_ms=start_ms, end_ms=end_ms, waited_for=waited_for, on_links_ms=on_links_ms)

    @cached_property
    def shares(self) -> Shares:
        """Where the time of all used devices goes."""
        weights = [stage.num_replicas / self.num_used_devices for stage in self.plan.stages]
        parts = list(zip(weights, self._stage_shares, strict=True))
        return Shares(
            compute=math.fsum(w * s.compute for w, s in parts),
            communication=math.fsum(w * s.communication for w, s in parts),
            all_reduce=math.fsum(w * s.all_reduce for w, s in parts),
            bubble=math.fsum(w * s.bubble for w, s in parts),
        )

    @cached_property
    def _stage_shares(self) -> tuple[Shares, ...]:
        if not self.iteration_ms:  # nothing takes any time, so nothing is lost
            whole = Shares(compute=1.0, communication=0.0, all_reduce=0.0, bubble=0.0)
            return (whole,) * self.num_stages
        shares = []
        for index, stage in enumerate(self.plan.stages):
            device_ms = self.plan.microbatches * math.fsum(self.cost.device_compute_ms(stage))
            compute = device_ms / (stage.num_replicas * self.iteration_ms)
            links_ms = math.fsum(gap.on_links_ms for gap in self.gaps[index])
            communication = links_ms / self.iteration_ms
            reduce = float(self.costs.all_reduce_ms_S[index]) / self.iteration_ms
            shares.append(
                Shares(
                    compute=compute,
                    communication=communication,
                    all_reduce=reduce,
                    # The rest; rounding may leave a hair below nothing.
                    bubble=max(1 - compute - communication - reduce, 0.0),
                )
            )
        return tuple(shares)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Warm-up ends when the last stage begins, drain begins when the last stage is done."""
        last = self.timeline.blocks[-1]
        full_ms, empty_ms = last[0].start_ms, last[-1].end_ms
        return (
            Phase(name="warm-up", start_ms=0.0, end_ms=full_ms),
            Phase(name="steady", start_ms=full_ms, end_ms=empty_ms),
            Phase(name="drain", start_ms=empty_ms, end_ms=self.iteration_ms),
        )

    # ------------------------------------------------------------------------ per stage

    @cached_property
    def device_paces(self) -> tuple[tuple[float, ...], ...]:
        """For each stage and device the part of a block in which that device computes.

        A block lasts as long as its slowest device; the others wait for it.
        """
        paces = []
        for stage in self.plan.stages:
            times_ms = self.cost.device_compute_ms(stage)
            slowest_ms = max(times_ms)
            paces.append(tuple(ms / slowest_ms if slowest_ms else 1.0 for ms in times_ms))
        return tuple(paces)

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """For each stage its memory over time."""
        memories = []
        for stage, order in zip(self.plan.stages, self.timeline.blocks, strict=True):
            times_ms, counts = [0.0], [0]
            for timed in order:
                is_forward = timed.block.kind is Kind.FORWARD
                times_ms.append(timed.start_ms if is_forward else timed.end_ms)
                counts.append(counts[-1] + (1 if is_forward else -1))
            base, one = self.cost.memory_gb(stage, 0), self.cost.memory_gb(stage, 1)
            devices = self.plan.cluster.devices
            memories.append(
                StageMemory(
                    times_ms=tuple(times_ms),
                    in_flight=tuple(counts),
                    base_gb=tuple(base),
                    per_microbatch_gb=tuple(b - a for a, b in zip(base, one, strict=True)),
                    peak_gb=tuple(self.cost.memory_gb(stage, max(counts))),
                    limit_gb=tuple(devices[device].memory_gb for device in stage.devices),
                )
            )
        return tuple(memories)

    @cached_property
    def stages(self) -> tuple[StageFigures, ...]:
        """Each stage in numbers."""
        costs, last = self.costs, self.num_stages - 1
        return tuple(
            StageFigures(
                forward_ms=float(costs.forward_ms_S[index]),
                backward_ms=float(costs.backward_ms_S[index]),
                send_ms=None if index == last else float(costs.send_forward_ms_C[index]),
                return_ms=None if index == last else float(costs.send_backward_ms_C[index]),
                all_reduce_ms=float(costs.all_reduce_ms_S[index]),
                utilisation=self._stage_shares[index].compute,
                shares=self._stage_shares[index],
                cut=None if index == last else self._cut(index),
            )
            for index in range(self.num_stages)
        )

    def _cut(self, index: int) -> Cut:
        stage, behind = self.plan.stages[index : index + 2]
        at = stage.layers.stop
        return Cut(
            here=self._choice(stage, behind, at),
            earlier=self._choice(stage, behind, at - 1) if len(stage.layers) > 1 else None,
            later=self._choice(stage, behind, at + 1) if len(behind.layers) > 1 else None,
        )

    def _choice(self, stage: Stage, behind: Stage, at: int) -> CutChoice:
        """What the two stages would cost with the cut in front of layer `at`."""
        costs = self.cost.pipeline_costs(
            (
                replace(stage, layers=range(stage.layers.start, at)),
                replace(behind, layers=range(at, behind.layers.stop)),
            )
        )
        layer = self.plan.model.layers[at - 1]
        work_ms = self.plan.microbatches * (costs.forward_ms_S + costs.backward_ms_S)
        link_ms = self.plan.microbatches * costs.channel_ms_C
        return CutChoice(
            bytes_across=layer.output_bytes + layer.gradient_bytes,
            busiest_ms=float(max(*(work_ms + costs.all_reduce_ms_S), *link_ms)),
        )

    # ---------------------------------------------------------------------------- links

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """For each device of the cluster the number of its host in `hosts`."""
        number_of = {host: number for number, host in enumerate(self.hosts)}
        return tuple(number_of[device.host] for device in self.plan.cluster.devices)

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the cluster, in the order of their first device."""
        return tuple(dict.fromkeys(device.host for device in self.plan.cluster.devices))

    def links(self, *, between_hosts: bool = False) -> tuple[Link, ...]:
        """What every used link carries; with `between_hosts` summed over the pairs of two hosts.

        Transfers go between all devices of neighbouring stages; an all-reduce goes round the ring
        of its devices, 2(k-1)/k of the gradients over each link.
        """
        place_of = self.host_of if between_hosts else range(self.plan.cluster.num_devices)
        found: dict[tuple[int, int], tuple[float, float, float]] = {}  # bytes, busy ms, GB/s

        def carry(sources: _Places, targets: _Places, size: float, times: int) -> None:
            """Count what goes from all places of one stage to all of another."""
            pairs = np.ix_(sources.devices, targets.devices)
            per_ms = self.cost.bytes_per_ms_DD[pairs]
            carried = times * size * np.outer(sources.shares, targets.shares)
            # Pairs of devices have their bandwidth to themselves: hosts are as busy as the busiest.
            largest = size * np.outer(sources.largest, targets.largest)
            busy_ms = times * (self.cost.latency_ms_DD[pairs] + largest / per_ms)
            gb_per_s = per_ms * 1e3 / BYTES_IN_GB
            rows = zip(carried.tolist(), busy_ms.tolist(), gb_per_s.tolist(), strict=True)
            for source, row in zip(sources.places, rows, strict=True):
                for target, num_bytes, ms, rate in zip(targets.places, *row, strict=True):
                    if source != target:
                        before = found.get((source, target), (0.0, 0.0, math.inf))
                        found[source, target] = (
                            before[0] + num_bytes,
                            max(before[1], ms),
                            min(before[2], rate),
                        )

        places = [_places(stage, place_of) for stage in self.plan.stages]
        for index, stage in enumerate(self.plan.stages[:-1]):
            layer = self.plan.model.layers[stage.layers[-1]]
            there, back = places[index], places[index + 1]
            carry(there, back, layer.output_bytes, self.plan.microbatches)
            carry(back, there, layer.gradient_bytes, self.plan.microbatches)
        for stage in self.plan.stages:
            k = stage.num_replicas
            if k > 1:
                parameters = self.cost.parameter_bytes_L[stage.layers.start : stage.layers.stop]
                volume = 2 * (k - 1) / k * float(np.sum(parameters))
                for device, after in pairwise((*stage.devices, stage.devices[0])):
                    carry(_alone(device, place_of), _alone(after, place_of), volume, 1)
        whole_ms = self.iteration_ms or 1.0
        return tuple(
            Link(
                source=source,
                target=target,
                num_bytes=num_bytes,
                busy=min(ms / whole_ms, 1.0),
                gb_per_s=rate,
            )
            for (source, target), (num_bytes, ms, rate) in sorted(found.items())
        )


@dataclass(frozen=True, slots=True)
class _Places:
    """The devices or hosts that a stage touches, as lists of one length."""

    places: list[int]
    devices: list[int]
    """One of each place: a host's devices are taken to have equal links."""
    shares: list[float]
    """What each place takes of a microbatch, and the largest part that a device there takes."""
    largest: list[float]


def _places(stage: Stage, place_of: tuple[int, ...] | range) -> _Places:
    found: dict[int, tuple[int, float, float]] = {}
    for device, part in zip(stage.devices, stage.device_shares, strict=True):
        first, share, largest = found.get(place_of[device], (device, 0.0, 0.0))
        found[place_of[device]] = (first, share + part, max(largest, part))
    devices, shares, largests = (list(column) for column in zip(*found.values(), strict=True))
    return _Places(list(found), devices, shares, largests)


def _alone(device: int, place_of: tuple[int, ...] | range) -> _Places:
    return _Places([place_of[device]], [device], [1.0], [1.0])


def humanise_bytes(num_bytes: float) -> str:
    """A size in bytes, down to single ones: `4.19 MB`, `320 B`."""
    if num_bytes >= 1e6:
        return humanise_gb(num_bytes / BYTES_IN_GB)
    return f"{num_bytes / 1e3:.3g} kB" if num_bytes >= 1e3 else f"{num_bytes:.3g} B"
