"""How loose the certificates are on irregular clusters of 12 to 64 devices, and why.

    python benchmarks/bounds/run.py [--sizes 14 64] [--every N] [--only TEXT] [--long E]

A gap is a plan's time divided by the bound that came with it, minus 1. With `--long` the same is
planned with more effort. The faster of the two plans splits the gap: what the plan loses to it is
the plan's part, what it is above the bound is at most the bound's part.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import pipeplan as pp
from instances import SIZES, Instance, instances

ONE_STAGE = {"positions": 1, "split_backward": False}
"""One stage a device and whole backwards: what this measures, whatever the default is."""


def percentile(values: list[float], fraction: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(fraction * len(values)) - 1)]


def measure(instance: Instance, effort: float, long_effort: float) -> dict[str, object]:
    """The plan, its bound, and what a longer search finds."""
    begin = time.process_time()
    plan = pp.plan(
        instance.model, instance.cluster, instance.num_microbatches, effort=effort, **ONE_STAGE
    )
    seconds = time.process_time() - begin
    assert plan.bound is not None
    best_ms = plan.iteration_ms
    if long_effort:
        longer = pp.plan(
            instance.model,
            instance.cluster,
            instance.num_microbatches,
            effort=long_effort,
            **ONE_STAGE,
        )
        best_ms = min(best_ms, longer.iteration_ms)
    return {
        "name": instance.name,
        "family": instance.family,
        "size": instance.cluster.num_devices,
        "seconds": seconds,
        "plan_ms": plan.iteration_ms,
        "best_ms": best_ms,
        "bound_ms": plan.bound.lower_bound_ms,
        "bound": plan.options["bound"],
    }


def table(rows: list[dict], sizes: list[int]) -> list[str]:
    lines = [
        "| devices | family | mean gap % | p95 % | plan's part % | bound's part % | proven % |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in sizes:
        of_size = [row for row in rows if row["size"] == size]
        families = list(dict.fromkeys(row["family"] for row in of_size))
        for family in [*families, "all"]:
            mine = [row for row in of_size if family in (row["family"], "all")]
            gaps = [100 * (row["plan_ms"] / row["bound_ms"] - 1) for row in mine]
            plans = [100 * (row["plan_ms"] / row["best_ms"] - 1) for row in mine]
            bounds = [100 * (row["best_ms"] / row["bound_ms"] - 1) for row in mine]
            proven = sum(gap < 1e-4 for gap in gaps) / len(gaps)
            lines.append(
                f"| {size} | {family} | {statistics.mean(gaps):.1f} |"
                f" {percentile(gaps, 0.95):.1f} | {statistics.mean(plans):.1f} |"
                f" {statistics.mean(bounds):.1f} | {100 * proven:.0f} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--every", type=int, default=1, help="take every Nth instance")
    parser.add_argument("--only", default="", help="take those with this text in their names")
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--long", type=float, default=0.0, help="effort of the longer search")
    parser.add_argument("--json", type=Path, help="write the rows")
    parser.add_argument("--write", action="store_true", help="write results.md")
    arguments = parser.parse_args()
    rows = []
    suite = [one for one in instances(tuple(arguments.sizes)) if arguments.only in one.name]
    for instance in suite[:: arguments.every]:
        rows.append(measure(instance, arguments.effort, arguments.long))
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1))
    seconds = [row["seconds"] for row in rows]
    lines = [
        *table(rows, arguments.sizes),
        "",
        f"{len(rows)} instances; planning took {statistics.mean(seconds):.2f} s of processor time"
        f" in the mean, {max(seconds):.2f} s at most.",
    ]
    print("\n".join(lines))
    if arguments.write:
        Path(__file__).with_name("results.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
