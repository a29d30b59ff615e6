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
def least_sum(
    stage_ms: Floats, sizes: Ints, num_devices: int, limit_ms: float
) -> tuple[float, list[int], list[int]]:
    """The least sum of stage times, for each stage one past its last layer, and its size."""

def min_cut(weights: Floats) -> tuple[float, NDArray[np.uint8]]: ...

Instance = tuple[Floats, Floats, Floats, Floats, Floats, Floats, Floats, Floats, bool, int, int]
"""forward_ms [L], backward_ms [L], output_bytes [L], gradient_bytes [L], parameter_bytes [L],
speed [D], bytes_per_ms [D, D], latency_ms [D, D], half_duplex, num_microbatches,
max_replicas."""

PlacedPlan = list[tuple[int, list[int]]]
"""For each stage one past its last layer, and its devices."""

def partition(
    instance: Instance, max_stages: int, limit_ms: float, num_threads: int
) -> tuple[Floats, Ints, Ints]: ...
def plan_bound(
    forward_ms: Floats,
    backward_ms: Floats,
    send_forward_ms: Floats,
    send_backward_ms: Floats,
    half_duplex: bool,
    num_microbatches: int,
    all_reduce_ms: Floats,
    caps: Ints,
) -> float: ...
def plan_on_order(
    instance: Instance,
    sizes: Ints,
    capacity: int,
    limit_ms: float,
    num_best: int,
    num_threads: int,
) -> tuple[float, list[PlacedPlan]]: ...
def plan_on_sets(
    instance: Instance,
    class_of: Ints,
    capacity: int,
    limit_ms: float,
    num_best: int,
    num_threads: int,
) -> tuple[float, list[PlacedPlan]]: ...
def relaxed_bound(
    instance: Instance, buckets: Ints, capacity: int, limit_ms: float, num_threads: int
) -> float: ...
def local_search(
    instance: Instance,
    starts: list[PlacedPlan],
    seed: int,
    budget: float,
    target_ms: float,
    num_threads: int,
) -> list[tuple[float, int, PlacedPlan]]: ...
