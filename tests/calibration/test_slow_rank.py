"""A real run with one slow rank: it is named with its speed, and the new plan is faster."""

import os
import time
from pathlib import Path
from statistics import median

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from instances import flat_cluster  # noqa: E402
from one_stage import plan  # noqa: E402
from pipeplan.calibration.door import calibrate  # noqa: E402
from pipeplan.calibration.measured_run import read_run  # noqa: E402
from pipeplan.profile import LayerProfile, ModelProfile  # noqa: E402
from pipeplan.runtime import Pipeline  # noqa: E402
from runtime.workers import run_ranks  # noqa: E402

RANKS, LAYERS, MICROBATCHES, WIDTH, ROWS = 3, 6, 6, 4, 2
FORWARD_S, BACKWARD_S = 0.02, 0.04
SLOWER = 2.0
VARIABLE = "TEST_SLOWER"
"""How much slower a process computes; ranks with different globals would be refused."""


class Waits(torch.autograd.Function):
    """Computation that takes no processor, so that it lasts as long on a busy machine."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD_S * float(os.environ[VARIABLE]))
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD_S * float(os.environ[VARIABLE]))
        return gradient


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return Waits.apply(self.linear(x))


def profile():
    return ModelProfile(
        name="waits",
        microbatch_size=ROWS,
        layers=tuple(
            LayerProfile(
                name=str(i),
                forward_ms=1e3 * FORWARD_S,
                backward_ms=1e3 * BACKWARD_S,
                output_bytes=4 * ROWS * WIDTH,
                parameter_bytes=4 * (WIDTH + 1) * WIDTH,
            )
            for i in range(LAYERS)
        ),
    )


def run(rank, plan, trace=None, **options):
    """Train a few steps; the time of the middle one, and a trace."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    data = torch.ones(ROWS * MICROBATCHES, WIDTH)
    os.environ[VARIABLE] = str(SLOWER if rank == 1 else 1.0)
    steps_ms = []
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.0)  # noqa: E731
    with Pipeline(plan, model, nn.functional.mse_loss, sgd, verify="off", **options) as pipeline:
        for _ in range(3):
            dist.barrier()
            pipeline.step(data, data)
            steps_ms.append(pipeline.iteration_ms)
        if trace is not None:
            pipeline.write_trace(trace)
    return median(steps_ms[1:])


def both_plans(rank, folder):
    told = []
    made = [None]
    if rank == 0:
        made = [plan(profile(), flat_cluster(RANKS, 1.0), MICROBATCHES, stages=RANKS)]
    dist.broadcast_object_list(made)
    (old,) = made
    trace = folder / "trace.json"
    old_ms = run(rank, old, trace, replan_after=2, on_replan=told.append)
    found = [None]
    if rank == 0:
        found = [calibrate(old, read_run(trace, old))]
    dist.broadcast_object_list(found)
    new_ms = run(rank, found[0].replanned)
    return old_ms, new_ms, found[0], len(told)


def test_a_slow_rank_is_named_and_planned_around(tmp_path, capfd):
    results = run_ranks(RANKS, both_plans, tmp_path)
    old_ms, new_ms, found, _ = results[0]
    slow = [finding for finding in found.findings if finding.devices == (1,)]
    assert [finding.subject for finding in slow] == ["device"]
    assert found.cluster.devices[1].speed == pytest.approx(1 / SLOWER, rel=0.1)
    for device in (0, 2):
        assert found.cluster.devices[device].speed == pytest.approx(1.0, rel=0.1)
    assert found.replanned.iteration_ms < 0.9 * found.kept.iteration_ms
    assert new_ms < 0.95 * old_ms  # predicted is less; a generous limit
    assert [told for _, _, _, told in results] == [1, 0, 0]
    err = capfd.readouterr().err
    assert "pipeplan: step 2 took" in err
    assert "d1 computes" in err
    assert "pipeplan: A new plan would take" in err
    assert Path(tmp_path / "trace.json").exists()
