"""Planning time with and without shared cards, by the number of devices.

    python benchmarks/shared_links/times.py [--seeds N]

Synthetic models on hosts, as in benchmarks/speed; processor time of one thread.
"""

import argparse
import random
import time
from dataclasses import replace

import pipeplan as pp

SIZES = {(24, 8): 4, (50, 16): 8, (100, 64): 8, (200, 256): 8}
"""(layers, devices) -> devices of a host."""
MICROBATCHES = 16


def make_model(num_layers: int, seed: int) -> pp.ModelProfile:
    """Layers like those of a transformer, as in benchmarks/speed."""
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


def seconds(model: pp.ModelProfile, cluster: pp.Cluster) -> tuple[float, float]:
    """Processor time, and the iteration in ms."""
    began_s = time.process_time()
    made = pp.plan(model, cluster, MICROBATCHES, num_threads=1, positions=1, split_backward=False)
    return time.process_time() - began_s, made.iteration_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--devices", type=int, nargs="*", default=[v for _, v in SIZES])
    arguments = parser.parse_args()
    pp.plan(make_model(4, 1), pp.zoo.cluster("4x2-10g"), 4, num_threads=1)  # imports
    print("| layers, devices | without cards ms | with cards ms | ratio |\n|---|--:|--:|--:|")
    for (num_layers, num_devices), on_host in SIZES.items():
        if num_devices not in arguments.devices:
            continue
        alone = shared = 0.0
        for seed in range(1, arguments.seeds + 1):
            model = make_model(num_layers, seed)
            cluster = pp.expand_hosts(
                "hosts",
                [
                    pp.HostGroup(
                        count=num_devices // on_host, devices=on_host, bandwidth_gb_per_s=50
                    )
                ],
                between_hosts_gb_per_s=5,
                uplink_gb_per_s=5,
            )
            alone += seconds(model, replace(cluster, uplink_gb_per_s=None))[0]
            shared += seconds(model, cluster)[0]
        mean_ms = [1e3 * total / arguments.seeds for total in (alone, shared)]
        print(
            f"| {num_layers}, {num_devices} | {mean_ms[0]:.0f} | {mean_ms[1]:.0f} |"
            f" {shared / alone:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
