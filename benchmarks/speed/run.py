"""Planning time of `best` by layers and devices, and of the paper's partition and a naive version.

    python benchmarks/speed/run.py [--write]

Each instance: a synthetic transformer-like model on hosts of eight devices, and on random links.
"""

import argparse
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from naive import least_bottlenecks_ms

import pipeplan as pp
from pipeplan.cluster import Cluster, Device
from pipeplan.cost import CostModel
from pipeplan.planning.planner.partition import best_partitions

SIZES = {
    (24, 8): {"hosts": 25, "random": 80},
    (50, 16): {"hosts": 100, "random": 160},
    (100, 64): {"hosts": 400, "random": 800},
    (200, 256): {"hosts": 900, "random": 900},
    (200, 1024): {"hosts": 3000, "random": 3000},
    (200, 4096): {"hosts": 15000},
    (200, 10000): {"hosts": 15000},
    (1000, 64): {"hosts": 2000, "random": 2000},
    (5000, 16): {"hosts": 3000, "random": 3000},
}
"""(layers, devices) -> milliseconds allowed, by the kind of links. A file holds more than 2,048
devices only as hosts."""
ONE_STAGE = {"positions": 1, "split_backward": False}
"""One stage a device and whole backwards: what this measures, whatever the default is."""
MICROBATCHES = 16
UNIFORM = {8: 40, 32: 90, 128: 200, 512: 1000, 2048: 5000}
"""Devices behind one switch of 25 GB/s -> milliseconds allowed, with 1,920 microbatches of one
sample each. Samples may be split: else no stage could have two devices."""
UNIFORM_MODEL = Path(__file__).parents[3] / "shared" / "profiles" / "piper-bert32a100.model.json"
UNIFORM_MICROBATCHES = 1920


def make_model(num_layers: int, seed: int) -> pp.ModelProfile:
    rng = random.Random(seed)
    return pp.ModelProfile(
        name=f"synthetic-{num_layers}",
        microbatch_size=8,
        layers=tuple(
            pp.LayerProfile(
                name=str(index),
                forward_ms=rng.uniform(2, 6),
                backward_ms=rng.uniform(4, 12),
                output_bytes=rng.choice([8e6, 16e6, 32e6]),
                parameter_bytes=rng.uniform(10e6, 60e6),
            )
            for index in range(num_layers)
        ),
    )


def make_cluster(num_devices: int, kind: str, seed: int) -> pp.Cluster:
    if kind == "hosts":
        groups = [pp.HostGroup(count=max(1, num_devices // 8), devices=8, bandwidth_gb_per_s=50)]
        return pp.expand_hosts("hosts", groups, between_hosts_gb_per_s=5)
    rng = random.Random(seed)
    rows = [[10 ** rng.uniform(0, 1.5) for _ in range(num_devices)] for _ in range(num_devices)]
    return Cluster(
        name="random",
        devices=tuple(Device(name=str(index)) for index in range(num_devices)),
        bandwidth_gb_per_s=tuple(map(tuple, rows)),
    )


def measure(num_layers: int, num_devices: int, kind: str, planner: str, runs: int) -> dict:
    model, cluster = make_model(num_layers, 1), make_cluster(num_devices, kind, 1)
    return measure_plan(model, cluster, MICROBATCHES, planner, runs)


def measure_uniform(num_devices: int) -> dict:
    switch = pp.HostGroup(devices=num_devices, bandwidth_gb_per_s=25)
    cluster = pp.expand_hosts("switch", [switch])
    model = pp.read_model(UNIFORM_MODEL)
    return measure_plan(model, cluster, UNIFORM_MICROBATCHES, "best", 3, divisible=True)


def measure_plan(model, cluster, microbatches: int, planner: str, runs: int, **options) -> dict:
    """The median time of some runs, to wait and of the processors; the first one does not count."""
    options = {**ONE_STAGE, **options}
    pp.plan(make_model(4, 1), make_cluster(4, "random", 1), 4, planner, **ONE_STAGE)
    waited_s, computed_s = [], []
    for _ in range(runs):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        plan = pp.plan(model, cluster, microbatches, planner, **options)
        waited_s.append(time.perf_counter() - begin)
        computed_s.append(time.process_time() - cpu_begin)
    gap = plan.bound.gap(plan.iteration_ms) if plan.bound else None
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "ms": statistics.median(waited_s) * 1e3,
        "processor_ms": statistics.median(computed_s) * 1e3,
        "iteration_ms": plan.iteration_ms,
        "gap": gap,
        "bound": plan.options.get("bound", ""),
        "peak_mb": peak_mb,
    }


def measure_in_process(*arguments, function: str = "measure") -> dict:
    """Measured in a new process, so that the peak memory is that of this case alone."""
    code = f"import run; print(run.{function}(*{arguments!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    return eval(done.stdout)  # noqa: S307 - our own output


def row(case: tuple, allowed: int, best: dict, spp_ms: str) -> str:
    cells = [
        *case,
        allowed,
        f"{best['ms']:.0f}",
        f"{best['processor_ms']:.0f}",
        f"{best['iteration_ms']:.3f}",
        f"{100 * best['gap']:.2f}",
        best["bound"],
        f"{best['peak_mb']:.0f}",
        spp_ms,
    ]
    return f"| {' | '.join(map(str, cells))} |"


def uniform_lines(upto: int) -> list[str]:
    """Equal devices behind one switch, with many microbatches; nothing without the profile."""
    if not UNIFORM_MODEL.exists():
        return []
    lines = []
    for num_devices, allowed in UNIFORM.items():
        if num_devices > upto:
            continue
        best = measure_in_process(num_devices, function="measure_uniform")
        lines.append(row(("bert32, M = 1920", num_devices, "one switch"), allowed, best, ""))
        print(lines[-1], flush=True)
    return lines


def compare_with_naive(num_layers: int, num_devices: int) -> str:
    """The paper's partition by our kernel and by the plain recursion, on the same instance."""
    cost = CostModel(make_model(num_layers, 1), make_cluster(num_devices, "random", 1))
    order = list(range(num_devices))
    begin = time.perf_counter()
    fast = [partition.bottleneck_ms for partition in best_partitions(cost, order, MICROBATCHES)]
    fast_s = time.perf_counter() - begin
    begin = time.perf_counter()
    naive = least_bottlenecks_ms(cost, order, MICROBATCHES)
    naive_s = time.perf_counter() - begin
    assert all(abs(a - b) <= 1e-9 * b for a, b in zip(fast, naive, strict=True))
    figures = f"{1e3 * fast_s:.1f} | {1e3 * naive_s:.0f} | {naive_s / fast_s:,.0f}"
    return f"| {num_layers} | {num_devices} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write results.md")
    parser.add_argument("--upto", type=int, default=10_000, help="devices")
    arguments = parser.parse_args()
    lines = [
        "| layers | devices | links | allowed ms | best ms | processor ms | iteration ms | gap % |"
        " bound | peak MB | spp ms |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (num_layers, num_devices), allowed in SIZES.items():
        if num_devices > arguments.upto:
            continue
        for kind in allowed:
            runs = 5 if num_layers * num_devices <= 6400 else 1
            best = measure_in_process(num_layers, num_devices, kind, "best", runs)
            spp_ms = ""
            if num_layers * num_devices <= 6400:
                spp_ms = f"{measure_in_process(num_layers, num_devices, kind, 'spp', 3)['ms']:.0f}"
            lines.append(row((num_layers, num_devices, kind), allowed[kind], best, spp_ms))
            print(lines[-1], flush=True)
    lines += uniform_lines(arguments.upto)
    lines += [
        "",
        "The paper's partition (PRM), all stage counts: our kernel against the recursion as",
        "written down, in plain Python, in the same run; both find the same bottlenecks.",
        "",
        "| layers | devices | kernel ms | naive ms | ratio |",
        "|---|---|---|---|---|",
    ]
    for size in ((8, 4), (12, 8), (24, 8), (16, 12)):
        lines.append(compare_with_naive(*size))
        print(lines[-1], flush=True)
    if arguments.write:
        Path(__file__).with_name("results.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
