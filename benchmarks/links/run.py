"""How near are measured links to the true ones? On emulated clusters, whose rates are known.

python benchmarks/links/run.py [CLUSTER ...] [--seconds 60]
"""

import argparse
import random
import statistics
import time
from dataclasses import replace

from pipeplan.cluster import Cluster, Device, HostGroup, expand_hosts
from pipeplan.shared_links import SharedLink
from pipeplan.testbed.door import Testbed
from pipeplan.testbed.orders import Way

SEED = 0


def hosts(name: str, count: int, devices: int, inside: float, between: float, **fields) -> Cluster:
    group = HostGroup(count=count, devices=devices, bandwidth_gb_per_s=inside)
    return expand_hosts(name, [group], between_hosts_gb_per_s=between, **fields)


def uneven() -> Cluster:
    """Six devices whose every pair and direction has a rate of its own."""
    rng = random.Random(SEED)
    rates = [[rng.uniform(0.02, 0.1) for _ in range(6)] for _ in range(6)]
    return Cluster(
        name="uneven-6",
        devices=tuple(Device(name=f"d{i}", host=f"h{i}") for i in range(6)),
        bandwidth_gb_per_s=tuple(map(tuple, rates)),
    )


def lopsided() -> Cluster:
    """Two hosts; the first one's card sends faster than it receives."""
    cluster = hosts("lopsided", 2, 3, 0.2, 0.08)
    card = SharedLink(name="card of h0", members=("h0",), gb_per_s=0.2, in_gb_per_s=0.1)
    return replace(cluster, shared=(card,))


CLUSTERS = {
    "paced-4": (hosts("paced-4", 1, 4, 0.1, 0.1), Way.PACING),
    "2x2-card": (hosts("2x2-card", 2, 2, 0.3, 0.1, uplink_gb_per_s=0.12), None),
    "2x4-card": (hosts("2x4-card", 2, 4, 0.3, 0.1, uplink_gb_per_s=0.1), None),
    "4x2-card": (hosts("4x2-card", 4, 2, 0.2, 0.1, uplink_gb_per_s=0.15), None),
    "3x2-free": (hosts("3x2-free", 3, 2, 0.2, 0.05), None),
    "lopsided": (lopsided(), None),
    "uneven-6": (uneven(), None),
    "6x4-card": (hosts("6x4-card", 6, 4, 0.1, 0.05, uplink_gb_per_s=0.06), None),
}


def errors_of(found: Cluster, true: Cluster) -> list[float]:
    size = range(true.num_devices)
    return [
        found.bandwidth_gb_per_s[a][b] / true.bandwidth_gb_per_s[a][b] - 1
        for a in size
        for b in size
        if a != b
    ]


def card_errors(found: Cluster, true: Cluster) -> list[float]:
    """Errors of the cards of both directions; infinite where one was not found, or invented."""
    rates = [
        {link.devices: (link.out_gb_per_s, link.in_gb_per_s) for link in cluster.links}
        for cluster in (found, true)
    ]
    if rates[0].keys() != rates[1].keys() and true.shared == ():
        return [float("inf")]
    return [
        mine / theirs - 1
        for devices in rates[1]
        for mine, theirs in zip(rates[0][devices], rates[1][devices], strict=True)
    ]


def show(errors: list[float]) -> str:
    if not errors:
        return "none | none"
    sizes = sorted(map(abs, errors))
    return f"{100 * statistics.median(sizes):.2f} % | {100 * sizes[-1]:.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clusters", nargs="*", help=f"of {', '.join(CLUSTERS)}")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    print("| cluster | devices | pairs: median | largest | cards: median | largest | s |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name in options.clusters or [each for each in CLUSTERS if each != "6x4-card"]:
        cluster, way = CLUSTERS[name]
        with Testbed(way) as testbed:
            testbed.measure_links(hosts("warm", 1, 2, 1.0, 1.0), seconds=1.0)  # imports torch
            begin_s = time.monotonic()
            found, notes = testbed.measure_links(cluster, seconds=options.seconds)
            took_s = time.monotonic() - begin_s
        print(
            f"| {name} | {cluster.num_devices} | {show(errors_of(found, cluster))} |"
            f" {show(card_errors(found, cluster))} | {took_s:.0f} |",
            flush=True,
        )
        for note in notes:
            print(f"\n{note}\n", flush=True)


if __name__ == "__main__":
    main()
