import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

Trace = tuple[Ints, Floats, Ints, Floats, Ints, Floats]
"""order [S, 2M], block_start_ms [S, 2M], sent [C, 2, M], transfer_start_ms [C, 2, M],
blocks_done [S], stage_end_ms [S]; sent and order hold codes: m is F(m), -1 - m is B(m)."""

def run_schedule(
    forward_ms: Floats,
    backward_ms: Floats,
    send_forward_ms: Floats,
    send_backward_ms: Floats,
    half_duplex: bool,
    codes: Ints,
) -> Trace: ...
def run_list(
    forward_ms: Floats,
    backward_ms: Floats,
    send_forward_ms: Floats,
    send_backward_ms: Floats,
    half_duplex: bool,
    num_microbatches: int,
    preference: int,
    caps: Ints,
) -> Trace: ...
def min_cut(weights: Floats) -> tuple[float, NDArray[np.uint8]]: ...
def partition(
    work_ms: Floats,
    output_bytes: Floats,
    gradient_bytes: Floats,
    parameter_bytes: Floats,
    speed: Floats,
    bytes_per_ms: Floats,
    latency_ms: Floats,
    half_duplex: bool,
    num_microbatches: int,
    max_stages: int,
    limit_ms: float,
) -> tuple[Floats, Ints, Ints]: ...
