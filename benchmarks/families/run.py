"""What several stages a device and split backwards gain over one stage a device, at equal memory.

Instances come from a file (`--instances`, as `families.json` below describes) or are made here: zoo
models on six clusters of eight devices. A weight gradient that a profile does not give counts as
half of the backward. Every device has the memory that the best plan with one stage a device needs.
"""

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeplan import zoo
from pipeplan.checker import check
from pipeplan.cluster import Cluster, Device, HostGroup, expand_hosts
from pipeplan.cost import CostModel
from pipeplan.documents.files import read_cluster, read_model
from pipeplan.errors import InfeasibleError
from pipeplan.planning.door import plan
from pipeplan.planning.planner.chain_bound import fixed_plan_bound_ms
from pipeplan.planning.planner.lower_bound import work_bound_ms
from pipeplan.profile import ModelProfile

CLUSTERS = ("1x8-nvlink", "1x8-pcie", "4x2-10g", "4x2-25g", "4x2-100g", "random-8")
MODELS = ("bert-large", "gpt2-xl", "llama-7b", "resnet152", "transformer-big", "vgg19")
MICROBATCHES = (4, 8, 16, 32)
ONE_STAGE = {"positions": 1, "split_backward": False}
WHAT = ("gain", "room")
PUBLISHED = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One instance; `known_ms` is what somebody else reached, if anybody says so."""

    name: str
    model: ModelProfile
    cluster: Cluster
    microbatches: int
    one_stage_ms: float | None = None
    known_ms: float | None = None


def with_weight_gradients(model: ModelProfile) -> ModelProfile:
    """The model with a weight gradient in each layer."""
    layers = tuple(
        layer
        if layer.weight_grad_ms is not None
        else replace(layer, weight_grad_ms=layer.backward_ms / 2)
        for layer in model.layers
    )
    return replace(model, layers=layers)


def with_memory(cluster: Cluster, memory_gb: float | None) -> Cluster:
    """The cluster with this memory on each device."""
    devices = tuple(replace(device, memory_gb=memory_gb) for device in cluster.devices)
    return replace(cluster, devices=devices)


def cases_of_file(path: Path) -> list[Case]:
    """The instances of a file; models that are no zoo names lie beside it."""
    document = json.loads(path.read_text())
    clusters = {}
    with TemporaryDirectory() as folder:
        for name, content in document["clusters"].items():
            written = Path(folder) / f"{name}.cluster.json"
            written.write_text(json.dumps(content))
            clusters[name] = read_cluster(written)
    return [
        Case(
            name=f"{each['model'].split('/')[-1].split('.')[0]} {each['cluster']}",
            model=with_weight_gradients(
                read_model(path.parent / each["model"])
                if "/" in each["model"]
                else zoo.model(each["model"])
            ),
            cluster=with_memory(clusters[each["cluster"]], each["memory_gb"]),
            microbatches=each["microbatches"],
            one_stage_ms=each["one_stage_ms"],
            known_ms=each["both_ms"],
        )
        for each in document["instances"]
    ]


def case_of(name: str, model: ModelProfile, cluster: Cluster, microbatches: int) -> Case:
    """With the memory of the best plan with one stage a device."""
    one = plan(model, cluster, microbatches, divisible=True, **ONE_STAGE)
    peak_gb = max(one.require_predicted().peak_memory_gb.values())
    return Case(
        name=name,
        model=with_weight_gradients(model),
        cluster=with_memory(cluster, peak_gb * (1 + 1e-9)),
        microbatches=microbatches,
    )


def own_cases() -> list[Case]:
    """Zoo models on zoo clusters; the memory is that of the best plan with one stage a device."""
    cases = []
    for number, (name, where) in enumerate((m, c) for m in MODELS for c in CLUSTERS):
        model, microbatches = zoo.model(name), MICROBATCHES[(number + number // 6) % 4]
        own_links = replace(zoo.cluster(where), uplink_gb_per_s=None, shared=())
        cluster = with_memory(own_links, None)
        cases.append(case_of(f"{name} {where}", model, cluster, microbatches))
    return cases


def unseen_cases(folder: Path, known: set[str]) -> list[Case]:
    """Profiles of a folder that are not known yet, each on clusters drawn at random."""
    cases: list[Case] = []
    for number, path in enumerate(sorted(folder.glob("*.model.json"))):
        if path.name in known:
            continue
        rng = random.Random(f"unseen {number}")
        model = read_model(path)
        for draw in range(2):
            cluster = random_links(rng) if draw else unequal_hosts(rng)
            name = f"{path.name.split('.')[0]} {cluster.name}"
            cases.append(case_of(name, model, cluster, rng.choice(MICROBATCHES)))
    return cases


UNSEEN_ZOO = ("inception-v3", "bert-48", "mixtral-8x7b", "llava-7b", "llama-70b")


def unseen_on_same_clusters(folder: Path, file_cases: list[Case]) -> list[Case]:
    """Models that are not in the file, on its kinds of clusters; random links are drawn anew."""
    known = {case.name.split()[0] for case in file_cases}
    paths = sorted(folder.glob("*.model.json"))
    models = [(path.name.split(".")[0], read_model(path)) for path in paths]
    models += [(name, zoo.model(name)) for name in UNSEEN_ZOO]
    unseen = [(name, model) for name, model in models if name not in known]
    clusters = {case.cluster.name: with_memory(case.cluster, None) for case in file_cases}
    cases = []
    for number, (name, model) in enumerate(unseen):
        for kind, where in enumerate(clusters):
            cluster = clusters[where]
            if where.startswith("random"):
                cluster = with_random_links(cluster, random.Random(100 + number))
            count = MICROBATCHES[(number * len(clusters) + kind + number // 2) % 4]
            cases.append(case_of(f"{name} {where}", model, cluster, count))
    return cases


def with_random_links(cluster: Cluster, rng: random.Random) -> Cluster:
    """The cluster with another link for each ordered pair of devices, 1 to 100 GB/s."""
    size = range(cluster.num_devices)
    rates = tuple(
        tuple(0.0 if u == v else round(100 ** rng.random(), 3) for v in size) for u in size
    )
    return replace(cluster, bandwidth_gb_per_s=rates)


def unequal_hosts(rng: random.Random) -> Cluster:
    """Eight devices on two to four hosts of different size and links."""
    sizes = rng.choice([(4, 4), (2, 2, 4), (1, 3, 4), (2, 3, 3), (1, 1, 2, 4)])
    hosts = [
        HostGroup(devices=n, bandwidth_gb_per_s=rng.choice([6.0, 12.0, 40.0]) if n > 1 else None)
        for n in sizes
    ]
    return expand_hosts("hosts", hosts, between_hosts_gb_per_s=rng.choice([1.25, 3.0, 12.5]))


def random_links(rng: random.Random) -> Cluster:
    """Eight devices, each pair with a link of its own."""
    rates = [[0.0] * 8 for _ in range(8)]
    for u in range(8):
        for v in range(u):
            rates[u][v] = rates[v][u] = 1.25 * 16 ** rng.random()
    devices = tuple(Device(name=f"d{u}") for u in range(8))
    return Cluster(
        name="links", devices=devices, bandwidth_gb_per_s=tuple(tuple(row) for row in rates)
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures of one instance."""

    gain: float
    room: float
    """What a plan would gain that keeps all devices busy all the time."""
    gap: float
    planning_s: float
    processor_s: float
    microbatches: int
    slower_than: tuple[str, ...]


def is_faster(planner: str, case: Case, iteration_ms: float) -> bool:
    """Whether a published planner makes a faster plan that fits."""
    try:
        other = plan(case.model, case.cluster, case.microbatches, planner=planner)
    except InfeasibleError:
        return False
    peak_gb = max(other.require_predicted().peak_memory_gb.values())
    fits = peak_gb <= (case.cluster.devices[0].memory_gb or peak_gb) * (1 + 1e-9)
    return fits and other.iteration_ms < iteration_ms * (1 - 1e-9)


def measure(case: Case, effort: float, threads: int, seed: int) -> Row:
    """Plan one instance both ways, and check the result."""
    common = {"divisible": True, "num_threads": threads, "seed": seed}
    one = plan(case.model, case.cluster, case.microbatches, effort=effort, **common, **ONE_STAGE)
    begin, began = time.perf_counter(), time.process_time()
    both = plan(
        case.model,
        case.cluster,
        case.microbatches,
        positions="auto",
        split_backward=True,
        effort=effort,
        **common,
    )
    planning_s, processor_s = time.perf_counter() - begin, time.process_time() - began
    verdict = check(both)
    assert not verdict.errors, verdict.errors
    slower = [name for name in PUBLISHED if is_faster(name, case, both.iteration_ms)]
    bound_ms = fixed_plan_bound_ms(both)
    work_ms = work_bound_ms(CostModel(case.model, case.cluster), case.microbatches)
    row = Row(
        gain=100 * (one.iteration_ms / both.iteration_ms - 1),
        room=100 * (one.iteration_ms / work_ms - 1),
        gap=100 * (both.iteration_ms / bound_ms - 1),
        planning_s=planning_s,
        processor_s=processor_s,
        microbatches=case.microbatches,
        slower_than=tuple(slower),
    )
    known = f" known {case.known_ms:9.2f}" if case.known_ms else ""
    groups = {stage.devices: n for n, stage in enumerate(reversed(both.stages))}
    order = sorted(groups, key=lambda devices: -groups[devices])
    chain = " ".join(str(order.index(stage.devices)) for stage in both.stages)
    print(
        f"{case.name:36} M {case.microbatches:2} one {one.iteration_ms:9.2f} both"
        f" {both.iteration_ms:9.2f}{known} gain {row.gain:5.1f} of"
        f" {row.room:5.1f} % gap {row.gap:4.2f} % {planning_s:5.2f} s ({processor_s:.2f}) groups"
        f" {'+'.join(str(len(devices)) for devices in order)} chain {chain}"
        f"{' SLOWER than ' + ', '.join(slower) if slower else ''}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=Path, help="a file of instances")
    parser.add_argument("--unseen", type=Path, help="a folder of profiles, on random clusters")
    parser.add_argument(
        "--same-clusters", action="store_true", help="unseen models on the clusters of the file"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--every", type=int, default=1, help="only each so many-th instance")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    cases = cases_of_file(given.instances) if given.instances else []
    if given.same_clusters and not (given.unseen and given.instances):
        parser.error("--same-clusters needs --unseen and --instances")
    if given.same_clusters:
        cases = unseen_on_same_clusters(given.unseen, cases)
    elif given.unseen:
        known = {Path(name).name for name in MODELS} | {case.name.split()[0] for case in cases}
        known |= {f"{name}.model.json" for name in known}
        cases = unseen_cases(given.unseen, known)
    cases = cases or own_cases()
    rows = [
        measure(case, given.effort, given.threads, given.seed)
        for case in cases[given.first :: given.every]
    ]
    if not rows:
        sys.exit("no instances")
    gains = [row.gain for row in rows]
    print(f"{len(rows)} instances, effort {given.effort:g}")
    print(
        f"gain: mean {statistics.mean(gains):.2f} %, largest {max(gains):.1f} %,"
        f" least {min(gains):.2f} %; of a plan without any pause"
        f" {statistics.mean(row.room for row in rows):.1f} %"
    )
    for microbatches in sorted({row.microbatches for row in rows}):
        mine = [row for row in rows if row.microbatches == microbatches]
        gain, room = (statistics.mean(getattr(row, what) for row in mine) for what in WHAT)
        print(f"  M = {microbatches}: {gain:.1f} of {room:.1f} % ({len(mine)})")
    print(f"above the fixed-plan bound: mean {statistics.mean(row.gap for row in rows):.2f} %")
    print(
        f"planning: mean {statistics.mean(row.planning_s for row in rows):.2f} s, processor"
        f" {statistics.mean(row.processor_s for row in rows):.2f} s,"
        f" largest {max(row.processor_s for row in rows):.2f} s"
    )
    print(f"slower than a published order that fits: {sum(bool(r.slower_than) for r in rows)}")


if __name__ == "__main__":
    main()
