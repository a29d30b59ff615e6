"""What little memory costs: plans with 40 % of the activations of the unlimited plan.

    python benchmarks/memory/run.py [--write]

Each model is planned without limits. Then every device gets the same memory: the largest sum, over
the devices of that plan, of parameters, gradients, optimizer state and 40 % of the activations.
The time with this memory is compared with the unlimited one. Models: the transformers of the zoo.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write results.md")
    arguments = parser.parse_args()
    ratios, slower, rows, infeasible = [], [], [], []
    for name in MODELS:
        for place in CLUSTERS:
            model, cluster = pp.zoo.model(name), pp.zoo.cluster(place)
            began_s = time.perf_counter()
            free = pp.plan(model, cluster, MICROBATCHES, ignore_memory=True, **ONE_STAGE)
            free_s = time.perf_counter() - began_s
            limit_gb = memory_gb(free, KEPT)
            began_s = time.perf_counter()
            try:
                made = pp.plan(model, with_memory(cluster, limit_gb), MICROBATCHES, **ONE_STAGE)
            except pp.InfeasibleError as problem:
                infeasible.append(f"{name} on {place}: {problem}")
                continue
            tight_s = time.perf_counter() - began_s
            assert not pp.check(made, strict_memory=True).errors, (name, place)
            ratios.append(made.iteration_ms / free.iteration_ms)
            slower.append(tight_s / free_s)
            again = sum(stage.recompute for stage in made.stages)
            rows.append(
                f"| {name} | {place} | {limit_gb:.3g} | {free.iteration_ms:.4g} |"
                f" {made.iteration_ms:.4g} | {100 * (ratios[-1] - 1):.1f} |"
                f" {again} of {made.num_stages} | {free_s:.2f} | {tight_s:.2f} |"
            )
            print(rows[-1], file=sys.stderr)
    lines = [
        f"{len(rows)} instances, {MICROBATCHES} microbatches:"
        f" {100 * (statistics.geometric_mean(ratios) - 1):.1f} % slower in geometric mean,"
        f" {100 * (max(ratios) - 1):.1f} % at most."
        f" Planning takes {statistics.geometric_mean(slower):.2f} times as long.",
        "",
        "| model | cluster | GB | free ms | limited ms | slower % | recompute | free s | tight s |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"Infeasible: {len(infeasible)}.",
        *(f"- {line}" for line in infeasible),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.write:
        (Path(__file__).parent / "results.md").write_text(text)


if __name__ == "__main__":
    main()
