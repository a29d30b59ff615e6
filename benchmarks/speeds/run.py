"""What it is worth to know that devices differ in speed.

    python benchmarks/speeds/run.py [--every N] [--shift K] [--lines FILE] [--seconds N] [--write]

Half of the devices have speed 1, the others 0.4, mixed within hosts (every second device is slow)
and between hosts (every second host is slow). Each model is planned three times:

- `best`, which knows the speeds and may give devices shares in proportion to them;
- `even`: the same search with even shares only;
- `blind`: the plan made as if all devices were equal, and then judged with the real speeds.

Memory is ignored, since a blind plan need not fit. Samples stay whole without `--divisible`. One
stage a device. `--lines` keeps a line of JSON for each case and goes on where it ended; `--seconds`
stops a slice after so much processor time.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pipeplan as pp
from pipeplan.planning.door import attempt, make_problem

sys.path.insert(0, str(Path(__file__).parents[1]))
from clusters import hosts_cluster, random_8

SLOW = 0.4
MODELS = (
    "vgg19", "resnet152", "bert-large", "transformer-big", "gpt2-xl", "llama-7b", "mixtral-8x7b",
)  # fmt: skip
PROFILES = Path(__file__).parents[2].parent / "shared" / "profiles"
MICROBATCHES = (8, 32)
ONE_STAGE = {"positions": 1, "split_backward": False}


def clusters():
    """Clusters with speeds, by name; where there is one host, only mixed within it."""
    pairs = [hosts_cluster(n) for n in ("1x8-nvlink", "1x8-pcie", "4x2-10g", "4x2-25g", "4x2-100g")]
    quads = [
        pp.expand_hosts(
            f"{count}x4-25g",
            [pp.HostGroup(count=count, devices=4, bandwidth_gb_per_s=12)],
            between_hosts_gb_per_s=3,
        )
        for count in (2, 4)
    ]
    eights = [
        pp.expand_hosts(
            "8x8-100g",
            [pp.HostGroup(count=8, devices=8, bandwidth_gb_per_s=130)],
            between_hosts_gb_per_s=12.5,
        )
    ]
    for cluster in [*pairs, *quads, random_8(0), *eights]:
        hosts = list(dict.fromkeys(device.host for device in cluster.devices))
        yield with_speeds(cluster, "within", lambda index, _: index % 2)
        if 1 < len(hosts) < cluster.num_devices:
            order = {host: k for k, host in enumerate(hosts)}
            yield with_speeds(cluster, "between", lambda _, host, order=order: order[host] % 2)


def with_speeds(cluster: pp.Cluster, kind: str, is_slow) -> pp.Cluster:
    devices = tuple(
        replace(device, speed=SLOW if is_slow(index, device.host) else 1.0)
        for index, device in enumerate(cluster.devices)
    )
    return replace(cluster, name=f"{cluster.name}, {kind}", devices=devices)


def blind_ms(model: pp.ModelProfile, cluster: pp.Cluster, microbatches: int, options) -> float:
    """The time, with the real speeds, of the plan made as if all devices were equal."""
    devices = tuple(replace(device, speed=1.0) for device in cluster.devices)
    made = pp.plan(model, replace(cluster, devices=devices), microbatches, **options)
    judged = replace(made, cluster=cluster, predicted=None)
    return pp.simulate(judged).iteration_ms


def measure(model, cluster, microbatches: int, options) -> dict[str, Any]:
    """One case: the three times, the gap, and the processor seconds with and without shares."""
    problem = make_problem(model, cluster, microbatches, **options)
    began_s = time.process_time()
    best = attempt(problem, "best").plan
    middle_s = time.process_time()
    limits = replace(problem.limits, shares=False)
    even = attempt(replace(problem, limits=limits), "best").plan
    even_s = time.process_time() - middle_s
    return {
        "model": model.name,
        "cluster": cluster.name,
        "microbatches": microbatches,
        "blind": blind_ms(model, cluster, microbatches, options),
        "even": even.iteration_ms,
        "best": best.iteration_ms,
        "gap": best.bound.gap(best.iteration_ms),
        "scope": best.bound.scope,
        "uneven": f"{sum(s.shares is not None for s in best.stages)} of {best.num_stages}",
        "seconds": middle_s - began_s,
        "even_s": max(1e-3, even_s),
    }


def table(rows: list[dict[str, Any]], kind: str) -> str:
    """The results as they are published."""
    mean = statistics.geometric_mean
    faster = [row["blind"] / row["best"] for row in rows]
    over_even = [row["even"] / row["best"] for row in rows]
    gaps = [row["gap"] for row in rows]
    lines = [
        f"{len(rows)} instances, {kind}. `best` is {100 * (mean(faster) - 1):.1f} % faster than"
        f" blind plans in geometric mean, {100 * (min(faster) - 1):.1f} % at least, and"
        f" {100 * (mean(over_even) - 1):.2f} % faster than with even shares,"
        f" {100 * (min(over_even) - 1):.2f} % at least, {100 * (max(over_even) - 1):.1f} % at most."
        f" Its gap to the bound for any shares is {100 * statistics.mean(gaps):.1f} % in the mean,"
        f" {100 * statistics.median(gaps):.1f} % in the median. Planning takes"
        f" {mean([row['seconds'] / row['even_s'] for row in rows]):.2f} times the processor time of"
        " planning with even shares.",
        "",
        "| model | cluster | M | blind ms | even ms | best ms | over blind % | over even % | gap %"
        " | uneven |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|---|",
        *(
            f"| {row['model']} | {row['cluster']} | {row['microbatches']} | {row['blind']:.5g}"
            f" | {row['even']:.5g} | {row['best']:.5g} | {100 * (over_blind - 1):.1f}"
            f" | {100 * (over - 1):.2f} | {100 * row['gap']:.1f} | {row['uneven']} |"
            for row, over_blind, over in zip(rows, faster, over_even, strict=True)
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="take every Nth instance")
    parser.add_argument("--shift", type=int, default=0, help="from this one on")
    parser.add_argument("--lines", type=Path, help="a line of JSON for each case")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--divisible", action="store_true", help="samples may be split")
    parser.add_argument("--write", action="store_true", help="write results.md")
    given = parser.parse_args()
    options = {"ignore_memory": True, "divisible": given.divisible, **ONE_STAGE}
    models = [pp.zoo.model(name) for name in MODELS]
    models += [pp.read_model(path) for path in sorted(PROFILES.glob("*.model.json"))]
    cases = list(itertools.product(models, clusters(), MICROBATCHES))[given.shift :: given.every]
    rows = []
    if given.lines and given.lines.exists():
        rows = [json.loads(line) for line in given.lines.read_text().splitlines()]
    done = {(row["model"], row["cluster"], row["microbatches"]) for row in rows}
    for model, cluster, microbatches in cases:
        if (model.name, cluster.name, microbatches) in done:
            continue
        if time.process_time() > given.seconds:
            break
        rows.append(measure(model, cluster, microbatches, options))
        print(rows[-1], file=sys.stderr, flush=True)
        if given.lines:
            with given.lines.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    text = table(rows, "samples may be split" if given.divisible else "whole samples")
    print(text)
    if given.write:
        name = "results-divisible.md" if given.divisible else "results.md"
        (Path(__file__).parent / name).write_text(text)


if __name__ == "__main__":
    main()
