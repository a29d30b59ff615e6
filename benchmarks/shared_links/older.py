"""The same comparison with the blind plans of an older version, which knows no shared links.

    python benchmarks/shared_links/older.py inputs FOLDER    # with this version
    python benchmarks/shared_links/older.py plan FOLDER      # with the older one
    python benchmarks/shared_links/older.py judge FOLDER     # with this version

`judge` simulates the older plans with the cards, and compares them with `results.csv`.
"""

import csv
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pipeplan as pp

RESULTS = Path(__file__).with_name("results.csv")


def write_inputs(folder: Path) -> None:
    """A folder for each instance, with a model and a cluster that has no cards."""
    import run

    for index, (model, name) in enumerate(run.instances()):
        place = folder / f"{index:02}"
        place.mkdir(parents=True)
        pp.write_model(model, place / "a.model.json")
        pp.write_cluster(replace(run.cluster(name), uplink_gb_per_s=None), place / "a.cluster.json")


def make_plans(folder: Path) -> None:
    """Only with what all versions have."""
    for place in sorted(folder.iterdir()):
        model = pp.read_model(place / "a.model.json")
        made = pp.plan(model, pp.read_cluster(place / "a.cluster.json"), 16, num_threads=1)
        pp.write_plan(made, place / "a.plan.json")


def judge(folder: Path) -> None:
    import run

    from pipeplan.simulator import run_plan

    with RESULTS.open(newline="") as file:
        rows = {(row["model"], row["cluster"]): row for row in csv.DictReader(file)}
    ratios: dict[str, list[float]] = {"all": []}
    for index, (model, name) in enumerate(run.instances()):
        made = pp.read_plan(folder / f"{index:02}" / "a.plan.json")
        really_ms = run_plan(replace(made, cluster=run.cluster(name)))[1].iteration_ms
        ratio = really_ms / float(rows[model.name, name]["aware_ms"])
        ratios["all"].append(ratio)
        ratios.setdefault(name, []).append(ratio)
    print("| cluster | aware over older blind plans, geometric mean / least / largest |\n|---|--:|")
    for name, values in ratios.items():
        mean = statistics.geometric_mean(values)
        print(f"| {name} | {mean:.3f}x / {min(values):.3f}x / {max(values):.2f}x |")


if __name__ == "__main__":
    what, where = sys.argv[1:]
    {"inputs": write_inputs, "plan": make_plans, "judge": judge}[what](Path(where))
