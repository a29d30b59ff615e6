"""Plans to draw: one by hand, random ones, and one whose every name is an attack."""

import random

import pytest

from instances import flat_cluster, random_cluster, random_model, random_schedule, random_stages
from pipeplan.cluster import Cluster, Device
from pipeplan.pipeline import Block, Kind, Plan, Schedule, Stage
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.report.analysis.plan_analysis import PlanAnalysis, analyse

HOSTILE_NAMES = (
    "</script><script>window.hacked=1</script>",
    '<img src=x onerror="window.hacked=1">',
    "'\"><svg onload=window.hacked=1>",
    "{{plan}} ${alert(1)} \u2028 \x00 \x1b[31m ]]> <!--",
    "&lt;b&gt; &amp;",
    "名前 \U0001f600",
)


def schedule_of(text: str) -> Schedule:
    """A schedule as it is drawn: a line a stage."""
    return Schedule(
        tuple(
            tuple(Block(Kind(word[0]), stage, int(word[1:])) for word in line.split())
            for stage, line in enumerate(text.strip().splitlines())
        )
    )


def layer(name: str, **numbers: float) -> LayerProfile:
    return LayerProfile(**{"name": name, "output_bytes": 0, "parameter_bytes": 0, **numbers})


@pytest.fixture(scope="session")
def drawn_plan() -> Plan:
    # Stage 0 has two replicas: F takes 1 there, B takes 2, its all-reduce 3. A transfer takes 1.
    #
    #   time     0  1  2  3  4  5  6  7  8  9  10 11 12 13
    #   stage 0  F0 F1 .  .  .  .  B0 B0 .  B1 B1 R  R  R
    #   there    .  f0 f1
    #   back     .  .  .  .  .  b0 .  .  b1
    #   stage 1  .  .  F0 B0 B0 F1 B1 B1
    model = ModelProfile(
        name="two layers",
        microbatch_size=4,
        layers=(
            layer(
                "a",
                forward_ms=2,
                backward_ms=4,
                output_bytes=2e6,
                parameter_bytes=3e6,
                activation_bytes=2e9,
            ),
            layer("b", forward_ms=1, backward_ms=2, activation_bytes=5e9),
        ),
    )
    return Plan(
        model=model,
        cluster=flat_cluster(4),
        microbatches=2,
        stages=(
            Stage(layers=range(1), devices=(0, 2)),
            Stage(layers=range(1, 2), devices=(1,)),
        ),
        schedule=schedule_of("F0 F1 B0 B1\nF0 B0 F1 B1"),
        planner="hand",
        version="1.2.3",
    )


@pytest.fixture(scope="session")
def analysis(drawn_plan) -> PlanAnalysis:
    return analyse(drawn_plan)


def random_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    num_layers, num_devices = rng.randint(1, 7), rng.randint(1, 7)
    stages = random_stages(rng, num_layers, num_devices, shares=True)
    num_microbatches = rng.randint(1, 9)
    return Plan(
        model=random_model(rng, num_layers),
        cluster=random_cluster(rng, num_devices),
        microbatches=num_microbatches,
        stages=stages,
        schedule=random_schedule(rng, len(stages), num_microbatches),
        planner="random",
    )


@pytest.fixture(scope="session")
def random_analyses() -> list[PlanAnalysis]:
    return [analyse(random_plan(seed)) for seed in range(150)]


@pytest.fixture(scope="session")
def hostile_plan() -> Plan:
    """Names of everything that a file can name, each an attack of another kind."""
    names = HOSTILE_NAMES
    model = ModelProfile(
        name=names[0],
        microbatch_size=1,
        layers=tuple(layer(name, forward_ms=1, backward_ms=2) for name in names),
    )
    count = len(names)
    row = (1.0,) * count
    return Plan(
        model=model,
        cluster=Cluster(
            name=names[1],
            devices=tuple(Device(name=name, host=name[::-1]) for name in names),
            bandwidth_gb_per_s=(row,) * count,
        ),
        microbatches=1,
        stages=tuple(Stage(layers=range(n, n + 1), devices=(n,)) for n in range(count)),
        schedule=schedule_of("F0 B0\n" * count),
        planner=names[0],
        options={names[2]: names[0]},
        version=names[1],
    )
