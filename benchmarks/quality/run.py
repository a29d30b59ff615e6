"""How far plans can be from the optimum: the 8-device suite.

    python benchmarks/quality/run.py [--every N] [--whole] [--write]

Models: the zoo, and the measured profiles in ../shared/profiles if they are present. A gap is a
plan's time divided by the lower bound that `best` proves for the instance, minus 1. Samples may be
split, as in the paper; with --whole they may not, and `spp`, which splits them, is left out.
"""

import argparse
import itertools
import math
import statistics
import sys
import time
from pathlib import Path

import pipeplan as pp

sys.path.insert(0, str(Path(__file__).parents[1]))
from clusters import hosts_cluster, random_8

PROFILES = Path(__file__).parents[2].parent / "shared" / "profiles"
CLUSTERS = [
    *(hosts_cluster(name) for name in ("1x8-nvlink", "1x8-pcie", "4x2-10g", "4x2-25g", "4x2-100g")),
    pp.expand_hosts(
        "2x4-25g",
        [pp.HostGroup(count=2, devices=4, bandwidth_gb_per_s=12)],
        between_hosts_gb_per_s=3,
    ),
    *(random_8(seed) for seed in range(3)),
]
MICROBATCHES = (4, 8, 16, 32, 64)
OPTIMAL_WITHIN = 1e-6


def instances():
    models = [pp.zoo.model(name) for name in pp.zoo.MODEL_NAMES]
    models += [pp.read_model(path) for path in sorted(PROFILES.glob("*.model.json"))]
    yield from itertools.product(models, CLUSTERS, MICROBATCHES)


def percentile(values: list[float], fraction: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(fraction * len(values)) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="take every Nth instance")
    parser.add_argument("--write", action="store_true", help="write results.md")
    parser.add_argument("--worst", type=int, default=0, help="list the worst instances")
    parser.add_argument("--whole", action="store_true", help="samples may not be split")
    arguments = parser.parse_args()
    gaps: dict[str, list[float]] = {"best": []} if arguments.whole else {"spp": [], "best": []}
    speedups, seconds, rows = [], [], []
    for model, cluster, count in list(instances())[:: arguments.every]:
        begin = time.process_time()
        best = pp.plan(
            model,
            cluster,
            count,
            "best",
            divisible=not arguments.whole,
            positions=1,
            split_backward=False,
        )
        seconds.append(time.process_time() - begin)
        assert best.bound is not None
        gaps["best"].append(100 * best.bound.gap(best.iteration_ms))
        if not arguments.whole:
            spp = pp.plan(model, cluster, count, "spp", divisible=True)
            assert best.iteration_ms <= spp.iteration_ms * (1 + 1e-12), (model.name, cluster.name)
            gaps["spp"].append(100 * best.bound.gap(spp.iteration_ms))
            speedups.append(spp.iteration_ms / best.iteration_ms)
        rows.append((gaps["best"][-1], model.name, cluster.name, count, best.options["bound"]))
    lines = [
        f"{len(rows)} instances",
        "",
        "| planner | mean gap % | p95 % | max % | proven optimal % |",
        "|---|---|---|---|---|",
    ]
    for planner, values in gaps.items():
        optimal = sum(value < 100 * OPTIMAL_WITHIN for value in values) / len(values)
        lines.append(
            f"| {planner} | {statistics.mean(values):.2f} | {percentile(values, 0.95):.2f} |"
            f" {max(values):.2f} | {100 * optimal:.0f} |"
        )
    lines.append("")
    if speedups:
        lines.append(
            f"`best` over `spp`: {100 * (statistics.geometric_mean(speedups) - 1):.1f} % faster in"
            f" geometric mean, {100 * (max(speedups) - 1):.0f} % at most, never slower."
        )
    lines.append(
        f"Planning took {1e3 * statistics.median(seconds):.0f} ms of processor time in the median,"
        f" {1e3 * percentile(seconds, 0.95):.0f} ms at the 95th percentile."
    )
    lines += ["", "By cluster, `best`:", "", "| cluster | mean gap % | p95 % | proven optimal % |"]
    lines.append("|---|---|---|---|")
    for name in [cluster.name for cluster in CLUSTERS]:
        values = [row[0] for row in rows if row[2] == name]
        if values:
            optimal = sum(value < 100 * OPTIMAL_WITHIN for value in values) / len(values)
            lines.append(
                f"| {name} | {statistics.mean(values):.2f} | {percentile(values, 0.95):.2f} |"
                f" {100 * optimal:.0f} |"
            )
    print("\n".join(lines))
    for row in sorted(rows, reverse=True)[: arguments.worst]:
        print(row)
    if arguments.write:
        Path(__file__).with_name("results.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
