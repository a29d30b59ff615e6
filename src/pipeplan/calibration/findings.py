"""Where a run and its prediction part: in all layers, in devices, in some layers, in links.

**Computation.** For each device, r is what its blocks took over what the cost model says. Most
devices are taken to be as fast as the cluster says, so the middle r belongs to all layers: the
profile was made elsewhere, or on a machine that was less busy. What is left of each r::

    stage with replicas    what its devices have in common is its layers'; the rest each device's
    stage of one device    the device's if forwards and backwards are alike, since a slow device is
                           slow in both; else the layers'

One trace cannot tell a slow device from slow layers where both would look alike.

**Links.** If the channel was free, and the receiver was idle already when the sender's block ended,
then the receiver's block began when the transfer came. The shortest one of all microbatches counts.
Clocks of two hosts differ by an unknown offset, which is added in one direction and subtracted in
the other. So the two directions of a channel are taken together, as if they were slowed alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from pipeplan.calibration.measured_run import MeasuredRun
from pipeplan.cost import CostModel
from pipeplan.pipeline import Block, Kind, Plan, Stage
from pipeplan.report.units import humanise_ms

__all__ = ["Finding", "Subject", "find_computation", "find_links"]

WORTH_SAYING = 0.05
"""Smaller differences of computation are noise."""
LINK_WORTH = 0.15
LINK_LEAST_MS = 0.2
LINK_BLOCK_PART = 0.02
"""A slower transfer counts from this part of its prediction on, from this time on, and from this
part of a block: starting one takes a moment."""
MOST_FACTOR = 20.0
"""Transfers that take longer than so many times are late, not slow."""
ALIKE = 0.3
"""Forwards and backwards whose factors differ by less than this part are slowed by one cause."""
IDLE_BEFORE = 0.9
"""A receiver was idle before the transfer began if it was for this part of the transfer's time."""


class Subject(StrEnum):
    """What a finding is about."""

    ALL = "all layers"
    DEVICE = "device"
    LAYERS = "layers"
    LINK = "link"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that takes another time than predicted."""

    subject: Subject
    factor: float
    """Measured over predicted time; for layers, of forwards."""
    backward_factor: float
    devices: tuple[int, ...] = ()
    """The device; or for a link, the senders of forwards."""
    receivers: tuple[int, ...] = ()
    late_ms: float = 0.0
    """How much later each transfer of a link arrives; then its factor is 1."""
    layers: tuple[int, ...] = ()
    words: str

    @property
    def speed(self) -> float:
        """How fast a device computes, compared with what the cluster says."""
        return 1 / self.factor


@dataclass(slots=True)
class _Ratio:
    """Measured and predicted times of one device."""

    forward: tuple[float, float]
    backward: tuple[float, float]

    @property
    def forwards(self) -> float:
        return _over(*self.forward)

    @property
    def backwards(self) -> float:
        return _over(*self.backward)

    @property
    def whole(self) -> float:
        return _over(self.forward[0] + self.backward[0], self.forward[1] + self.backward[1])


def _over(measured_ms: float, predicted_ms: float) -> float:
    return measured_ms / predicted_ms if predicted_ms > 0 and measured_ms > 0 else 1.0


def find_computation(plan: Plan, run: MeasuredRun) -> list[Finding]:
    """What computes slower or faster than predicted: all layers first."""
    ratios = _ratios(plan, run)
    general = _middle([ratio.whole for ratio in ratios.values()])
    if abs(general - 1) < WORTH_SAYING:
        general = 1.0
    findings = []
    if general != 1.0:
        words = f"all layers take {_times(general)} as the profile says"
        findings.append(
            Finding(subject=Subject.ALL, factor=general, backward_factor=general, words=words)
        )
    for devices in dict.fromkeys(frozenset(stage.devices) for stage in plan.stages):
        findings += _find_in_group(plan, sorted(devices), ratios, general)
    return sorted(findings, key=lambda found: list(Subject).index(found.subject))


def _find_in_group(
    plan: Plan, devices: Sequence[int], ratios: dict[int, _Ratio], general: float
) -> list[Finding]:
    """The findings of devices that share their stages."""
    layers = tuple(
        layer
        for stage in plan.stages
        if set(stage.devices) == set(devices)
        for layer in stage.layers
    )
    forward = _middle([ratios[device].forwards for device in devices]) / general
    backward = _middle([ratios[device].backwards for device in devices]) / general
    common = _middle([ratios[device].whole for device in devices]) / general
    found = []
    if len(devices) == 1 and abs(forward / backward - 1) < ALIKE:
        forward = backward = common = 1.0  # the device's
    if max(abs(forward - 1), abs(backward - 1)) >= WORTH_SAYING:
        names = [plan.model.layers[layer].name for layer in layers]
        which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        words = f"{which}: forwards take {_times(forward)}, backwards {_times(backward)}"
        found.append(
            Finding(
                subject=Subject.LAYERS,
                factor=forward,
                backward_factor=backward,
                layers=layers,
                words=f"{words} as predicted",
            )
        )
    else:
        common = 1.0
    for device in devices:
        own = ratios[device].whole / general / common
        if abs(own - 1) >= WORTH_SAYING:
            name = plan.cluster.devices[device].name
            change = f"{abs(1 / own - 1):.0%} {'slower' if own > 1 else 'faster'}"
            found.append(
                Finding(
                    subject=Subject.DEVICE,
                    factor=own,
                    backward_factor=own,
                    devices=(device,),
                    words=f"{name} computes {change} than predicted: its speed is"
                    f" {plan.cluster.devices[device].speed / own:.3g}",
                )
            )
    return found


def _times(factor: float) -> str:
    return f"{factor:.2f} times as long" if abs(factor - 1) >= 0.005 else "as long"


def _ratios(plan: Plan, run: MeasuredRun) -> dict[int, _Ratio]:
    """Measured and predicted times of all blocks, by device; medians over microbatches."""
    cost = CostModel(plan.model, plan.cluster)
    lengths: dict[tuple[int, int, bool], dict[Kind, list[float]]] = {}
    for (device, block), (start_ms, end_ms) in run.blocks.items():
        key = (device, block.stage, block.kind is Kind.FORWARD)
        lengths.setdefault(key, {}).setdefault(block.kind, []).append(end_ms - start_ms)
    ratios: dict[int, _Ratio] = {}
    for number, stage in enumerate(plan.stages):
        forward_ms, backward_ms = cost.device_forward_ms(stage), cost.device_backward_ms(stage)
        for position, device in enumerate(stage.devices):
            ratio = ratios.setdefault(device, _Ratio((0.0, 0.0), (0.0, 0.0)))
            forwards = _one_of_each(lengths[device, number, True])
            backwards = _one_of_each(lengths[device, number, False])
            ratio.forward = _add(ratio.forward, (forwards, forward_ms[position]))
            ratio.backward = _add(ratio.backward, (backwards, backward_ms[position]))
    return ratios


def _one_of_each(lengths_ms: dict[Kind, list[float]]) -> float:
    """A backward is a B, or an I and a W."""
    whole = lengths_ms.get(Kind.BACKWARD)
    if whole:
        return median(whole)
    return sum(median(each) for each in lengths_ms.values())


def _add(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    return first[0] + second[0], first[1] + second[1]


def _middle(values: Iterable[float]) -> float:
    """The median; of the two middle ones of an even number, that nearer to 1."""
    ordered = sorted(values)
    middle = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return min(middle, key=lambda value: max(value, 1 / value))


# -------------------------------------------------------------------------------------- links


def find_links(plan: Plan, run: MeasuredRun) -> list[Finding]:
    """Channels whose transfers take longer than predicted."""
    if plan.cluster.links:
        return []  # what a transfer takes depends on all others that share its links
    cost = CostModel(plan.model, plan.cluster)
    idle_ms = _idle_before(run)
    found = []
    for channel, (front, back) in enumerate(zip(plan.stages, plan.stages[1:], strict=False)):
        if set(front.devices) & set(back.devices):
            continue
        forward = _durations(plan, run, idle_ms, channel, Kind.FORWARD)
        backward = _durations(plan, run, idle_ms, channel, Kind.BACKWARD)
        predicted_ms = cost.send_forward_ms(front, back), cost.send_backward_ms(front, back)
        one_host = {plan.cluster.devices[d].host for d in (*front.devices, *back.devices)}
        if forward and backward:
            measured_ms = (min(forward) + min(backward)) / 2
            expected_ms = sum(predicted_ms) / 2
        elif len(one_host) == 1 and (forward or backward):
            measured_ms = min(forward or backward)
            expected_ms = predicted_ms[0] if forward else predicted_ms[1]
        else:
            continue
        block_ms = cost.forward_ms(front) + cost.backward_ms(front)
        least_ms = max(LINK_LEAST_MS, LINK_BLOCK_PART * block_ms, LINK_WORTH * expected_ms)
        if measured_ms - expected_ms >= least_ms:
            found.append(_slow_link(plan, front, back, measured_ms, expected_ms))
    return found


def _slow_link(
    plan: Plan, front: Stage, back: Stage, measured_ms: float, expected_ms: float
) -> Finding:
    """A link at a part of its rate; or one whose transfers are late, whatever they carry."""
    names = [
        "+".join(plan.cluster.devices[device].name for device in stage.devices)
        for stage in (front, back)
    ]
    took = f"{names[0]} to {names[1]}: transfers take {humanise_ms(measured_ms)} instead of"
    is_late = measured_ms > MOST_FACTOR * expected_ms
    factor = 1.0 if is_late else measured_ms / expected_ms
    end = "they come later" if is_late else f"{1 / factor:.0%} of the rate"
    return Finding(
        subject=Subject.LINK,
        factor=factor,
        backward_factor=factor,
        devices=front.devices,
        receivers=back.devices,
        late_ms=measured_ms - expected_ms if is_late else 0.0,
        words=f"{took} {humanise_ms(expected_ms)}: {end}",
    )


def _durations(
    plan: Plan, run: MeasuredRun, idle_ms: dict[tuple[int, Block], float], channel: int, kind: Kind
) -> list[float]:
    """The times of those transfers that found a free channel, and their receiver waiting."""
    is_forward = kind is Kind.FORWARD
    source, target = (channel, channel + 1) if is_forward else (channel + 1, channel)
    kinds = (kind,) if is_forward else (kind, Kind.INPUT_GRADIENT)
    sent: dict[int, float] = {}
    begun: dict[int, tuple[float, float]] = {}
    for microbatch in range(plan.microbatches):
        for each in kinds:
            for device in plan.stages[source].devices:
                span = run.blocks.get((device, Block(each, source, microbatch)))
                if span is not None:
                    sent[microbatch] = max(sent.get(microbatch, span[1]), span[1])
            for device in plan.stages[target].devices:
                place = (device, Block(each, target, microbatch))
                span = run.blocks.get(place)
                if span is not None and span[0] >= begun.get(microbatch, span)[0]:
                    begun[microbatch] = (span[0], idle_ms[place])
    durations = []
    last_ms = -float("inf")
    for microbatch, sent_ms in sorted(sent.items(), key=lambda pair: pair[1]):
        begun_ms, was_idle_ms = begun[microbatch]
        took_ms = begun_ms - sent_ms
        if last_ms <= sent_ms and was_idle_ms >= IDLE_BEFORE * took_ms:  # the channel is free
            durations.append(took_ms)
        last_ms = begun_ms
    return durations


def _idle_before(run: MeasuredRun) -> dict[tuple[int, Block], float]:
    """For each block, how long its device did nothing before it."""
    order = sorted(run.blocks, key=lambda place: (place[0], run.blocks[place][0]))
    idle_ms: dict[tuple[int, Block], float] = {}
    for before, place in zip([None, *order], order, strict=False):
        is_first = before is None or before[0] != place[0]
        idle_ms[place] = (
            float("inf")
            if is_first or before is None
            else run.blocks[place][0] - run.blocks[before][1]
        )
    return idle_ms
