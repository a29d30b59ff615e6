"""The same plan with times and bytes that this machine can carry.

Two factors, both stated with every measurement::

    time_factor   blocks, latencies and transfers last so many times as long
    byte_factor   messages and parameters have so many times the bytes

A bandwidth becomes byte_factor / time_factor of what it was. So the scaled plan's prediction is the
plan's own, times `time_factor`: nothing but the unit changes.

A microbatch gets as many rows as it takes for each pair of devices to carry exactly the product of
their shares, as the cost model says. Training has whole samples, and `whole_samples` keeps them.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from pipeplan.cluster import Cluster, Matrix
from pipeplan.cost import BYTES_IN_GB
from pipeplan.documents.text import printable
from pipeplan.errors import InputError
from pipeplan.pipeline import GroupTimeline, Plan, Stage, Timeline
from pipeplan.shared_links import SharedLink, Uplinks

__all__ = ["Scale", "choose_scale", "require_possible_sizes", "scale_plan"]

SAFE_GB_PER_S = 0.4
"""All links together: above half a GB/s, the processors of a small machine are the bottleneck."""
MEMORY_BYTES = 0.4e9
"""Parameters and gradients of all ranks together. Each step copies the gradients once: much more
than this takes longer than the block in which it happens."""
LEAST_MS, MOST_MS, MS_PER_MICROBATCH = 1200.0, 2500.0, 75.0
"""An iteration lasts about so long here. Each block and message costs up to a millisecond of the
machine's own, which should not show."""
MOST_ROWS = 4096
SAME = 1e-9
DIGITS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How the emulated plan differs from the given one."""

    time_factor: float
    byte_factor: float
    rows: int
    """Of one microbatch."""


def choose_scale(
    plan: Plan,
    timeline: Timeline | GroupTimeline,
    *,
    time_factor: float | None = None,
    keeps_bytes: bool = False,
    whole_samples: bool = False,
) -> Scale:
    """Factors under which this machine carries the plan, or those that are asked for."""
    peak_gb_per_s = _peak_gb_per_s(plan, timeline)
    if time_factor is None:
        target_ms = max(LEAST_MS, MS_PER_MICROBATCH * plan.microbatches, timeline.iteration_ms)
        time_factor = min(target_ms, MOST_MS) / timeline.iteration_ms
        if keeps_bytes:
            time_factor = max(time_factor, peak_gb_per_s / SAFE_GB_PER_S)
        time_factor = _rounded(time_factor, math.ceil)
    byte_factor = 1.0
    if not keeps_bytes:
        if peak_gb_per_s:
            byte_factor = min(byte_factor, SAFE_GB_PER_S * time_factor / peak_gb_per_s)
        held = 2 * sum(
            _parameter_bytes(plan, n) * s.num_replicas for n, s in enumerate(plan.stages)
        )
        if held:
            byte_factor = min(byte_factor, MEMORY_BYTES / held)
        byte_factor = min(1.0, _rounded(byte_factor, math.floor))
    rows = plan.model.microbatch_size if whole_samples else _fine_rows(plan)
    return Scale(time_factor=time_factor, byte_factor=byte_factor, rows=rows)


def _parameter_bytes(plan: Plan, stage: int) -> float:
    return sum(plan.model.layers[layer].parameter_bytes for layer in plan.stages[stage].layers)


def _peak_gb_per_s(plan: Plan, timeline: Timeline | GroupTimeline) -> float:
    """The most that all links together carry at any moment, by the prediction."""
    changes: list[tuple[float, float]] = []

    def add(start_ms: float, end_ms: float, num_bytes: float) -> None:
        if end_ms > start_ms and num_bytes:
            rate = num_bytes / ((end_ms - start_ms) * BYTES_IN_GB / 1e3)
            changes.extend([(start_ms, rate), (end_ms, -rate)])

    for transfer in timeline.transfers:
        layer = plan.model.layers[plan.stages[transfer.channel].layers[-1]]
        num_bytes = layer.output_bytes if transfer.kind == "F" else layer.gradient_bytes
        add(transfer.start_ms, transfer.end_ms, num_bytes)
    for reduce in timeline.all_reduces:
        stage = plan.stages[reduce.stage]
        num_bytes = 2 * (stage.num_replicas - 1) * _parameter_bytes(plan, reduce.stage)
        num_bytes /= stage.gradient_buckets
        add(reduce.start_ms, reduce.end_ms, num_bytes)
    if not changes:
        return 0.0
    # At one instant, ends come before starts. Rounding may put them a little apart.
    instant_ms = timeline.iteration_ms * SAME
    changes.sort(key=lambda change: (round(change[0] / instant_ms), change[1]))
    return float(np.cumsum([rate for _, rate in changes]).max())


def _fine_rows(plan: Plan) -> int:
    """The fewest rows that shares, and products of neighbouring stages' shares, divide evenly."""
    size = plan.model.microbatch_size
    units = [_unit(stage) for stage in plan.stages]
    rows = math.lcm(size, *units, *(a * b for a, b in itertools.pairwise(units)))
    return rows if rows <= MOST_ROWS else max(1, MOST_ROWS // size) * size


def _unit(stage: Stage) -> int:
    """The fewest rows that the stage's shares divide evenly."""
    fractions = [Fraction(share).limit_denominator(MOST_ROWS) for share in stage.device_shares]
    return math.lcm(*(fraction.denominator for fraction in fractions))


def _rounded(number: float, direction: Callable[[float], int]) -> float:
    """The number with few digits, rounded up or down."""
    step = 10.0 ** (math.floor(math.log10(number)) - DIGITS + 1)
    return float(f"{direction(number / step) * step:.{DIGITS}g}")


def require_possible_sizes(plan: Plan) -> None:
    """Refuse gradients that are larger than what they are gradients of.

    Raises:
        InputError: the gradient of some stage's output is.
    """
    for stage in plan.stages[:-1]:
        layer = plan.model.layers[stage.layers[-1]]
        if layer.gradient_bytes > layer.output_bytes * (1 + SAME):
            raise InputError(
                f"layers: {printable(layer.name)!r} has more gradient_bytes than output_bytes; in"
                " torch, a gradient has the size of its tensor, so no run can show that"
            )


def scale_plan(plan: Plan, scale: Scale) -> Plan:
    """The plan with other units; its prediction is the plan's own, times the time factor."""
    times, sizes = scale.time_factor, scale.byte_factor
    layers = tuple(
        replace(
            layer,
            forward_ms=layer.forward_ms * times,
            backward_ms=layer.backward_ms * times,
            output_bytes=_fewer(layer.output_bytes, sizes),
            gradient_bytes=_fewer(layer.gradient_bytes, sizes),
            parameter_bytes=_fewer(layer.parameter_bytes, sizes),
            activation_bytes=_fewer(layer.activation_bytes, sizes),
            at=(),  # of the plan's own rows; ranks are told how long their blocks take
            weight_grad_ms=None if layer.weight_grad_ms is None else layer.weight_grad_ms * times,
            weight_grad_bytes=_fewer(layer.weight_grad_bytes, sizes),
        )
        for layer in plan.model.layers
    )
    model = replace(
        plan.model,
        layers=layers,
        input_bytes=_fewer(plan.model.input_bytes, sizes),
        microbatch_size=scale.rows,
    )
    return replace(plan, model=model, cluster=_scale_cluster(plan.cluster, scale), predicted=None)


def _fewer(num_bytes: float, factor: float) -> float:
    """So many times the bytes; at least one, where there are any."""
    return max(1.0, num_bytes * factor) if num_bytes else 0.0


def _scale_cluster(cluster: Cluster, scale: Scale) -> Cluster:
    """A cluster written out in full, with other rates; used devices keep their numbers."""
    factor = scale.byte_factor / scale.time_factor
    bandwidth: Matrix = tuple(
        tuple(float(rate) * factor for rate in row) for row in cluster.bandwidth_gb_per_s
    )
    latency: float | Matrix
    if isinstance(cluster.latency_us, int | float):
        latency = cluster.latency_us * scale.time_factor
    else:
        latency = tuple(tuple(us * scale.time_factor for us in row) for row in cluster.latency_us)
    uplinks: Uplinks = cluster.uplink_gb_per_s
    if isinstance(uplinks, dict):
        uplinks = {host: rate * factor for host, rate in uplinks.items()}
    elif uplinks is not None:
        uplinks = uplinks * factor
    shared = tuple(
        SharedLink(
            name=link.name,
            members=link.members,
            gb_per_s=link.gb_per_s * factor,
            in_gb_per_s=None if link.in_gb_per_s is None else link.in_gb_per_s * factor,
        )
        for link in cluster.shared
    )
    return Cluster(
        name=cluster.name,
        devices=cluster.devices,
        bandwidth_gb_per_s=bandwidth,
        latency_us=latency,
        duplex=cluster.duplex,
        uplink_gb_per_s=uplinks,
        shared=shared,
    )
