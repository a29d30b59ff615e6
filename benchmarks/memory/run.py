"""What little memory costs: plans with 40 % of the activations of the unlimited plan.

    python benchmarks/memory/run.py [--lines FILE] [--seconds N] [--write]

Each model is planned without limits. Then every device gets the same memory: the largest sum, over
the devices of that plan, of parameters, gradients, optimizer state and 40 % of the activations.
The time with this memory is compared with the unlimited one. Models: the transformers of the zoo.
One stage a device. `--lines` keeps a line of JSON for each case and goes on where it ended;
`--seconds` stops a slice after so much processor time.
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
from pipeplan.cost import CostModel

MODELS = (
    "transformer-big", "bert-large", "bert-48", "xlnet-large", "gpt2-xl",
    "llama-7b", "llama-70b", "mixtral-8x7b", "llava-7b",
)  # fmt: skip
CLUSTERS = (
    "1x8-nvlink",
    "1x8-pcie",
    "4x2-10g-no-shared-card",
    "4x2-25g-no-shared-card",
    "4x2-100g-no-shared-card",
    "2x8-100g-no-shared-card",
    "8x8-100g-no-shared-card",
)
ONE_STAGE = {"positions": 1, "split_backward": False}
"""One stage a device and whole backwards: what this measures, whatever the default is."""
MICROBATCHES = 16
ONE_STAGE = {"positions": 1, "split_backward": False}
KEPT = 0.4
"""The part of the unlimited plan's activations for which there is memory."""


def memory_gb(plan: pp.Plan, kept: float) -> float:
    """The largest memory of a device with only this part of its activations."""
    cost = CostModel(plan.model, plan.cluster)
    return max(
        parts.total_gb - (1 - kept) * parts.activation_gb
        for index, stage in enumerate(plan.stages)
        for parts in cost.memory_parts(stage, plan.schedule.most_in_flight(index))
    )


def with_memory(cluster: pp.Cluster, gb: float) -> pp.Cluster:
    devices = tuple(replace(device, memory_gb=gb) for device in cluster.devices)
    return replace(cluster, devices=devices)


def measure(name: str, place: str) -> dict[str, Any]:
    """One case: times with and without the limit, or why there is no plan with it."""
    model, cluster = pp.zoo.model(name), pp.zoo.cluster(place)
    began_s = time.process_time()
    free = pp.plan(model, cluster, MICROBATCHES, ignore_memory=True, **ONE_STAGE)
    free_s = time.process_time() - began_s
    limit_gb = memory_gb(free, KEPT)
    row = {"model": name, "cluster": place, "gb": limit_gb, "free_ms": free.iteration_ms}
    began_s = time.process_time()
    try:
        made = pp.plan(model, with_memory(cluster, limit_gb), MICROBATCHES, **ONE_STAGE)
    except pp.InfeasibleError as problem:
        return row | {"problem": str(problem)}
    tight_s = time.process_time() - began_s
    assert not pp.check(made, strict_memory=True).errors, (name, place)
    again = sum(stage.recompute for stage in made.stages)
    return row | {
        "ms": made.iteration_ms,
        "recompute": f"{again} of {made.num_stages}",
        "gap": made.bound.gap(made.iteration_ms),
        "free_s": free_s,
        "tight_s": tight_s,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The results as they are published."""
    fits = [row for row in rows if "ms" in row]
    ratios = [row["ms"] / row["free_ms"] for row in fits]
    slower = [row["tight_s"] / row["free_s"] for row in fits]
    infeasible = [row for row in rows if "problem" in row]
    lines = [
        f"{len(fits)} of {len(rows)} instances have a plan, {MICROBATCHES} microbatches:"
        f" {100 * (statistics.geometric_mean(ratios) - 1):.1f} % slower in geometric mean,"
        f" {100 * (max(ratios) - 1):.1f} % at most."
        f" Planning takes {statistics.geometric_mean(slower):.2f} times the processor time.",
        "",
        "| model | cluster | GB | free ms | limited ms | slower % | gap % | recompute |",
        "|---|---|--:|--:|--:|--:|--:|---|",
        *(
            f"| {row['model']} | {row['cluster']} | {row['gb']:.3g} | {row['free_ms']:.4g} |"
            f" {row['ms']:.4g} | {100 * (ratio - 1):.1f} | {100 * row['gap']:.1f} |"
            f" {row['recompute']} |"
            for row, ratio in zip(fits, ratios, strict=True)
        ),
        "",
        f"Infeasible: {len(infeasible)}.",
        *(f"- {row['model']} on {row['cluster']}: {row['problem']}" for row in infeasible),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=Path, help="a line of JSON for each case")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--write", action="store_true", help="write results.md")
    given = parser.parse_args()
    rows = []
    if given.lines and given.lines.exists():
        rows = [json.loads(line) for line in given.lines.read_text().splitlines()]
    done = {(row["model"], row["cluster"]) for row in rows}
    for name, place in itertools.product(MODELS, CLUSTERS):
        if (name, place) in done:
            continue
        if time.process_time() > given.seconds:
            break
        rows.append(measure(name, place))
        print(rows[-1], file=sys.stderr, flush=True)
        if given.lines:
            with given.lines.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    text = table(rows)
    print(text)
    if given.write:
        (Path(__file__).parent / "results.md").write_text(text)


if __name__ == "__main__":
    main()
