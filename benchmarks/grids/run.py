"""What equal replicas cost: the nearest plan that frameworks can run against the best plan."""

import argparse
import statistics
import time
from dataclasses import replace
from itertools import product

from pipeplan import zoo
from pipeplan.cluster import Cluster
from pipeplan.interop.grid_plan import nearest_grid_plan
from pipeplan.planning.door import plan

CLUSTERS = (
    "1x8-nvlink",
    "1x8-pcie",
    "4x2-10g-no-shared-card",
    "4x2-25g-no-shared-card",
    "4x2-100g-no-shared-card",
    "random-8",
)
MICROBATCHES = (8, 32)
MICROBATCH_SIZE = 8
"""All numbers of replicas on eight devices divide it but 3, 5, 6 and 7."""


def without_memory_limits(cluster: Cluster) -> Cluster:
    """So that times are compared, not what fits: the search prefers plans that fit."""
    devices = tuple(replace(device, memory_gb=None) for device in cluster.devices)
    return replace(cluster, devices=devices)


def measure() -> list[tuple[float, float, float]]:
    """For each instance the times of any order, 1F1B and the best grid over that of `best`."""
    ratios = []
    for model, cluster, microbatches in product(zoo.MODEL_NAMES, CLUSTERS, MICROBATCHES):
        profile = zoo.model(model, microbatch_size=MICROBATCH_SIZE)
        where = without_memory_limits(zoo.cluster(cluster))
        best = plan(profile, where, microbatches, positions=1, split_backward=False)
        grid = plan(profile, where, microbatches, planner="grid")
        plans = (nearest_grid_plan(best), nearest_grid_plan(best, "1f1b"), grid)
        ratios.append(tuple(each.iteration_ms / best.iteration_ms for each in plans))
    return ratios


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    begin = time.monotonic()
    ratios = measure()
    print(f"{len(ratios)} instances, {time.monotonic() - begin:.0f} s")
    print("| plan | mean | median | 95th percentile | largest |\n|---|--:|--:|--:|--:|")
    names = ("equal replicas, any order", "equal replicas, 1F1B", "best grid, 1F1B")
    for name, column in zip(names, zip(*ratios, strict=True), strict=True):
        ordered = sorted(100 * (ratio - 1) for ratio in column)
        high = ordered[int(0.95 * len(ordered))]
        middle = statistics.median(ordered)
        print(
            f"| {name} | {statistics.mean(ordered):.1f} % | {middle:.1f} % | {high:.0f} % |"
            f" {ordered[-1]:.0f} % |"
        )
    worse = sum(mine > grid * (1 + 1e-9) for _, mine, grid in ratios)
    print(f"equal replicas under 1F1B are slower than the best grid in {worse} instances")


if __name__ == "__main__":
    main()
