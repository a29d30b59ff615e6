"""Which average of the links should baselines that know only one or two bandwidths plan with?

Prints the speed-up of `spp` over each baseline for four averages, on random links. On hosts with
equal links all averages inside and between hosts are the same.

    python benchmarks/paper/averages.py
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from run import MODELS, geometric_mean, random_links, table

from pipeplan import zoo
from pipeplan.cost import CostModel, Floats
from pipeplan.planning.baselines import BASELINES, view
from pipeplan.planning.problem import Problem
from pipeplan.planning.registry import PLANNERS

sys.path.insert(0, str(Path(__file__).parents[1]))
from clusters import random_8

AVERAGES: dict[str, Callable[[Floats], float]] = {
    "harmonic mean": lambda rates: float(rates.size / (1 / rates).sum()),
    "median": lambda rates: float(np.median(rates)),
    "arithmetic mean": lambda rates: float(rates.mean()),
    "minimum": lambda rates: float(rates.min()),
}
WITH_A_VIEW = ("pipedream", "dapple", "hetpipe", "piper", "alpa")


def problems() -> list[Problem]:
    clusters = [random_links(8, seed, 0.5, 25.0) for seed in range(3)]
    clusters += [random_8(seed) for seed in range(2)]
    return [
        Problem(cost=CostModel(zoo.model(model), cluster), num_microbatches=microbatches)
        for model in MODELS
        for cluster in clusters
        for microbatches in (8, 32)
    ]


def main() -> None:
    cases = problems()
    ours = [PLANNERS["spp"](problem).iteration_ms for problem in cases]
    plain = [name for name in BASELINES if name not in WITH_A_VIEW]
    others = [min(BASELINES[n](problem).iteration_ms for n in plain) for problem in cases]
    rows = []
    for name, average in AVERAGES.items():
        # The view has no option for this on purpose: everywhere else the average is fixed.
        view._mean_rate = lambda rates, otherwise, average=average: (
            average(rates) if rates.size else otherwise
        )
        times = {n: [BASELINES[n](p).iteration_ms for p in cases] for n in WITH_A_VIEW}
        cells = [
            f"{geometric_mean([t / o for t, o in zip(times[n], ours, strict=True)]):.2f}"
            for n in WITH_A_VIEW
        ]
        best = [min(column) for column in zip(*times.values(), others, strict=True)]
        ratios = [b / o for b, o in zip(best, ours, strict=True)]
        rows.append(
            [name, *cells, f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}..{max(ratios):.2f}"]
        )
    print(f"{len(cases)} instances\n")
    print(table(["average", *WITH_A_VIEW, "best baseline", "its range"], rows))


if __name__ == "__main__":
    main()
