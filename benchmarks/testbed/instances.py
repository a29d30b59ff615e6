"""The plans of this benchmark."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from pipeplan import zoo
from pipeplan.cluster import Cluster, Device, HostGroup, expand_hosts
from pipeplan.cost import CostModel
from pipeplan.pipeline import Plan, Schedule, Stage
from pipeplan.planning.door import plan
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.schedules import run_pe


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    cluster: str
    planner: str
    microbatches: int = 8
    recompute: bool = False
    """Whether every stage computes its activations again."""
    blind: bool = False
    """Whether the planner does not know that links are shared."""
    families: bool = False
    """Whether devices may have several stages, and backwards may be cut in two."""

    @property
    def name(self) -> str:
        more = " recompute" * self.recompute + " blind" * self.blind + " families" * self.families
        return self.planner + more


def _card(count: int, devices: int, uplink: float) -> Cluster:
    """Hosts whose devices share one card."""
    return expand_hosts(
        f"{count}x{devices}-card",
        [HostGroup(count=count, devices=devices, bandwidth_gb_per_s=6.0)],
        between_hosts_gb_per_s=uplink,
        uplink_gb_per_s=uplink,
    )


def _uneven() -> Cluster:
    """Six devices of three speeds, on two hosts with unlike links."""
    return expand_hosts(
        "uneven-6",
        [
            HostGroup(devices=2, bandwidth_gb_per_s=8.0, speed=1.5),
            HostGroup(devices=4, bandwidth_gb_per_s=4.0, speed=0.75),
        ],
        between_hosts_gb_per_s=2.0,
    )


CLUSTERS = {
    "2x4-card": _card(2, 4, 1.25),
    "4x2-card": _card(4, 2, 1.25),
    "uneven-6": _uneven(),
    "2x2-10g": expand_hosts(
        "2x2-10g",
        [HostGroup(count=2, devices=2, bandwidth_gb_per_s=6.0)],
        between_hosts_gb_per_s=1.25,
    ),
}

ACCURACY = [
    Case(model="bert-large", cluster="4x2-10g", planner="best"),
    Case(model="vgg19", cluster="4x2-10g", planner="best"),
    Case(model="resnet152", cluster="random-8", planner="best"),
    Case(model="gpt2-xl", cluster="uneven-6", planner="best"),
    Case(model="transformer-big", cluster="uneven-6", planner="best"),
    Case(model="vgg19", cluster="2x4-card", planner="best"),
    Case(model="bert-large", cluster="4x2-card", planner="best", microbatches=16),
    Case(model="xlnet-large", cluster="2x2-10g", planner="spp"),
    Case(model="bert-large", cluster="4x2-10g", planner="gpipe"),
    Case(model="bert-48", cluster="2x2-10g", planner="1f1b"),
    Case(model="vgg19", cluster="4x2-card", planner="dapple"),
    Case(model="resnet152", cluster="4x2-25g", planner="pipedream"),
    Case(model="inception-v3", cluster="2x2-10g", planner="data-parallel"),
    Case(model="bert-large", cluster="2x2-10g", planner="best", recompute=True),
]

FAMILIES = [
    Case(model="bert-large", cluster="2x2-10g", planner="best", families=True),
    Case(model="gpt2-xl", cluster="uneven-6", planner="best", families=True),
    Case(model="resnet152", cluster="random-8", planner="best", families=True),
    Case(model="transformer-big", cluster="uneven-6", planner="best", families=True),
    Case(model="vgg19", cluster="2x2-10g", planner="best", families=True),
    Case(model="bert-large", cluster="4x2-10g", planner="best", families=True),
    Case(model="vgg19", cluster="4x2-10g", planner="best", families=True),
    Case(model="bert-large", cluster="2x2-10g", planner="zb-v"),
    Case(model="bert-48", cluster="2x2-10g", planner="interleaved-1f1b"),
    Case(model="xlnet-large", cluster="2x2-10g", planner="zb-h1"),
]
"""Several stages a device, backwards cut in two."""

SHARED = [
    Case(model="vgg19", cluster="2x4-card", planner="best", blind=True),
    Case(model="vgg19", cluster="2x4-card", planner="pipedream", blind=True),
    Case(model="resnet152", cluster="2x4-card", planner="dapple", blind=True),
    Case(model="vgg19", cluster="4x2-card", planner="best", blind=True),
    Case(model="vgg19", cluster="4x2-card", planner="pipedream", blind=True),
    Case(model="resnet152", cluster="4x2-card", planner="best", blind=True),
    Case(model="resnet152", cluster="4x2-card", planner="spp", blind=True),
]
"""The cards make these slower by a fifth to nearly three times."""

PLANNERS = [
    Case(model=model, cluster=cluster, planner=planner)
    for cluster, model, planner in product(
        ("4x2-10g", "2x4-card", "4x2-card"),
        ("bert-large", "vgg19"),
        ("best", "spp", "dapple", "pipedream", "gpipe", "data-parallel"),
    )
]


def cluster_named(name: str) -> Cluster:
    found = CLUSTERS[name] if name in CLUSTERS else zoo.cluster(name)
    # Times are compared, not what fits.
    devices = tuple(replace(device, memory_gb=None) for device in found.devices)
    return replace(found, devices=devices)


def make_plan(case: Case) -> Plan:
    cluster = cluster_named(case.cluster)
    known = replace(cluster, uplink_gb_per_s=None, shared=()) if case.blind else cluster
    options: dict[str, Any] = {"positions": 1, "split_backward": False}
    if case.families:
        options = {"positions": "auto", "split_backward": True}
    made = plan(zoo.model(case.model), known, case.microbatches, case.planner, **options)
    if case.blind:
        made = replace(made, cluster=cluster, predicted=None)
    if case.recompute:
        stages = tuple(replace(stage, recompute=True) for stage in made.stages)
        made = replace(made, stages=stages, predicted=None)
    return made


# ------------------------------------------------------------------- rules of shared links


def _rule(
    sizes: list[float], stages: list[tuple[str, ...]], *, parameters: float = 0.0, num: int = 2
) -> Plan:
    """A plan of one layer a stage on two hosts, whose transfers last longer than its blocks."""
    names = ["a0", "a1", "a2", "b0", "b1", "b2"]
    devices = tuple(Device(name=name, host=name[0]) for name in names)
    rates = tuple(tuple(4.0 if u[0] == v[0] else 1.0 for v in names) for u in names)
    cluster = Cluster(
        name="two hosts", devices=devices, bandwidth_gb_per_s=rates, uplink_gb_per_s=1.0
    )
    layers = tuple(
        LayerProfile(
            name=f"layer{index}",
            forward_ms=20.0,
            backward_ms=40.0,
            output_bytes=size,
            parameter_bytes=parameters,
        )
        for index, size in enumerate(sizes)
    )
    model = ModelProfile(name="rule", microbatch_size=12, layers=layers)
    placed = tuple(
        Stage(layers=range(index, index + 1), devices=tuple(names.index(d) for d in where))
        for index, where in enumerate(stages)
    )
    run = run_pe(CostModel(model, cluster).pipeline_costs(placed), num)
    return Plan(
        model=model,
        cluster=cluster,
        microbatches=num,
        stages=placed,
        schedule=Schedule.from_codes(run.order_SM2),
        planner="by hand",
    )


RULES = {
    "four pairs over one card": _rule([80e6, 1e6], [("a0", "a1"), ("b0", "b1")], num=1),
    "an all-reduce beside a transfer": _rule(
        [60e6, 1e6], [("b2",), ("a0", "b0")], parameters=60e6, num=1
    ),
    "three transfers of different size": _rule(
        [90e6, 1e6, 60e6, 1e6, 30e6, 1e6],
        [("a0",), ("b0",), ("a1",), ("b1",), ("a2",), ("b2",)],
        num=4,
    ),
}
