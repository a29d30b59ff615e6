"""Predicted against measured on emulated clusters: accuracy, planners, rules of shared links."""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from instances import ACCURACY, FAMILIES, PLANNERS, RULES, SHARED, Case, make_plan
from pipeplan.errors import InfeasibleError
from pipeplan.pipeline import Plan
from pipeplan.replaying import simulate
from pipeplan.testbed.door import Testbed
from pipeplan.testbed.measurement import Measurement

FOLDER = Path(__file__).parent
FIELDS = (
    "part",
    "model",
    "cluster",
    "microbatches",
    "planner",
    "devices",
    "stages",
    "predicted_ms",
    "measured_ms",
    "error",
    "blind_ms",
    "time_factor",
    "byte_factor",
    "seconds",
)
PARTS = {"accuracy": ACCURACY, "families": FAMILIES, "planners": PLANNERS, "shared": SHARED}


def blind_ms(plan: Plan) -> float:
    """What the cost model predicts if nobody shares a link."""
    cluster = replace(plan.cluster, uplink_gb_per_s=None, shared=())
    return simulate(replace(plan, cluster=cluster, predicted=None)).iteration_ms


def measure(cases: list[Case], part: str) -> Iterator[dict[str, object]]:
    with Testbed() as testbed:
        if testbed.note:
            print(testbed.note, file=sys.stderr)
        for case in cases:
            try:
                plan = make_plan(case)
            except InfeasibleError as error:
                print(f"{case}: {error}", file=sys.stderr)
                continue
            begin = time.monotonic()
            measured = testbed.measure(plan)
            yield {
                "part": part,
                "model": case.model,
                "cluster": case.cluster,
                "microbatches": case.microbatches,
                "planner": case.name,
                "devices": len(measured.ranks),
                "stages": " ".join(f"{len(s.layers)}x{s.num_replicas}" for s in plan.stages),
                "predicted_ms": round(measured.predicted_ms, 3),
                "measured_ms": round(measured.measured_ms, 3),
                "error": round(measured.error, 5),
                "blind_ms": round(blind_ms(plan), 3),
                "time_factor": measured.scale.time_factor,
                "byte_factor": measured.scale.byte_factor,
                "seconds": round(time.monotonic() - begin, 1),
            }


def keep(rows: list[dict[str, object]], path: Path) -> None:
    """Put rows into the file, in the place of older ones of the same case."""
    keys = ("part", "model", "cluster", "microbatches", "planner")
    known: dict[tuple[str, ...], dict[str, object]] = {}
    if path.exists():
        with path.open() as file:
            for row in csv.DictReader(file):
                known[tuple(row[key] for key in keys)] = dict(row)
    for row in rows:
        known[tuple(str(row[key]) for key in keys)] = row
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(known.values())


def run_rules(testbed: Testbed) -> Iterator[str]:
    """The ends of single transfers and all-reduces over shared links."""
    yield "| rule | what | predicted ms | measured ms | difference |"
    yield "|---|---|--:|--:|--:|"
    for name, plan in RULES.items():
        measured = testbed.measure(plan)
        for what, predicted_ms, measured_ms in ends(measured):
            change = 100 * (measured_ms / predicted_ms - 1)
            yield f"| {name} | {what} | {predicted_ms:.2f} | {measured_ms:.2f} | {change:+.1f} % |"


def ends(measured: Measurement) -> Iterator[tuple[str, float, float]]:
    """What ended when: each transfer and all-reduce that took time."""
    for transfer in measured.timeline.transfers:
        is_forward = transfer.kind == "F"
        stage = transfer.channel + is_forward
        for block, moment_ms in measured.arrivals_ms.items():
            if (block.kind, block.stage, block.microbatch) == (
                transfer.kind,
                stage,
                transfer.microbatch,
            ):
                yield (
                    f"{transfer.kind}{transfer.microbatch} to stage {stage}",
                    transfer.end_ms,
                    moment_ms,
                )
    for reduce in measured.timeline.all_reduces:
        if reduce.end_ms > reduce.start_ms:
            end_ms = measured.reduce_ends_ms[reduce.stage]
            yield f"all-reduce of stage {reduce.stage}", reduce.end_ms, end_ms


def words(row: dict[str, object]) -> str:
    predicted, measured, blind = (
        float(str(row[name])) for name in ("predicted_ms", "measured_ms", "blind_ms")
    )
    return (
        f"{row['model']:16} {row['cluster']:12} {row['planner']:14} {row['devices']}"
        f" {predicted:9.2f} {measured:9.2f} {100 * (measured / predicted - 1):+.2f} %"
        f"  blind {100 * (measured / blind - 1):+.1f} %  {row['seconds']} s  {row['stages']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "rules"])
    parser.add_argument("--from", dest="start", type=int, default=0, help="the first case")
    parser.add_argument("--to", dest="stop", type=int, help="one past the last case")
    parser.add_argument("--output", type=Path, default=FOLDER / "results.csv")
    arguments = parser.parse_args()
    if arguments.part == "rules":
        with Testbed() as testbed:
            for line in run_rules(testbed):
                print(line, flush=True)
        return
    rows = []
    begin = time.monotonic()
    for row in measure(PARTS[arguments.part][arguments.start : arguments.stop], arguments.part):
        rows.append(row)
        print(words(row), flush=True)
    keep(rows, arguments.output)
    errors = sorted(abs(float(str(row["error"]))) for row in rows)
    print(
        f"{len(rows)} plans, {time.monotonic() - begin:.0f} s; |error| median"
        f" {100 * statistics.median(errors):.2f} %, worst {100 * errors[-1]:.2f} %"
    )


if __name__ == "__main__":
    main()
