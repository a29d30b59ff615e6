"""One line in a script: measures, plans, trains; the next start uses the same plan."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import pipeplan as pp  # noqa: E402
from instances import flat_cluster  # noqa: E402
from pipeplan.errors import InfeasibleError, PipeplanError  # noqa: E402
from pipeplan.measure import auto as auto_module  # noqa: E402
from pipeplan.runtime import auto  # noqa: E402
from runtime.workers import run_ranks  # noqa: E402

RANKS, ROWS, WIDTH = 2, 4, 8


def build(width=WIDTH):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def batch_of(rows, width=WIDTH):
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(rows, width, generator=generator)
    return data, torch.tanh(data)


def measured_links(memory_gb=None):
    """What measuring would find between these ranks, without measuring."""

    def measure(**_):
        cluster = flat_cluster(dist.get_world_size(), 1.0)
        devices = tuple(replace(device, memory_gb=memory_gb) for device in cluster.devices)
        return SimpleNamespace(cluster=replace(cluster, devices=devices))

    return measure


def start(folder, *, model=None, memory_gb=None, **options):
    """What one start of a script does; returns the plan and the losses."""
    auto_module.measure_links = measured_links(memory_gb)
    data, targets = batch_of(ROWS)
    options = {"global_batch": 16, "repeats": 1, "folder": folder, **options}
    pipeline = auto(
        model or build(), nn.functional.mse_loss, sgd, data, example_targets=targets, **options
    )
    with pipeline:
        losses = [pipeline.step(*batch_of(16)) for _ in range(3)]
    return pipeline.plan, losses


def two_starts(rank, folder):
    """The second start must not measure again; a third one with another batch plans anew."""
    plan, losses = start(folder)
    auto_module.measure_profile = None
    again, same_losses = start(folder)
    other, _ = start(folder, global_batch=8)
    return plan, losses, again, same_losses, other


def test_measures_once_and_trains(tmp_path, capfd):
    folder = tmp_path / "kept"
    found = run_ranks(RANKS, two_starts, folder)
    plan, losses, again, same_losses, other = found[0]
    for others in found[1:]:
        assert [each.stages for each in others[::2]] == [plan.stages, again.stages, other.stages]
        assert others[1] == losses
    assert plan.microbatches * plan.model.microbatch_size == 16
    assert other.microbatches * other.model.microbatch_size == 8
    assert again.stages == plan.stages
    assert losses == same_losses
    assert losses[0] > losses[1] > losses[2]
    model = pp.read_model(folder / "model.json")
    assert [layer.name for layer in model.layers] == ["0", "1", "2", "3"]
    assert [times.microbatch_size for times in model.layers[0].at] == [1]
    assert pp.read_cluster(folder / "cluster.json").num_devices == RANKS
    kept = pp.read_plan(folder / "plan.json")
    assert kept.stages == other.stages
    err = capfd.readouterr().err
    assert err.count("measures the model") == 1
    assert err.count("uses the plan in") == 1
    assert err.count("plans a batch of") == 2


def starts_that_change(rank, folder):
    """Another model is measured again; so is a damaged folder."""
    start(folder)
    first = (folder / "auto.json").read_text()
    start(folder, model=build()[:3])
    second = (folder / "auto.json").read_text()
    dist.barrier()
    if rank == 0:
        (folder / "cluster.json").write_text("{")
        (folder / "plan.json").write_text("{")
    dist.barrier()
    plan, _ = start(folder, model=build()[:3])
    return first, second, plan.model.num_layers


def test_other_models_and_damaged_files_are_measured_again(tmp_path):
    folder = tmp_path / "kept"
    for first, second, num_layers in run_ranks(RANKS, starts_that_change, folder):
        assert json.loads(first)["measured"] != json.loads(second)["measured"]
        assert json.loads(first)["planned"] == json.loads(second)["planned"]
        assert num_layers == 3
    assert pp.read_cluster(folder / "cluster.json").num_devices == RANKS


def errors(rank, folder):
    """Every rank raises, whoever has the problem."""
    found = []

    def attempt(**options):
        try:
            start(folder, **options)
        except PipeplanError as error:
            found.append((type(error).__name__, str(error)))

    attempt(model=build(WIDTH + rank))
    attempt(global_batch=16 + rank)
    broken = build()
    if rank == 1:
        nn.init.constant_(broken[0][0].weight, float("nan"))
    attempt(model=broken)
    attempt(model=build(WIDTH + 1))
    attempt(memory_gb=1e-6)
    return found


def test_all_ranks_raise_the_same(tmp_path):
    found = run_ranks(RANKS, errors, tmp_path / "kept")
    assert [text for _, text in found[0]] == [text for _, text in found[1]]
    differs, other_batch, broken, wrong_batch, no_room = found[0]
    assert differs[1].startswith("model: that of rank 1 differs from that of rank 0")
    assert other_batch[1].startswith("planning: that of rank 1")
    assert broken[1].startswith("rank 1: model: the output of its layer '0' holds NaN")
    assert wrong_batch[1].startswith("batch: the model cannot take it")
    assert no_room[0] in (InfeasibleError.__name__, "NoPlanError")
    assert not (tmp_path / "kept" / "auto.json").exists()


def speeds(rank, folder):
    totals = [(4.0, 1.0, 2.0)[rank]]
    profile = pp.ModelProfile(
        name="timed",
        microbatch_size=4,
        layers=tuple(
            pp.LayerProfile(
                name=str(i), forward_ms=totals[0], backward_ms=0, output_bytes=4, parameter_bytes=4
            )
            for i in range(4)
        ),
    )
    auto_module.measure_profile = lambda *_, **__: profile
    auto_module.measure_links = measured_links()
    plan, _ = start(folder)
    return [device.speed for device in plan.cluster.devices], plan.model.layers[0].forward_ms


def test_slow_ranks_are_slow_devices(tmp_path):
    """The middle one is the reference: twice and half as fast are the others."""
    for found in run_ranks(3, speeds, tmp_path / "kept"):
        assert found[0] == [0.5, 2.0, 1.0]
