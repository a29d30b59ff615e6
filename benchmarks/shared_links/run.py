"""What it is worth to know that devices of a host share their network card.

    python benchmarks/shared_links/run.py [--every N] [--long EFFORT] [-o results.csv]

Models: the zoo, and the measured profiles in ../shared/profiles if they are present. Each host's
card is as fast as the bandwidth between hosts. Samples may be split, and memory does not count. For
each instance: the *blind* plan is made as if there were no cards, then simulated with them; the
*aware* plan is made with them; the *long* one with more effort. Times of planning are processor
times of one thread.
"""

import argparse
import csv
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import pipeplan as pp
from pipeplan.simulator import run_plan

PROFILES = Path(__file__).parents[2].parent / "shared" / "profiles"
ONE_STAGE = {"positions": 1, "split_backward": False}
"""One stage a device and whole backwards: what this measures, whatever the default is."""
MICROBATCHES = 16
HOSTS = {
    "2x4-25g": (2, 4, 12.0, 3.125),
    "4x2-10g": (4, 2, 12.0, 1.25),
    "4x4-25g": (4, 4, 12.0, 3.125),
    "8x8-100g": (8, 8, 250.0, 12.5),
}
"""Hosts, devices of each, GB/s inside and between them."""
LARGE = "8x8-100g"
LATENCY_US = 10.0
TIMES = ["blind_says_ms", "blind_ms", "aware_ms", "long_ms", "bound_ms"]
SECONDS = ["blind_s", "aware_s", "long_s"]
FIELDS = ["model", "cluster", *TIMES, "bound", *SECONDS]


def cluster(name: str) -> pp.Cluster:
    """A cluster of hosts, each with a card as fast as the bandwidth between hosts."""
    count, devices, inside, between = HOSTS[name]
    return pp.expand_hosts(
        name,
        [pp.HostGroup(count=count, devices=devices, bandwidth_gb_per_s=inside)],
        between_hosts_gb_per_s=between,
        latency_us=LATENCY_US,
        uplink_gb_per_s=between,
    )


def instances() -> list[tuple[pp.ModelProfile, str]]:
    """All models on the small clusters, every second one on the large one."""
    models = [pp.zoo.model(name) for name in pp.zoo.MODEL_NAMES]
    models += [pp.read_model(path) for path in sorted(PROFILES.glob("*.model.json"))]
    return [
        (model, name)
        for name in HOSTS
        for index, model in enumerate(models)
        if name != LARGE or index % 2 == 0
    ]


def timed(model: pp.ModelProfile, where: pp.Cluster, effort: float) -> tuple[pp.Plan, float]:
    began_s = time.process_time()
    made = pp.plan(
        model, where, MICROBATCHES, divisible=True, effort=effort, num_threads=1, **ONE_STAGE
    )
    return made, time.process_time() - began_s


def measure(model: pp.ModelProfile, name: str, long_effort: float) -> dict[str, object]:
    """One row of the results; without a long search its fields are empty."""
    where = cluster(name)
    unshared = replace(where, uplink_gb_per_s=None)
    blind, blind_s = timed(model, unshared, 1.0)
    blind_ms = run_plan(replace(blind, cluster=where))[1].iteration_ms
    aware, aware_s = timed(model, where, 1.0)
    assert aware.iteration_ms <= blind_ms * (1 + 1e-7), (model.name, name)  # proofs are so exact
    assert pp.check(aware).ok, (model.name, name)
    row = {
        "model": model.name,
        "cluster": name,
        "blind_says_ms": blind.iteration_ms,
        "blind_ms": blind_ms,
        "aware_ms": aware.iteration_ms,
        "bound_ms": aware.bound.lower_bound_ms,
        "bound": aware.options["bound"],
        "blind_s": blind_s,
        "aware_s": aware_s,
    }
    if long_effort:
        effort = long_effort if name != LARGE else 1 + (long_effort - 1) / 3
        long, long_s = timed(model, where, effort)
        row |= {"long_ms": long.iteration_ms, "long_s": long_s}
    return row


def summary(rows: list[dict[str, object]]) -> list[str]:
    """The figures in a table, in all and by cluster."""
    titles = (
        "cluster | instances | blind plans take longer than they say, mean / max |"
        " aware over blind, geometric mean / max | above the long search, mean / max |"
        " gap to the bound, mean / max | planning time over blind"
    )
    lines = [f"| {titles} |", "|" + "---|" * 7]
    for name in ["all", *HOSTS]:
        chosen = [row for row in rows if name in ("all", row["cluster"])]
        if not chosen:
            continue
        column = {
            field: [float(row[field]) for row in chosen]
            for field in (*TIMES, *SECONDS)
            if all(row.get(field) for row in chosen)
        }
        pairs = zip(column["blind_ms"], column["blind_says_ms"], strict=True)
        longer = [100 * (real / says - 1) for real, says in pairs]
        faster = [a / b for a, b in zip(column["blind_ms"], column["aware_ms"], strict=True)]
        gaps = [
            100 * (a / b - 1) for a, b in zip(column["aware_ms"], column["bound_ms"], strict=True)
        ]
        above = "-"
        if "long_ms" in column:
            lost = [
                100 * (a / min(a, b) - 1)
                for a, b in zip(column["aware_ms"], column["long_ms"], strict=True)
            ]
            above = f"{statistics.mean(lost):.2f} % / {max(lost):.1f} %"
        slower = sum(column["aware_s"]) / sum(column["blind_s"])
        lines.append(
            f"| {name} | {len(chosen)} | {statistics.mean(longer):.0f} % / {max(longer):.0f} % |"
            f" {statistics.geometric_mean(faster):.3f}x / {max(faster):.2f}x | {above} |"
            f" {statistics.mean(gaps):.2f} % / {max(gaps):.1f} % | {slower:.2f}x |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="take every Nth instance")
    parser.add_argument("--first", type=int, default=0, help="begin with this instance")
    parser.add_argument("--long", type=float, default=0.0, help="effort of the long search")
    parser.add_argument("--clusters", nargs="*", default=list(HOSTS))
    parser.add_argument("-o", type=Path, help="write all rows to this file")
    arguments = parser.parse_args()
    pp.plan(pp.zoo.model("vgg19"), cluster("2x4-25g"), 4, num_threads=1, **ONE_STAGE)  # imports
    rows = []
    chosen = instances()[arguments.first :: arguments.every]
    for model, name in chosen:
        if name not in arguments.clusters:
            continue
        rows.append(measure(model, name, arguments.long))
        figures = " ".join(
            f"{value:.4g}" if isinstance(value, float) else str(value)
            for value in rows[-1].values()
        )
        print(figures, file=sys.stderr, flush=True)
    if arguments.o:
        with arguments.o.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
