"""How long one simulation takes where devices of a host share its card.

    python benchmarks/shared_links/simulation.py

The same stages and microbatches on hosts in several ways. PE runs, so the order of blocks is
decided while it runs. Processor time; the median of some runs.
"""

import random
import statistics
import time

import pipeplan as pp
from pipeplan.cost import CostModel
from pipeplan.pipeline import Stage
from pipeplan.schedules import SCHEDULES

RUNS = {(8, 32): 15, (64, 256): 5}
LAYERS_OF_STAGE = 2
RANDOM_HOSTS = [(1, 2), (1, 16), (2, 4), (2, 8), (3, 5), (2, 32), (4, 16)]
"""Devices of a stage, and hosts that they are on; nothing is alike."""


def make_model(num_layers: int) -> pp.ModelProfile:
    """Layers that differ a little, so that few ends fall together."""
    rng = random.Random(1)
    return pp.ModelProfile(
        name="layers",
        microbatch_size=64,
        layers=tuple(
            pp.LayerProfile(
                name=str(index),
                forward_ms=rng.uniform(2, 6),
                backward_ms=rng.uniform(4, 12),
                output_bytes=rng.uniform(8e6, 32e6),
                parameter_bytes=rng.uniform(10e6, 60e6),
            )
            for index in range(num_layers)
        ),
    )


def make_cluster(num_hosts: int, on_host: int) -> pp.Cluster:
    return pp.expand_hosts(
        "hosts",
        [pp.HostGroup(count=num_hosts, devices=on_host, bandwidth_gb_per_s=50)],
        between_hosts_gb_per_s=5,
        latency_us=10,
        uplink_gb_per_s=5,
    )


def placements(num_stages: int) -> dict[str, tuple[pp.Cluster, list[list[int]]]]:
    """Names of placements, with the cluster and the devices of each stage."""
    stages = range(num_stages)
    eight = max(8, num_stages // 8)
    found: dict[str, tuple[pp.Cluster, list[list[int]]]] = {
        "a stage a host of eight": (
            make_cluster(num_stages, 8),
            [[8 * n + k for k in range(8)] for n in stages],
        ),
        "one device a stage, hosts of eight in order": (
            make_cluster(num_stages // 8 or 1, 8),
            [[n] for n in stages],
        ),
        "one device a stage, no neighbours on one host": (
            make_cluster(8, eight),
            [[n % 8 * eight + n // 8] for n in stages],
        ),
        "one device a stage, two hosts in turn": (
            make_cluster(2, num_stages),
            [[n % 2 * num_stages + n // 2] for n in stages],
        ),
        "two devices a stage, both on two hosts": (
            make_cluster(2, num_stages),
            [[n, num_stages + n] for n in stages],
        ),
        "two devices a stage, on two of eight hosts": (
            make_cluster(8, num_stages),
            [[n % 8 * num_stages + n // 8, (n + 3) % 8 * num_stages + n // 8 + 8] for n in stages]
            if num_stages > 8
            else [[n * num_stages, (n + 3) % 8 * num_stages + 1] for n in stages],
        ),
        "eight devices a stage, on eight hosts": (
            make_cluster(8, num_stages),
            [[h * num_stages + n for h in range(8)] for n in stages],
        ),
    }
    for num_devices, num_hosts in RANDOM_HOSTS:
        rng = random.Random(1)
        used = [0] * num_hosts
        devices: list[list[int]] = []
        for _ in stages:
            hosts = rng.sample(range(num_hosts), num_devices)
            devices.append([h * num_stages + used[h] for h in hosts])
            for h in hosts:
                used[h] += 1
        name = f"{num_devices} devices a stage, on any of {num_hosts} hosts"
        found[name] = make_cluster(num_hosts, num_stages), devices
    return found


def milliseconds(cost: CostModel, stages: list[Stage], num_microbatches: int, runs: int) -> float:
    costs = cost.pipeline_costs(stages)
    times = []
    for _ in range(runs + 1):  # the first one is warm-up
        began_s = time.process_time()
        SCHEDULES["pe"](costs, num_microbatches)
        times.append(1e3 * (time.process_time() - began_s))
    return statistics.median(times[1:])


def main() -> None:
    print("| stages, microbatches | placement | ms |\n|---|---|--:|")
    for (num_stages, num_microbatches), runs in RUNS.items():
        model = make_model(LAYERS_OF_STAGE * num_stages)
        for name, (cluster, devices) in placements(num_stages).items():
            stages = [
                Stage(
                    layers=range(LAYERS_OF_STAGE * n, LAYERS_OF_STAGE * (n + 1)),
                    devices=tuple(devices[n]),
                )
                for n in range(num_stages)
            ]
            assert len({u for one in devices for u in one}) == sum(map(len, devices)), name
            took_ms = milliseconds(CostModel(model, cluster), stages, num_microbatches, runs)
            print(f"| {num_stages}, {num_microbatches} | {name} | {took_ms:.2f} |", flush=True)


if __name__ == "__main__":
    main()
