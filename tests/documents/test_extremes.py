"""Problems at the corners of the magnitudes: planned, written, read, checked, simulated."""

import math
import random

import pytest

import pipeplan as pp
from pipeplan.documents import files
from pipeplan.errors import InfeasibleError
from pipeplan.planning.baselines import BASELINES
from pipeplan.planning.door import plan

NUM_PROBLEMS = 100
PLANNERS = ("best", "spp", *BASELINES)
CORNERS = {
    "forward_ms": (0.0, 1e-6, 1.0, 1e12),
    "backward_ms": (0.0, 1e-6, 1.0, 1e12),
    "output_bytes": (0.0, 1.0, 1e6, 1e18),
    "gradient_bytes": (0.0, 1.0, 1e6, 1e18),
    "parameter_bytes": (0.0, 1.0, 1e6, 1e18),
    "activation_bytes": (0.0, 1.0, 1e6, 1e18),
    "bandwidth_gb_per_s": (1e-6, 1.0, 1e9),
    "latency_us": (0.0, 1e-3, 10.0, 1e12),
    "speed": (1e-3, 1.0, 1e3),
    "memory_gb": (None, 1e9),
}
LAYER_FIELDS = tuple(CORNERS)[:6]


def extreme_problem(index: int) -> tuple[pp.ModelProfile, pp.Cluster, int]:
    """Few layers and devices whose every number is at a limit, or one of all numbers alike."""
    rng = random.Random(index)
    alike = index % 2 == 0  # all layers and all devices equal, at one corner of the table
    one_of_each = {name: rng.choice(values) for name, values in CORNERS.items()}

    def pick(name: str) -> float:
        return one_of_each[name] if alike else rng.choice(CORNERS[name])

    microbatches = rng.choice([1, 2, 7, 65_536]) if index % 10 == 0 else rng.choice([1, 2, 7])
    num_layers = rng.randint(1, 2 if microbatches > 1000 else 5)
    num_devices = rng.randint(1, 2 if microbatches > 1000 else 5)
    layers = tuple(
        pp.LayerProfile(name=str(index), **{name: pick(name) for name in LAYER_FIELDS})
        for index in range(num_layers)
    )
    model = pp.ModelProfile(
        name="extreme",
        microbatch_size=rng.choice([1, 10**9]),
        input_bytes=pick("output_bytes"),
        optimizer_bytes_per_parameter_byte=rng.choice([0.0, 1e3]),
        layers=layers,
    )

    def matrix(name: str) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(pick(name) for _ in range(num_devices)) for _ in range(num_devices))

    cluster = pp.Cluster(
        name="extreme",
        devices=tuple(
            pp.Device(name=str(u), speed=pick("speed"), memory_gb=pick("memory_gb"))
            for u in range(num_devices)
        ),
        bandwidth_gb_per_s=matrix("bandwidth_gb_per_s"),
        latency_us=matrix("latency_us"),
        duplex=rng.choice(list(pp.Duplex)),
    )
    return model, cluster, microbatches


@pytest.mark.parametrize("index", range(NUM_PROBLEMS))
def test_extreme_problems_are_planned(tmp_path, index):
    model, cluster, microbatches = extreme_problem(index)
    files.write_model(model, tmp_path / "m.json")
    files.write_cluster(cluster, tmp_path / "c.json")
    assert files.read_model(tmp_path / "m.json") == model
    assert files.read_cluster(tmp_path / "c.json") == cluster
    planner = PLANNERS[index % len(PLANNERS)]
    try:
        made = plan(model, cluster, microbatches, planner, effort=0.05, seed=index)
    except InfeasibleError:
        return
    files.write_plan(made, tmp_path / "p.json")
    again = files.read_plan(tmp_path / "p.json")
    assert again == made
    assert math.isfinite(made.iteration_ms)
    verdict = pp.check(again)
    assert verdict.ok, (planner, verdict.errors[:3])
    assert pp.simulate(again).iteration_ms == pytest.approx(made.iteration_ms, rel=1e-9)
    bound = made.bound
    if bound is not None:
        assert math.isfinite(bound.lower_bound_ms)
        assert bound.lower_bound_ms <= made.iteration_ms * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_any_seed_of_64_bits_is_taken(seed):
    model, cluster, _ = extreme_problem(1)
    assert plan(model, cluster, 4, "best", effort=0.05, seed=seed).seed == seed


def test_sums_of_merged_layers_may_exceed_the_limits():
    """`best` merges layers; five of 1e18 bytes are more than one layer may have."""
    layer = {"forward_ms": 0.0, "backward_ms": 0.0, "output_bytes": 1.0, "parameter_bytes": 0.0}
    model = pp.ModelProfile(
        name="m",
        microbatch_size=1,
        layers=tuple(
            pp.LayerProfile(name=str(index), **{**layer, "activation_bytes": 1e18})
            for index in range(5)
        ),
    )
    cluster = pp.expand_hosts("c", [pp.HostGroup(devices=2, bandwidth_gb_per_s=1.0)])
    assert pp.check(plan(model, cluster, 4, "best", effort=0.05)).ok


@pytest.mark.parametrize("microbatches", [2, 7])
def test_blocks_as_short_as_an_instant(microbatches):
    """1e-6 ms on a device of speed 1e3 takes 1e-9 ms, the length of one instant."""
    layer = pp.LayerProfile(
        name="l", forward_ms=1e-6, backward_ms=1e-6, output_bytes=0, parameter_bytes=0
    )
    model = pp.ModelProfile(name="m", microbatch_size=1, layers=(layer,))
    device = pp.Device(name="d", speed=1e3)
    cluster = pp.Cluster(name="c", devices=(device,), bandwidth_gb_per_s=((0.0,),))
    verdict = pp.check(plan(model, cluster, microbatches, "best", effort=0.05))
    assert verdict.ok, verdict.errors
