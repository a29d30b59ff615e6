"""How far plans are from the best known ones on irregular clusters of 12 to 64 devices.

    python benchmarks/quality/irregular.py --devices 12 14 16 --count 36 --known FILE --long
    python benchmarks/quality/irregular.py --devices 12 14 16 --count 36 --known FILE

With --long, several kinds of long searches look for better plans and write the best times to FILE;
this takes up to minutes an instance. Without it, `best` plans at its default effort and is compared
with these times. A time that is better than the known one becomes the known one.

Models: the zoo, and the measured profiles in ../shared/profiles if they are present.
"""

import argparse
import json
import math
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pipeplan as pp
from pipeplan.cluster import Cluster, Device
from pipeplan.errors import PipeplanError
from pipeplan.planning.baselines import BASELINES
from pipeplan.planning.door import make_problem
from pipeplan.planning.planner.best import _Search
from pipeplan.planning.planner.settings import SearchStep, Sizes, Starts, Step
from pipeplan.planning.planner.starts import different_plans, plain_plan

PROFILES = Path(__file__).parents[2].parent / "shared" / "profiles"
KINDS = ("uniform", "log-uniform", "geometric", "clusters", "hosts", "speeds")
MICROBATCHES = (8, 16, 32, 64)
LONG, PLAIN = SearchStep(Starts.BEST, 3.0), SearchStep(Starts.PLAIN, 1.0)


def models() -> list[pp.ModelProfile]:
    zoo = [pp.zoo.model(name) for name in pp.zoo.MODEL_NAMES]
    return zoo + [pp.read_model(path) for path in sorted(PROFILES.glob("*.model.json"))]


def make_cluster(num_devices: int, kind: str, rng: random.Random) -> Cluster:
    """Irregular links of some kind; two in three without latencies, the others with a matrix."""
    rates, speeds = [[0.0] * num_devices for _ in range(num_devices)], [1.0] * num_devices
    link = link_rule(num_devices, kind, rng)
    for u in range(num_devices):
        for v in range(num_devices):
            rates[u][v] = round(link(u, v), 4) if u != v else 0.0
    if kind == "speeds":
        speeds = [rng.choice((0.4, 0.6, 1.0, 1.0, 2.0)) for _ in range(num_devices)]
    latency: float | tuple = 0.0
    if rng.random() < 1 / 3:
        latency = tuple(
            tuple(round(rng.uniform(5, 50), 2) if u != v else 0.0 for v in range(num_devices))
            for u in range(num_devices)
        )
    devices = tuple(Device(name=f"d{u}", speed=speed) for u, speed in enumerate(speeds))
    return Cluster(
        name=kind, devices=devices, bandwidth_gb_per_s=tuple(map(tuple, rates)), latency_us=latency
    )


def link_rule(num_devices: int, kind: str, rng: random.Random):
    """The GB/s from one device to another, by a rule that is drawn once."""
    if kind == "uniform":
        return lambda u, v: rng.uniform(1, 20)
    if kind in ("log-uniform", "speeds"):
        return lambda u, v: 10 ** rng.uniform(0, 2 if kind == "log-uniform" else 1.5)
    if kind == "geometric":
        places = [(rng.random(), rng.random()) for _ in range(num_devices)]
        return lambda u, v: 100 / (1 + (12 * math.dist(places[u], places[v])) ** 2)
    groups, group_of = 0, []
    while len(group_of) < num_devices:
        group_of += [groups] * rng.choice((1, 2, 3, 4, 6, 8) if kind == "hosts" else (3, 4, 5, 7))
        groups += 1
    if kind == "clusters":
        rng.shuffle(group_of)
        return lambda u, v: (
            rng.uniform(20, 100) if group_of[u] == group_of[v] else rng.uniform(1, 8)
        )
    inside = [rng.choice((12, 25, 50, 150)) for _ in range(groups)]
    between = [[10 ** rng.uniform(0, 1.1) for _ in range(groups)] for _ in range(groups)]
    return lambda u, v: (
        inside[group_of[u]] if group_of[u] == group_of[v] else between[group_of[u]][group_of[v]]
    )


def instances(devices: list[int], count: int, seed: int):
    """Name and problem options of each instance; kinds, samples and sizes take turns."""
    rng = random.Random(f"irregular {seed}")
    pool = models()
    for index in range(count):
        kind, num_devices = KINDS[index % len(KINDS)], devices[index % len(devices)]
        model, cluster = rng.choice(pool), make_cluster(num_devices, kind, rng)
        microbatches, divisible = rng.choice(MICROBATCHES), bool(index // len(KINDS) % 2)
        samples = "split" if divisible else "whole"
        name = f"{seed}/{index} {num_devices} {kind} {model.name} M={microbatches} {samples}"
        options = {"model": model, "cluster": cluster, "microbatches": microbatches}
        yield name, {**options, "divisible": divisible, "positions": 1, "split_backward": False}


def long_searches(options: dict, known_ms: float, log) -> float:
    """The best time that searches of four kinds find."""
    best_ms = known_ms
    for seed in (0, 7):
        found = pp.plan(**options, effort=12, seed=seed).iteration_ms
        best_ms = min(best_ms, found)
        log(f"effort 12, seed {seed}", found)
    for label, kind in (("plain", plain_starts), ("others", from_others), ("orders", by_orders)):
        problem = make_problem(**options, seed=3)
        search = _Search(problem.within_samples())
        search.offer_simple_plans()
        search.order_devices()
        kind(search, problem)
        search.search_from(different_plans(search.incumbent.ranked(), 4), LONG)
        search.search_from(search.incumbent.ranked()[:4], LONG)
        best_ms = min(best_ms, search.incumbent.iteration_ms)
        log(label, search.incumbent.iteration_ms)
    return best_ms


def plain_starts(search: _Search, problem) -> None:
    """Many searches from even splits on several orders, half of the devices often unused."""
    rng = random.Random(5)
    for _ in range(10):
        search.search_from([plain_plan(search.cost, search.orders, rng) for _ in range(4)], PLAIN)


def from_others(search: _Search, problem) -> None:
    """Searches from the plans of published planners."""
    starts = []
    for make in BASELINES.values():
        try:
            stages = make(problem).stages
        except PipeplanError:
            continue
        if all(stage.num_replicas <= search.cost.max_replicas for stage in stages):
            starts.append(tuple(replace(stage, shares=None) for stage in stages))
            search.offer(starts[-1])
    for first in range(0, len(starts), 4):
        search.search_from(starts[first : first + 4], LONG)


def by_orders(search: _Search, problem) -> None:
    """The recursion on orders that random changes make better and better."""
    rng = random.Random(6)
    many = search.num_devices > 32
    step = Step(Sizes.POWERS if many else Sizes.QUARTERS, 1 if many else 2, 1)
    search.plan_on_orders()
    orders = sorted((search._plan_on_order(order, step), order) for order in search.orders[:4])
    least_ms, order = orders[0]
    for _ in range(60 if many else 150):
        changed = list(order)
        for _ in range(rng.randint(1, 3)):
            a, b = sorted(rng.sample(range(len(changed)), 2))
            match rng.randrange(3):
                case 0:
                    changed[a], changed[b] = changed[b], changed[a]
                case 1:
                    changed[a:b] = changed[a:b][::-1]
                case _:
                    changed.insert(a, changed.pop(b))
        ms = search._plan_on_order(tuple(changed), step)
        if ms <= least_ms:
            least_ms, order = ms, tuple(changed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, nargs="+", default=[12, 14, 16])
    parser.add_argument("--count", type=int, default=36)
    parser.add_argument("--skip", type=int, default=0, help="leave out the first instances")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--known", type=Path, required=True, help="file of the best known times")
    parser.add_argument("--long", action="store_true", help="search long for better times")
    arguments = parser.parse_args()
    known = json.loads(arguments.known.read_text()) if arguments.known.exists() else {}
    rows = []
    todo = list(instances(arguments.devices, arguments.count, arguments.seed))[arguments.skip :]
    for name, options in todo:
        best_ms = known.get(name, math.inf)
        if arguments.long:
            best_ms = long_searches(
                options, best_ms, lambda kind, ms: print(f"  {kind:20} {ms:.3f}", flush=True)
            )
        else:
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            plan = pp.plan(**options, effort=arguments.effort)
            wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
            best_ms = min(best_ms, plan.iteration_ms)
            above = 100 * (plan.iteration_ms / best_ms - 1)
            gap = 100 * plan.bound.gap(plan.iteration_ms)
            rows.append((above, gap, cpu_s, wall_s, name))
            print(f"{above:6.2f} % above, gap {gap:6.2f} %, {cpu_s:.2f} s, {name}", flush=True)
        if best_ms < known.get(name, math.inf):
            known |= json.loads(arguments.known.read_text()) if arguments.known.exists() else {}
            known[name] = min(best_ms, known.get(name, math.inf))
            arguments.known.write_text(json.dumps(known, indent=1))
    if rows:
        above, gaps, cpu_s, _, _ = map(list, zip(*rows, strict=True))
        print(
            f"{len(rows)} instances: {statistics.mean(above):.2f} % above the best known in the"
            f" mean, {max(above):.2f} % at most; certified gap {statistics.mean(gaps):.2f} % in the"
            f" mean, {statistics.median(gaps):.2f} % in the median; planning took"
            f" {statistics.mean(cpu_s):.2f} s of processor time in the mean,"
            f" {max(cpu_s):.2f} s at most"
        )


if __name__ == "__main__":
    main()
