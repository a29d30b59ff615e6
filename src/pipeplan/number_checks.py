"""The checker's own table of what the numbers of a plan may be."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pipeplan.pipeline import Plan

__all__ = ["MAX_MICROBATCHES", "SHARES", "Matrix", "number_errors"]

# What FORMATS allows for each quantity beside 0.
TIMES_MS = (1e-6, 1e12)
LATENCIES_US = (1e-3, 1e12)
BYTES = (1.0, 1e18)
BANDWIDTHS_GB_PER_S = (1e-6, 1e9)
MEMORIES_GB = (1e-6, 1e9)
SPEEDS = (1e-3, 1e3)
SHARES = (1e-6, 1.0)
OPTIMIZER_FACTORS = (0.0, 1e3)
MAX_MICROBATCHES = 65_536
MAX_COUNT = 10**9

Matrix = Iterable[Sequence[float]]
"""A number for each pair of devices, row by row."""


def number_errors(plan: Plan) -> Iterator[str]:
    """Numbers beyond the format's limits, which could overflow or come to nothing."""
    model, cluster = plan.model, plan.cluster
    for index, layer in enumerate(model.layers):
        path = f"model.layers[{index}]"
        yield from _outside(f"{path}.forward_ms", layer.forward_ms, TIMES_MS)
        yield from _outside(f"{path}.backward_ms", layer.backward_ms, TIMES_MS)
        yield from _outside(f"{path}.output_bytes", layer.output_bytes, BYTES)
        yield from _outside(f"{path}.gradient_bytes", layer.gradient_bytes, BYTES)
        yield from _outside(f"{path}.parameter_bytes", layer.parameter_bytes, BYTES)
        yield from _outside(f"{path}.activation_bytes", layer.activation_bytes, BYTES)
        yield from _outside(f"{path}.weight_grad_bytes", layer.weight_grad_bytes, BYTES)
        for position, times in enumerate(layer.at):
            at = f"{path}.at[{position}]"
            yield from _outside(f"{at}.forward_ms", times.forward_ms, TIMES_MS)
            yield from _outside(f"{at}.backward_ms", times.backward_ms, TIMES_MS)
            if not 1 <= times.microbatch_size <= MAX_COUNT:
                yield f"{at}.microbatch_size: {times.microbatch_size} is not within 1..{MAX_COUNT}"
        if layer.weight_grad_ms is not None:
            yield from _outside(f"{path}.weight_grad_ms", layer.weight_grad_ms, TIMES_MS)
    yield from _outside("model.input_bytes", model.input_bytes, BYTES)
    optimizer = model.optimizer_bytes_per_parameter_byte
    yield from _outside("model.optimizer_bytes_per_parameter_byte", optimizer, OPTIMIZER_FACTORS)
    if not 1 <= model.microbatch_size <= MAX_COUNT:
        yield f"model.microbatch_size: {model.microbatch_size} is not within 1..{MAX_COUNT}"
    for index, device in enumerate(cluster.devices):
        if device.speed == 0:
            yield f"cluster.devices[{index}].speed: 0 is not above zero"
        yield from _outside(f"cluster.devices[{index}].speed", device.speed, SPEEDS)
        if device.memory_gb is not None:
            yield from _outside(
                f"cluster.devices[{index}].memory_gb", device.memory_gb, MEMORIES_GB
            )
    rows = cluster.bandwidth_gb_per_s
    yield from _outside_DD("cluster.bandwidth_gb_per_s", rows, BANDWIDTHS_GB_PER_S)
    if isinstance(cluster.latency_us, tuple):
        yield from _outside_DD("cluster.latency_us", cluster.latency_us, LATENCIES_US)
    else:
        yield from _outside("cluster.latency_us", cluster.latency_us, LATENCIES_US)


def _outside(path: str, number: float, limits: tuple[float, float]) -> Iterator[str]:
    if number != 0 and not limits[0] <= number <= limits[1]:
        yield f"{path}: {number:g} is neither 0 nor within {limits[0]:g}..{limits[1]:g}"


def _outside_DD(path: str, rows: Matrix, limits: tuple[float, float]) -> Iterator[str]:
    """The same for each pair of devices, row by row; the diagonal is ignored."""
    before = None
    for row, given in enumerate(rows):
        if given is before:
            continue  # devices of a host share a row
        numbers = np.array(given, dtype=np.float64)
        inside = (numbers == 0) | ((limits[0] <= numbers) & (numbers <= limits[1]))
        for column in np.flatnonzero(~inside).tolist():
            if row != column:
                yield from _outside(f"{path}[{row}][{column}]", float(numbers[column]), limits)
        before = given if inside.all() else None
