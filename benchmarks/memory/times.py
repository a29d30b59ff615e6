"""How much longer planning takes with limits: memory and whole samples against neither.

    python benchmarks/memory/times.py [--every N] [--shift K] [--clusters A,B] [--lines FILE]

Each model is planned with `ignore_memory` and `divisible`, and then within limits: with the memory
that the cluster of the zoo has, and with memory for 40 % of the activations of the free plan
(`run.py`). Processor time, one thread, the two in turn in one process, the less of two runs each.
One stage a device. `--lines` appends a line of JSON for each case.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import pipeplan as pp

sys.path.insert(0, str(Path(__file__).parent))
from run import KEPT, memory_gb, with_memory

PROFILES = Path(__file__).parents[2].parent / "shared" / "profiles"
CLUSTERS = (
    "1x8-nvlink",
    "1x8-pcie",
    "random-8",
    "4x2-10g-no-shared-card",
    "4x2-10g",
    "2x8-100g-no-shared-card",
    "mixed-hosts-no-shared-card",
    "8x8-100g-no-shared-card",
)
MICROBATCHES = 16
FREE = {"ignore_memory": True, "divisible": True}
RUNS = 2


def timed(model: pp.ModelProfile, cluster: pp.Cluster, **options) -> tuple[pp.Plan | None, float]:
    """The plan, if there is one, and the processor seconds that it took."""
    began_s = time.process_time()
    try:
        made = pp.plan(
            model,
            cluster,
            MICROBATCHES,
            num_threads=1,
            positions=1,
            split_backward=False,
            **options,
        )
    except pp.InfeasibleError:
        made = None
    return made, time.process_time() - began_s


def measure(model: pp.ModelProfile, cluster: pp.Cluster) -> dict[str, float]:
    """Least seconds of the free plan, and of the plans within memory, zoo's and tight."""
    seconds: dict[str, list[float]] = {"free": [], "zoo": [], "tight": []}
    row: dict[str, float] = {}
    for _ in range(RUNS):
        free, free_s = timed(model, cluster, **FREE)
        seconds["free"].append(free_s)
        row["free_ms"] = free.iteration_ms
        tight = with_memory(cluster, memory_gb(free, KEPT))
        for kind, place in (("zoo", cluster), ("tight", tight)):
            made, spent_s = timed(model, place)
            seconds[kind].append(spent_s)
            if made is not None:
                row[f"{kind}_ms"] = made.iteration_ms
                row[f"{kind}_gap"] = made.bound.gap(made.iteration_ms)
    return row | {kind: min(spent) for kind, spent in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--shift", type=int, default=0)
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--models", default="")
    parser.add_argument("--lines", type=Path)
    given = parser.parse_args()
    models = [pp.zoo.model(name) for name in pp.zoo.MODEL_NAMES]
    models += [pp.read_model(path) for path in sorted(PROFILES.glob("*.model.json"))]
    models = [model for model in models if given.models in model.name]
    cases = [(model, place) for place in given.clusters.split(",") for model in models]
    rows = []
    for model, place in cases[given.shift :: given.every]:
        row = measure(model, pp.zoo.cluster(place))
        rows.append(row)
        print(
            f"{model.name:26} {place:27} free {row['free']:6.3f} s"
            f"  zoo {row['zoo']:6.3f} ({row['zoo'] / row['free']:5.2f}x)"
            f"  tight {row['tight']:6.3f} ({row['tight'] / row['free']:5.2f}x)",
            flush=True,
        )
        if given.lines:
            with given.lines.open("a") as file:
                file.write(json.dumps({"model": model.name, "cluster": place} | row) + "\n")
    free_s = sum(row["free"] for row in rows)
    for kind in ("zoo", "tight"):
        ratios = [row[kind] / row["free"] for row in rows]
        print(
            f"{kind}: {len(rows)} cases, total {sum(row[kind] for row in rows) / free_s:.2f}x,"
            f" geometric mean {statistics.geometric_mean(ratios):.2f}x,"
            f" median {statistics.median(ratios):.2f}x, at most {max(ratios):.1f}x"
        )


if __name__ == "__main__":
    main()
