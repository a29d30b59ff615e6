"""Plans of two versions of pipeplan on the same irregular clusters of 12 to 64 devices.

    python benchmarks/quality/versions.py make FOLDER
    python benchmarks/quality/versions.py make FOLDER --draw 7
    python benchmarks/quality/versions.py plan FOLDER now.jsonl --names 'L-*,S-*'
    python benchmarks/quality/versions.py plan FOLDER long.jsonl --effort 8 --seed 1
    python benchmarks/quality/versions.py table FOLDER now.jsonl before.jsonl long.jsonl

`make` writes models and clusters once; with another `--draw` they are others. `plan` plans them
with the version that is installed where it runs, a line for each; it knows the library call of
older versions, too. `table` compares the files: how far plans are above the best of all files, the
certified gap, and the processor time.
Samples may be split and memory does not count, because older versions know neither.

L: 64 devices, S: 12 to 16. Models: the zoo, and the profiles in ../shared/profiles if present.
"""

import argparse
import fnmatch
import inspect
import json
import math
import random
import statistics
import time
from pathlib import Path

import pipeplan as pp

PROFILES = Path(__file__).parents[2].parent / "shared" / "profiles"
MAX_LAYERS = 400
NUM_EACH = 6
RANDOM = ("uni20", "uni4", "lu10", "lu100", "geo", "clusters", "hosts", "speeds")
"""Links of 1 to 20 and 5 to 20 GB/s, log-uniform over a factor of 10 and 100; points in a square;
groups of 3 to 7; hosts of 1 to 8 devices; log-uniform links and speeds of 0.4 to 2."""
MILD = ("hosts8", "hosts8b", "uni4m", "geom", "half")
"""Hosts of 8, hosts of 4 to 16, both with 1.25 to 12.5 GB/s between two hosts; many microbatches
(twice); links of 10 to 20 GB/s."""


def link_rule(size: int, kind: str, rng: random.Random):
    """The GB/s from one device to another, by a rule that is drawn once."""
    if kind == "uni20":
        return lambda u, v: rng.uniform(1, 20)
    if kind in ("uni4", "uni4m"):
        return lambda u, v: rng.uniform(5, 20)
    if kind == "half":
        return lambda u, v: rng.uniform(10, 20)
    if kind == "lu10":
        return lambda u, v: 2 * 10 ** rng.random()
    if kind in ("lu100", "speeds"):
        return lambda u, v: 10 ** rng.uniform(0, 2)
    if kind in ("geo", "geom"):
        places = [(rng.random(), rng.random()) for _ in range(size)]
        return lambda u, v: 100 / (1 + (12 * math.dist(places[u], places[v])) ** 2)
    host_of: list[int] = []
    if kind.startswith("hosts8"):
        sizes = (8,) * 8 if kind == "hosts8" else (4, 4, 8, 8, 8, 16, 16)
        host_of = [host for host, devices in enumerate(sizes) for _ in range(devices)]
        rates = (1.25, 3.125, 6.25, 12.5)
    while len(host_of) < size:
        host = host_of[-1] + 1 if host_of else 0
        host_of += [host] * rng.choice((1, 2, 3, 4, 6, 8) if kind == "hosts" else (3, 4, 5, 7))
    if kind == "clusters":
        rng.shuffle(host_of)
        return lambda u, v: rng.uniform(20, 100) if host_of[u] == host_of[v] else rng.uniform(1, 8)
    hosts = range(host_of[-1] + 1)
    inside = [rng.choice((12, 25, 50, 150)) for _ in hosts]
    if kind == "hosts":
        between = [[10 ** rng.uniform(0, 1.1) for _ in hosts] for _ in hosts]
    else:
        between = [[rng.choice(rates) for _ in hosts] for _ in hosts]

    def rate(u: int, v: int) -> float:
        one, other = sorted((host_of[u], host_of[v]))
        return inside[one] if one == other else between[one][other]

    return rate


def make_instance(size: int, kind: str, k: int, rng: random.Random) -> pp.Cluster:
    rule = link_rule(size, kind, rng)
    rows = [[round(rule(u, v), 3) if u != v else 0.0 for v in range(size)] for u in range(size)]
    if kind in RANDOM and kind != "hosts" and k % 2 == 0:
        rows = [[rows[min(u, v)][max(u, v)] for v in range(size)] for u in range(size)]
    speeds = [1.0] * size
    if kind == "speeds":
        speeds = [rng.choice((0.4, 0.6, 1.0, 1.0, 2.0)) for _ in range(size)]
    return pp.Cluster(
        name=kind,
        devices=tuple(pp.Device(name=f"d{u}", speed=speed) for u, speed in enumerate(speeds)),
        bandwidth_gb_per_s=tuple(map(tuple, rows)),
        latency_us=10.0 if k % 3 == 1 else 0.0,
    )


def make(folder: Path, draw: int) -> None:
    """Write all models and clusters, and list.json."""
    folder.mkdir(parents=True, exist_ok=True)
    models = [pp.zoo.model(name) for name in pp.zoo.MODEL_NAMES]
    models += [pp.read_model(path) for path in sorted(PROFILES.glob("*.model.json"))]
    models = [model for model in models if model.num_layers <= MAX_LAYERS]
    for index, model in enumerate(models):
        pp.write_model(model, folder / f"m{index}.model.json")
    listed = []
    groups = [
        ((12, 14, 16), RANDOM, "(12, 14, 16) "),
        ((64,), RANDOM, "(64,) "),
        ((64,), MILD, "2 "),
    ]
    for sizes, kinds, prefix in groups:
        for kind in kinds:
            for k in range(NUM_EACH):
                rng = random.Random(f"{prefix}{kind} {k}" + (f" {draw}" if draw else ""))
                size = sizes[k % len(sizes)]
                cluster = make_instance(size, kind, k, rng)
                name = f"{'L' if size == 64 else 'S'}-{kind}-{k}"
                pp.write_cluster(cluster, folder / f"{name}.cluster.json")
                counts = (64, 128) if kind in ("uni4m", "geom") else (16, 32)
                model = f"m{rng.randrange(len(models))}.model.json"
                listed.append({"name": name, "model": model, "microbatches": counts[k % 2]})
    (folder / "list.json").write_text(json.dumps(listed, indent=1))


def plan(folder: Path, file: Path, names: str, effort: float, seed: int) -> None:
    """Plan what is not yet in the file."""
    is_old = "runnable" in inspect.signature(pp.plan).parameters
    options = {} if is_old else {"divisible": True, "ignore_memory": True}
    if not is_old and hasattr(pp.Plan, "uses_families"):
        options |= {"positions": 1, "split_backward": False}  # what all versions can do
    done = read(file) if file.exists() else {}
    for one in json.loads((folder / "list.json").read_text()):
        wanted = any(fnmatch.fnmatch(one["name"], pattern) for pattern in names.split(","))
        if one["name"] in done or not wanted:
            continue
        model = pp.read_model(folder / one["model"])
        cluster = pp.read_cluster(folder / f"{one['name']}.cluster.json")
        begin_s = time.process_time()
        made = pp.plan(model, cluster, one["microbatches"], effort=effort, seed=seed, **options)
        row = {
            "name": one["name"],
            "ms": made.iteration_ms,
            "lb": made.bound.lower_bound_ms,
            "cpu": time.process_time() - begin_s,
        }
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def read(file: Path) -> dict[str, dict]:
    rows = map(json.loads, file.read_text().splitlines())
    return {row["name"]: row for row in rows}


def table(files: list[Path]) -> None:
    """For each kind, and for all of a size: every file on what the first two have."""
    found = {file: read(file) for file in files}
    best_ms: dict[str, float] = {}
    for rows in found.values():
        for name, row in rows.items():
            best_ms[name] = min(row["ms"], best_ms.get(name, math.inf))
    common = [name for name in found[files[0]] if all(name in found[f] for f in files[:2])]
    kinds = list(dict.fromkeys(name.rsplit("-", 1)[0] for name in common))
    equal = [name for name in common if "speeds" not in name]
    rows = {kind: [name for name in common if name.rsplit("-", 1)[0] == kind] for kind in kinds}
    rows["64, equal speeds"] = [name for name in equal if name[0] == "L"]
    rows["12-16, equal speeds"] = [name for name in equal if name[0] == "S"]
    print("| clusters | file | instances | above best mean / max % | gap % | processor s |")
    print("|---|---|---|---|---|---|")
    for label, names in rows.items():
        for file in files:
            mine = [found[file][name] for name in names if name in found[file]]
            if not mine:
                continue
            above = [100 * (row["ms"] / best_ms[row["name"]] - 1) for row in mine]
            gap = statistics.mean(100 * (row["ms"] / row["lb"] - 1) for row in mine)
            cpu_s = statistics.mean(row["cpu"] for row in mine)
            print(
                f"| {label} | {file.stem} | {len(mine)} | {statistics.mean(above):.2f} /"
                f" {max(above):.2f} | {gap:.2f} | {cpu_s:.2f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=("make", "plan", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--names", default="*")
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", type=int, default=0)
    given = parser.parse_args()
    if given.step == "make":
        make(given.folder, given.draw)
    elif given.step == "plan":
        plan(given.folder, given.files[0], given.names, given.effort, given.seed)
    else:
        table(given.files)


if __name__ == "__main__":
    main()
