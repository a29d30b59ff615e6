"""How much faster are our plans than those of published planners?

The evaluation follows the paper (Luo et al. 2022, arXiv:2204.10562): its models, clusters like its
testbed and random ones, several numbers of microbatches. Then it varies one property of the problem
at a time: number of devices, microbatches, link speed, spread of link speeds. The same simulator
judges every planner's schedule.

    python benchmarks/paper/run.py              everything: results.csv, README.md, *.svg
    python benchmarks/paper/run.py --quick -o /tmp/paper      a few instances, to try it
"""

import argparse
import csv
import math
import os
import platform
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

from svg import draw_bars, draw_lines

from pipeplan import zoo
from pipeplan.cluster import Cluster, Device, HostGroup, expand_hosts
from pipeplan.cost import CostModel
from pipeplan.errors import InfeasibleError
from pipeplan.planning.baselines import BASELINES
from pipeplan.planning.limits import Limits
from pipeplan.planning.problem import Problem
from pipeplan.planning.registry import PLANNERS

sys.path.insert(0, str(Path(__file__).parents[1]))
from clusters import hosts_cluster

MODELS = (
    "vgg19",
    "resnet152",
    "inception-v3",
    "transformer-big",
    "bert-large",
    "xlnet-large",
    "bert-48",
)
TESTBEDS = ("4x2-10g", "4x2-25g", "4x2-100g", "mixed-hosts")
EFFECT_MODELS = ("vgg19", "bert-large")
PAPER_CLAIM = 2.57
"""The paper's largest speed-up: 157 % faster."""
OURS = tuple(name for name in ("spp", "best") if name in PLANNERS)
FAMILIES = ("interleaved-1f1b", "zb-h1", "zb-v")
"""Several stages a device or split backwards: `benchmarks/families` compares with these."""
PUBLISHED = {name: planner for name, planner in BASELINES.items() if name not in FAMILIES}
ALL_PLANNERS = {**{name: PLANNERS[name] for name in OURS}, **PUBLISHED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One problem, and the question that it belongs to."""

    question: str
    point: str
    """The position on the axis of the question."""
    model: str
    cluster: Cluster
    microbatches: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of one planner on one instance."""

    question: str
    point: str
    model: str
    cluster: str
    num_devices: int
    microbatches: int
    seed: int
    planner: str
    iteration_ms: float
    planning_s: float
    lower_bound_ms: float | None


def random_links(
    num_devices: int, seed: int, slowest_gb_per_s: float, fastest_gb_per_s: float
) -> Cluster:
    """Each direction of each link is drawn separately, log-uniform."""
    rng = random.Random(seed)
    low, high = math.log(slowest_gb_per_s), math.log(fastest_gb_per_s)

    def link() -> float:
        return round(math.exp(rng.uniform(low, high)), 4)

    name = f"random-{num_devices}, {slowest_gb_per_s:g}..{fastest_gb_per_s:g} GB/s, seed {seed}"
    return Cluster(
        name=name,
        devices=tuple(Device(name=f"d{u}") for u in range(num_devices)),
        bandwidth_gb_per_s=tuple(
            tuple(link() for _ in range(num_devices)) for _ in range(num_devices)
        ),
        latency_us=20.0,
    )


def pairs(num_hosts: int, between_gb_per_s: float) -> Cluster:
    """Hosts with two devices, as in the paper's testbed."""
    return expand_hosts(
        f"{num_hosts}x2, {between_gb_per_s:g} GB/s between hosts",
        [HostGroup(count=num_hosts, devices=2, bandwidth_gb_per_s=12.0)],
        between_hosts_gb_per_s=between_gb_per_s,
        latency_us=20.0,
    )


def instances(seed: int, quick: bool) -> Iterator[Instance]:
    """All problems, in a fixed order."""
    for model in MODELS[:2] if quick else MODELS:
        clusters = [hosts_cluster(name) for name in TESTBEDS]
        clusters += [random_links(8, seed + draw, 0.5, 25.0) for draw in range(2)]
        for cluster in clusters[:1] + clusters[-1:] if quick else clusters:
            for microbatches in (8,) if quick else (8, 32):
                yield Instance(
                    question="paper",
                    point=cluster.name,
                    model=model,
                    cluster=cluster,
                    microbatches=microbatches,
                    seed=seed,
                )
    for model in EFFECT_MODELS[:1] if quick else EFFECT_MODELS:
        yield from _effects(model, seed, quick)


def _effects(model: str, seed: int, quick: bool) -> Iterator[Instance]:
    def instance(question: str, point: str, cluster: Cluster, microbatches: int = 16) -> Instance:
        return Instance(
            question=question,
            point=point,
            model=model,
            cluster=cluster,
            microbatches=microbatches,
            seed=seed,
        )

    for hosts in (1, 2) if quick else (1, 2, 4, 8, 16):
        yield instance("devices", str(2 * hosts), pairs(hosts, 1.25))
    for microbatches in (2, 8) if quick else (2, 4, 8, 16, 32, 64):
        yield instance("microbatches", str(microbatches), pairs(4, 1.25), microbatches)
    for gb_per_s in (1.0, 4.0) if quick else (0.5, 1.0, 2.0, 4.0, 8.0, 16.0):
        yield instance("link speed", f"{gb_per_s:g}", pairs(4, gb_per_s))
    for spread in (1, 10) if quick else (1, 3, 10, 30, 100):
        middle = 4.0  # the geometric mean stays, only the spread grows
        cluster = random_links(8, seed, middle / math.sqrt(spread), middle * math.sqrt(spread))
        yield instance("spread", str(spread), cluster)


def run_instance(instance: Instance) -> list[Row]:
    """Every planner on one instance."""
    problem = Problem(
        cost=CostModel(zoo.model(instance.model), instance.cluster),
        num_microbatches=instance.microbatches,
        seed=instance.seed,
        # Published planners split samples and know no memory, so ours may do the same here.
        limits=Limits(memory=False, whole_samples=False),
    )
    rows = []
    for name, planner in ALL_PLANNERS.items():
        started_s = perf_counter()
        try:
            draft = planner(problem)
        except InfeasibleError as error:
            print(f"{name} on {instance.cluster.name}: {error}", file=sys.stderr)
            continue
        rows.append(
            Row(
                question=instance.question,
                point=instance.point,
                model=instance.model,
                cluster=instance.cluster.name,
                num_devices=instance.cluster.num_devices,
                microbatches=instance.microbatches,
                seed=instance.seed,
                planner=name,
                iteration_ms=draft.iteration_ms,
                planning_s=round(perf_counter() - started_s, 4),
                lower_bound_ms=None if draft.bound is None else draft.bound.lower_bound_ms,
            )
        )
    return rows


Times = Mapping[str, float]
"""Iteration time by planner, of one instance."""


def by_instance(rows: Sequence[Row]) -> list[Times]:
    """The rows of each instance together."""
    grouped: dict[tuple[str, str, str, int], dict[str, float]] = {}
    for row in rows:
        key = (row.question, row.model, row.cluster, row.microbatches)
        grouped.setdefault(key, {})[row.planner] = row.iteration_ms
    return list(grouped.values())


def speedups(cases: Sequence[Times], ours: str, baseline: str | None) -> list[float]:
    """Speed-ups of `ours` over a baseline, or over the best baseline of each instance."""
    ratios = []
    for times in cases:
        known = [times[name] for name in PUBLISHED if name in times]
        other = min(known) if baseline is None else times.get(baseline)
        if other is not None and ours in times:
            ratios.append(other / times[ours])
    return ratios


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else math.nan


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *rows))


def speedup_table(cases: Sequence[Times]) -> str:
    header = ["over"]
    for ours in OURS:
        header += [f"`{ours}` mean", "largest", "smallest"]
    rows = []
    for baseline in (*PUBLISHED, None):
        name = "**the best baseline of each instance**" if baseline is None else f"`{baseline}`"
        cells = [name]
        for ours in OURS:
            ratios = speedups(cases, ours, baseline)
            cells += [
                f"{geometric_mean(ratios):.2f}x",
                f"{max(ratios):.2f}x",
                f"{min(ratios):.2f}x",
            ]
        rows.append(cells)
    return table(header, rows)


def claim_table(paper: Sequence[Row], ours: str) -> str:
    """The instances on which ours is at least as much faster as the paper's largest claim."""
    grouped: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in paper:
        case = (row.model, row.cluster, row.microbatches)
        grouped.setdefault(case, {})[row.planner] = row.iteration_ms
    rows = []
    for baseline in (*PUBLISHED, None):
        reached = {}
        for (model, cluster, count), times in grouped.items():
            known = [times[name] for name in PUBLISHED if name in times]
            other = min(known) if baseline is None else times.get(baseline, 0.0)
            if other / times[ours] >= PAPER_CLAIM:
                reached.setdefault(model, []).append(f"{cluster} x {count}")
        name = "the best baseline" if baseline is None else f"`{baseline}`"
        number = sum(len(cases) for cases in reached.values())
        where = "; ".join(f"{model}: {len(cases)}" for model, cases in reached.items())
        example = next((f"{m} on {c[0]}" for m, c in reached.items()), "")
        rows.append([name, str(number), where, example])
    return table(["over", "instances", "by model", "for example"], rows)


def effect_table(rows: Sequence[Row], question: str) -> tuple[str, str]:
    """A table and a plot: for each point the time divided by that of the fastest planner."""
    points = list(dict.fromkeys(row.point for row in rows))
    means: dict[str, list[float]] = {name: [] for name in ALL_PLANNERS}
    for point in points:
        cases = by_instance([row for row in rows if row.point == point])
        for name, line in means.items():
            ratios = [times[name] / min(times.values()) for times in cases if name in times]
            line.append(geometric_mean(ratios))
    text = table(
        [question, *points],
        [[f"`{name}`", *(f"{value:.2f}" for value in line)] for name, line in means.items()],
    )
    plot = draw_lines("iteration time / fastest planner (geometric mean)", question, points, means)
    return text, plot


def planning_table(rows: Sequence[Row]) -> str:
    lines = []
    for name in ALL_PLANNERS:
        seconds = sorted(row.planning_s for row in rows if row.planner == name)
        gaps = [
            row.iteration_ms / row.lower_bound_ms - 1
            for row in rows
            if row.planner == name and row.lower_bound_ms
        ]
        mean_gap = f"{sum(gaps) / len(gaps):.2%}" if gaps else ""
        lines.append(
            [f"`{name}`", f"{seconds[len(seconds) // 2]:.3f}", f"{seconds[-1]:.3f}", mean_gap]
        )
    return table(["planner", "median s", "longest s", "mean gap to its bound"], lines)


def write_results(
    folder: Path, rows: Sequence[Row], arguments: Sequence[str], took_s: float
) -> None:
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    paper = [row for row in rows if row.question == "paper"]
    cases = by_instance(paper)
    bars = {}
    for name in (*OURS, *PUBLISHED):
        ratios = [times[name] / min(times.values()) for times in cases if name in times]
        bars[name] = geometric_mean(ratios)
    (folder / "planners.svg").write_text(
        draw_bars("iteration time / fastest planner (geometric mean)", "x", bars)
    )
    sections = []
    for question in ("devices", "microbatches", "link speed", "spread"):
        text, plot = effect_table([row for row in rows if row.question == question], question)
        picture = f"{question.replace(' ', '-')}.svg"
        (folder / picture).write_text(plot)
        sections.append(f"### {question.capitalize()}\n\n{text}\n\n![{question}]({picture})\n")
    (folder / "README.md").write_text(
        _readme(paper, cases, sections, rows, arguments=arguments, took_s=took_s)
    )


def _readme(
    paper: Sequence[Row],
    cases: Sequence[Times],
    sections: Sequence[str],
    rows: Sequence[Row],
    *,
    arguments: Sequence[str],
    took_s: float,
) -> str:
    models = ", ".join(dict.fromkeys(row.model for row in paper))
    clusters = "; ".join(dict.fromkeys(row.cluster for row in paper))
    microbatches = ", ".join(str(m) for m in dict.fromkeys(row.microbatches for row in paper))
    effect_models = ", ".join(dict.fromkeys(r.model for r in rows if r.question != "paper"))
    command = " ".join(["python benchmarks/paper/run.py", *arguments])
    return f"""# How much faster are our plans than those of published planners?

Written by `run.py`; do not edit. All rows are in `results.csv`.

## Result

{len(cases)} instances: models {models}; clusters {clusters}; {microbatches} microbatches.
Speed-up = baseline's iteration time / ours, both simulated on the real cluster: geometric mean,
largest, smallest. Below 1 the baseline is faster.

{speedup_table(cases)}

![planners](planners.svg)

{planning_table(paper)}

## Where the paper's 157 % is reached

Instances on which `spp`, the paper's planner, is at least {PAPER_CLAIM}x as fast. Weak baselines
are easy to beat by this factor. The last row is for the best baseline of each instance.

{claim_table(paper, "spp")}

## One property at a time

Iteration time divided by that of the fastest planner, geometric mean over {effect_models};
1.00 is the fastest. 16 microbatches and four hosts with two devices unless the row says otherwise,
12 GB/s inside a host, 1.25 GB/s between hosts. Link speed: GB/s between hosts. Spread: fastest over
slowest possible link of 8 devices with random links around 4 GB/s.

{chr(10).join(sections)}
## Environment

{datetime.now(UTC):%Y-%m-%d}, pipeplan {version("pipeplan")}, Python {platform.python_version()},
{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}; {took_s:.0f} s.

## To reproduce

    {command}
"""


def _processor() -> str:
    """The processor's name as the system knows it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few instances, to try the script")
    parser.add_argument("--seed", type=int, default=0, help="for random clusters and planners")
    parser.add_argument("--jobs", type=int, default=1, help="instances at once")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    work = list(instances(arguments.seed, arguments.quick))
    started_s = perf_counter()
    rows: list[Row] = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for done, made in enumerate(pool.map(run_instance, work), start=1):
            rows += made
            print(f"\r{done}/{len(work)} instances", end="", file=sys.stderr, flush=True)
    took_s = perf_counter() - started_s
    print(f", {took_s:.0f} s", file=sys.stderr)
    command = [f"--seed {arguments.seed}", f"--jobs {arguments.jobs}"]
    command = ["--quick", *command] if arguments.quick else command
    write_results(arguments.output, rows, command, took_s)


if __name__ == "__main__":
    main()
