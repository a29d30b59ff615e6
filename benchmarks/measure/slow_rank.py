"""One of three ranks computes half as fast as planned: what calibrating finds, and what it wins.

torchrun --nproc-per-node 3 benchmarks/measure/slow_rank.py FOLDER

Layers wait instead of computing, so that they last as long on a machine with few processors. The
folder gets old.plan.json, trace.json and new.plan.json.
"""

import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pipeplan as pp
from pipeplan.calibration.door import calibrate
from pipeplan.calibration.measured_run import read_run
from pipeplan.runtime import Pipeline, join_ranks

LAYERS, MICROBATCHES, WIDTH, ROWS, STEPS = 6, 8, 4, 2, 5
FORWARD_S, BACKWARD_S = 0.02, 0.04
SLOW_RANK, SLOWER = 1, 2.0
VARIABLE = "SLOW_RANK_FACTOR"


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S * float(os.environ[VARIABLE]))
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_S * float(os.environ[VARIABLE]))
        return gradient


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Waits.apply(self.linear(x))


def train(plan: pp.Plan, trace: Path | None = None) -> float:
    """The median time of a step, without the first."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    data = torch.ones(ROWS * MICROBATCHES, WIDTH)
    steps_ms = []
    with Pipeline(
        plan, model, nn.functional.mse_loss, lambda found: torch.optim.SGD(found, lr=0.0)
    ) as pipeline:
        for _ in range(STEPS):
            dist.barrier()
            pipeline.step(data, data)
            steps_ms.append(pipeline.iteration_ms)
        if trace is not None:
            pipeline.write_trace(trace)
    return median(steps_ms[1:])


def make_plan() -> pp.Plan:
    layer = {
        "forward_ms": 1e3 * FORWARD_S,
        "backward_ms": 1e3 * BACKWARD_S,
        "output_bytes": 4.0 * ROWS * WIDTH,
        "parameter_bytes": 4.0 * WIDTH * (WIDTH + 1),
    }
    layers = tuple(pp.LayerProfile(name=str(i), **layer) for i in range(LAYERS))
    model = pp.ModelProfile(name="waits", microbatch_size=ROWS, layers=layers)
    host = pp.HostGroup(devices=3, bandwidth_gb_per_s=1.0)
    return pp.plan(
        model,
        pp.expand_hosts("here", [host]),
        MICROBATCHES,
        stages=3,
        positions=1,
        split_backward=False,
    )


def main() -> None:
    folder = Path(sys.argv[1])
    join_ranks()
    os.environ[VARIABLE] = str(SLOWER if dist.get_rank() == SLOW_RANK else 1.0)
    plan = make_plan()
    old_ms = train(plan, folder / "trace.json")
    made: list[Any] = [None]
    if dist.get_rank() == 0:
        pp.write_plan(plan, folder / "old.plan.json")
        found = calibrate(plan, read_run(folder / "trace.json", plan))
        pp.write_plan(found.replanned or found.kept, folder / "new.plan.json")
        made = [found.replanned or found.kept]
        print("; ".join(finding.words for finding in found.findings))
    dist.broadcast_object_list(made)
    new_ms = train(made[0])
    if dist.get_rank() == 0:
        print(
            f"old plan: predicted {plan.iteration_ms:.0f} ms, measured {old_ms:.0f} ms; new plan:"
            f" predicted {made[0].iteration_ms:.0f} ms, measured {new_ms:.0f} ms"
            f" ({100 * (1 - new_ms / old_ms):.0f} % less)"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
