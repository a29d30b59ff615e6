"""Times of the core: simulating, planning with SPP, reading a large cluster, starting.

Run with the interpreter that has pipeplan installed, on an otherwise idle core:

    python benchmarks/core/run.py
"""

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pipeplan import _core
from pipeplan.cluster import Cluster, Device
from pipeplan.documents.files import read_cluster
from pipeplan.planning.door import plan
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.schedules import fixed_codes

SEED = 0
CALLS_IN_WINDOW = 10_000
NUM_REPEATS = 5
NUM_STARTS = 10
SPP_SIZES = ((24, 8), (50, 16), (100, 64))
LARGE_CLUSTER = 1024
COMMAND = Path(sys.executable).with_name("pipeplan")


def random_inputs(num_layers: int, num_devices: int) -> tuple[ModelProfile, Cluster]:
    """Layers and links without any symmetry that a planner could use."""
    rng = random.Random(SEED)
    layers = tuple(
        LayerProfile(
            name=f"layer{index}",
            forward_ms=rng.uniform(1, 3),
            backward_ms=rng.uniform(2, 6),
            output_bytes=rng.uniform(1e6, 2e7),
            parameter_bytes=rng.uniform(1e6, 5e7),
        )
        for index in range(num_layers)
    )
    rows = tuple(tuple(rng.uniform(1, 25) for _ in range(num_devices)) for _ in range(num_devices))
    return (
        ModelProfile(name="random", microbatch_size=1, layers=layers),
        Cluster(
            name="random",
            devices=tuple(Device(name=f"d{index}") for index in range(num_devices)),
            bandwidth_gb_per_s=rows,
        ),
    )


def plans_per_second(simulate: Callable[[], object]) -> str:
    """Calls in a second from one Python thread: median and best window."""
    rates = []
    for _ in range(NUM_REPEATS):
        seconds = seconds_of(lambda: [simulate() for _ in range(CALLS_IN_WINDOW)])
        rates.append(CALLS_IN_WINDOW / seconds)
    return f"{statistics.median(rates):,.0f} plans/s (best {max(rates):,.0f}, of {NUM_REPEATS})"


def bench_simulation() -> None:
    """Simulations of 8 stages x 32 microbatches, by a fixed order and by PE; and an empty call."""
    rng = np.random.default_rng(SEED)
    num_stages, num_microbatches = 8, 32
    forward, backward = rng.uniform(1, 2, num_stages), rng.uniform(2, 4, num_stages)
    send, send_back = rng.uniform(0, 1, num_stages - 1), rng.uniform(0, 1, num_stages - 1)
    codes = fixed_codes([num_stages - n for n in range(num_stages)], num_microbatches)
    one = np.ones(1)
    none = np.empty(0)
    tiny = np.array([[0, -1]], dtype=np.int32)
    caps = np.full(num_stages, num_microbatches, dtype=np.int32)
    print("simulation, 8 stages x 32 microbatches, one Python thread")
    for name, simulate in (
        (
            "1F1B order",
            lambda: _core.run_schedule(forward, backward, send, send_back, False, codes),
        ),
        (
            "1F1B order, half duplex",
            lambda: _core.run_schedule(forward, backward, send, send_back, True, codes),
        ),
        (
            "PE",
            lambda: _core.run_list(
                forward, backward, send, send_back, False, num_microbatches, 0, caps
            ),
        ),
        (
            "1 stage x 1 microbatch: the call itself",
            lambda: _core.run_schedule(one, one, none, none, False, tiny),
        ),
    ):
        print(f"  {name}: {plans_per_second(simulate)}")


def bench_spp() -> None:
    print("SPP, whole plan() call, 32 microbatches, random layers and links")
    for num_layers, num_devices in SPP_SIZES:
        model, cluster = random_inputs(num_layers, num_devices)
        seconds = [
            seconds_of(lambda m=model, c=cluster: plan(m, c, microbatches=32, planner="spp"))
            for _ in range(NUM_REPEATS)
        ]
        print(f"  {num_layers} layers, {num_devices} devices: {show(seconds)}")


def bench_reading() -> None:
    rng = random.Random(SEED)
    document = {
        "format": "pipeplan.cluster/1",
        "name": "large",
        "devices": [{"name": f"d{index}"} for index in range(LARGE_CLUSTER)],
        "bandwidth_gb_per_s": [
            [rng.uniform(1, 25) for _ in range(LARGE_CLUSTER)] for _ in range(LARGE_CLUSTER)
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.cluster.json"
        path.write_text(json.dumps(document))
        seconds = [seconds_of(lambda: read_cluster(path)) for _ in range(NUM_REPEATS)]
        size_mb = path.stat().st_size / 1e6
    print(f"reading {LARGE_CLUSTER} devices, {size_mb:.1f} MB of JSON: {show(seconds)}")


def bench_starting() -> None:
    print("whole processes")
    for arguments in (("--help",), ("plan", "bert-large", "4x2-10g", "-m", "16")):
        command = [str(COMMAND), *arguments]
        seconds = [
            seconds_of(lambda c=command: subprocess.run(c, check=True, capture_output=True))
            for _ in range(NUM_STARTS)
        ]
        print(f"  pipeplan {' '.join(arguments)}: {show(seconds)}")


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def show(seconds: list[float]) -> str:
    """The median and the best; a busy machine hardly changes the best."""
    middle, best = 1e3 * statistics.median(seconds), 1e3 * min(seconds)
    return f"{middle:.1f} ms (best {best:.1f}, of {len(seconds)})"


if __name__ == "__main__":
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, seed {SEED}")
    print(f"load before: {os.getloadavg()[0]:.1f}")
    bench_simulation()
    bench_spp()
    bench_reading()
    bench_starting()
    print(f"load after: {os.getloadavg()[0]:.1f}")
