"""Runs exported schedules on torch's own runtime with gloo: one process of several.

Each rank gets a JSON file with the cases: CSV, cuts, replicas, microbatches. It prints one line for
each case: the largest difference between its gradients and those of a single process. `chain` has
the group of each stage; a group is a rank of the pipeline, or as many as there are replicas.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _PipelineScheduleRuntime

WIDTH = 6
RUNTIMES = {"runtime": _PipelineScheduleRuntime, "columns": PipelineScheduleMulti}


def layers_of(num_layers: int) -> list[torch.nn.Module]:
    generator = torch.Generator().manual_seed(num_layers)
    layers = []
    for _ in range(num_layers):
        linear = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        layers.append(torch.nn.Sequential(linear, torch.nn.Tanh()))
    return layers


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def batch_of(case: dict) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(case["microbatches"])
    rows = case["microbatches"] * case["replicas"] * case["samples"]
    return tuple(torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in "xy")


def expected_gradients(case: dict) -> list[list[torch.Tensor]]:
    layers = layers_of(case["cuts"][-1])
    inputs, targets = batch_of(case)
    mean_loss(torch.nn.Sequential(*layers)(inputs), targets).backward()
    return [[p.grad for p in layer.parameters()] for layer in layers]


def make_part(case, stage, num_stages, layers, group) -> PipelineStage:
    first, end = case["cuts"][stage], case["cuts"][stage + 1]
    shape = (case["samples"], WIDTH)
    given = torch.zeros(shape, dtype=torch.float64, requires_grad=stage > 0)
    made = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    return PipelineStage(
        torch.nn.Sequential(*layers[first:end]),
        stage,
        num_stages,
        torch.device("cpu"),
        input_args=(given,),
        output_args=(made,),
        group=group,
    )


def run(case: dict, rank: int) -> float:
    """The largest difference on this rank; 0 if it has nothing to do."""
    num_stages, replicas = len(case["cuts"]) - 1, case["replicas"]
    chain = case.get("chain", list(range(num_stages)))
    num_groups = max(chain) + 1
    pipelines = [
        dist.new_group([group * replicas + r for group in range(num_groups)])
        for r in range(replicas)
    ]
    copies = [
        dist.new_group(list(range(group * replicas, (group + 1) * replicas)))
        for group in range(num_groups)
    ]
    if rank >= num_groups * replicas:
        return 0.0
    own, replica = divmod(rank, replicas)
    stages = [stage for stage, group in enumerate(chain) if group == own]
    layers = layers_of(case["cuts"][-1])
    parts = [make_part(case, stage, num_stages, layers, pipelines[replica]) for stage in stages]
    schedule = RUNTIMES[case["runtime"]](parts, case["microbatches"], loss_fn=mean_loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(case["csv"])
        schedule._load_csv(str(path))
    rows = torch.arange(case["microbatches"] * case["replicas"] * case["samples"])
    mine = rows.view(case["microbatches"], replicas, case["samples"])[:, replica].flatten()
    inputs, targets = batch_of(case)
    arguments = (inputs[mine],) if 0 in stages else ()
    target = targets[mine] if num_stages - 1 in stages else None
    schedule.step(*arguments, target=target)
    difference, expected = 0.0, expected_gradients(case)
    held = [n for s in stages for n in range(case["cuts"][s], case["cuts"][s + 1])]
    for number in held:
        for parameter, gradient in zip(layers[number].parameters(), expected[number], strict=True):
            dist.all_reduce(parameter.grad, group=copies[own])
            difference = max(difference, float((parameter.grad / replicas - gradient).abs().max()))
    return difference


def main() -> None:
    cases, store, rank, world_size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    for case in json.loads(Path(cases).read_text()):
        print(run(case, rank), flush=True)  # noqa: T201
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
