"""Measures the time that the runtime adds to the computation, against torch's own runtimes.

Four ranks run over gloo. Against Schedule1F1B they have one stage each and the same even plan, with
layers so small that their time hardly counts. Against DistributedDataParallel (DDP) they are four
replicas of one stage. All run in the same processes, in turn, so that the load is the same. CPU
time is that of all threads of all ranks, and of their main threads: that varies less with the load.

    python benchmarks/runtime/run.py [--rounds 15] [--width 64] [--json FILE]
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from pipeplan.cluster import Cluster, Device
from pipeplan.cost import CostModel
from pipeplan.pipeline import Plan, Schedule, Stage
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.runtime import Pipeline
from pipeplan.schedules import SCHEDULES

NUM_STAGES = 4
ROWS = 4
FEW, MANY = 8, 32
STEPS_A_ROUND = 10
PORT = int(os.environ.get("PIPEPLAN_BENCHMARK_PORT", "29721"))
DDP_LAYERS, DDP_WIDTH, DDP_ROWS = 8, 384, 64


def make_plan(microbatches: int, num_layers: int = NUM_STAGES, *, replicated: bool = False) -> Plan:
    profile = ModelProfile(
        name="even",
        microbatch_size=DDP_ROWS * NUM_STAGES if replicated else ROWS,
        layers=tuple(
            LayerProfile(
                name=str(i), forward_ms=1, backward_ms=1, output_bytes=1, parameter_bytes=1
            )
            for i in range(num_layers)
        ),
    )
    cluster = Cluster(
        name="local",
        devices=tuple(Device(name=f"d{i}") for i in range(NUM_STAGES)),
        bandwidth_gb_per_s=((10.0,) * NUM_STAGES,) * NUM_STAGES,
    )
    stages = tuple(Stage(layers=range(i, i + 1), devices=(i,)) for i in range(NUM_STAGES))
    if replicated:
        stages = (Stage(layers=range(num_layers), devices=tuple(range(NUM_STAGES))),)
    run = SCHEDULES["1f1b"](CostModel(profile, cluster).pipeline_costs(stages), microbatches)
    return Plan(
        model=profile,
        cluster=cluster,
        microbatches=microbatches,
        stages=stages,
        schedule=Schedule.from_codes(run.order_SM2.tolist()),
        planner="even",
    )


def make_model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(NUM_STAGES)))


def make_optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def ours(microbatches: int, width: int):
    pipeline = Pipeline(
        make_plan(microbatches), make_model(width), nn.functional.mse_loss, make_optimizer
    )
    return pipeline.step, pipeline.close


def theirs(microbatches: int, width: int):
    rank = dist.get_rank()
    module = make_model(width)[rank]
    example = torch.zeros(ROWS, width)
    stage = PipelineStage(
        module,
        rank,
        NUM_STAGES,
        torch.device("cpu"),
        input_args=(example.requires_grad_(rank > 0),),
        output_args=(module(example),),
    )
    schedule = Schedule1F1B(stage, microbatches, loss_fn=nn.functional.mse_loss)
    optimizer = make_optimizer(module.parameters())

    def step(inputs, targets):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        elif rank == NUM_STAGES - 1:
            losses = []
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        optimizer.step()

    return step, lambda: None


def make_ddp_model() -> nn.Sequential:
    torch.manual_seed(0)
    pairs = [nn.Sequential(nn.Linear(DDP_WIDTH, DDP_WIDTH), nn.ReLU()) for _ in range(DDP_LAYERS)]
    return nn.Sequential(*pairs)


def our_replicas():
    plan = make_plan(1, DDP_LAYERS, replicated=True)
    pipeline = Pipeline(plan, make_ddp_model(), nn.functional.mse_loss, make_optimizer)
    return pipeline.step, pipeline.close


def their_replicas():
    model = DistributedDataParallel(make_ddp_model())
    optimizer = make_optimizer(model.parameters())
    rows = slice(dist.get_rank() * DDP_ROWS, (dist.get_rank() + 1) * DDP_ROWS)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss)  # the mean loss of the batch, which our step returns, too
        loss.item()

    return step, lambda: None


def time_steps(step, inputs, targets) -> tuple[float, float, float]:
    """Milliseconds of one step: from barrier to barrier, CPU time of all ranks, of main threads."""
    dist.barrier()
    start_s, cpu_s, main_s = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range(STEPS_A_ROUND):
        step(inputs, targets)
    used = time.process_time() - cpu_s, time.thread_time() - main_s
    used_s = torch.tensor(used, dtype=torch.float64)
    dist.barrier()
    wall_ms = (time.perf_counter() - start_s) / STEPS_A_ROUND * 1e3
    dist.all_reduce(used_s)
    cpu_ms, main_ms = (used_s / STEPS_A_ROUND * 1e3).tolist()
    return wall_ms, cpu_ms, main_ms


def worker(rank: int, rounds: int, width: int, output: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=rank, world_size=NUM_STAGES
    )
    subjects, data, close = {}, {}, []
    for count in (FEW, MANY, 1):
        rows, columns = count * ROWS, width
        makers = (("pipeplan", lambda: ours(count, width)), ("torch", lambda: theirs(count, width)))  # noqa: B023
        if count == 1:
            rows, columns = DDP_ROWS * NUM_STAGES, DDP_WIDTH
            makers = (("pipeplan", our_replicas), ("torch", their_replicas))
        torch.manual_seed(count)  # the same batch on all ranks
        data[count] = torch.randn(rows, columns), torch.randn(rows, columns)
        for name, make in makers:
            subjects[name, count], ending = make()
            close.append(ending)
    for (_, count), step in subjects.items():
        time_steps(step, *data[count])
    times_ms = {key: [] for key in subjects}
    for _ in range(rounds):
        for key, step in subjects.items():
            times_ms[key].append(time_steps(step, *data[key[1]]))
    for ending in close:
        ending()
    if rank == 0:
        Path(output).write_text(json.dumps([[*key, *summary(ms)] for key, ms in times_ms.items()]))
    dist.barrier()
    dist.destroy_process_group()


def summary(times_ms) -> list[float]:
    """Median wall time, shortest wall time, median CPU time, and that of main threads."""
    wall_ms, cpu_ms, main_ms = zip(*times_ms, strict=True)
    return [*(statistics.median(wall_ms), min(wall_ms)), *map(statistics.median, (cpu_ms, main_ms))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    output = Path(options.json or f"/tmp/pipeplan-runtime-{os.getpid()}.json")  # noqa: S108
    mp.spawn(worker, (options.rounds, options.width, str(output)), nprocs=NUM_STAGES)
    rows = json.loads(output.read_text())
    if not options.json:
        output.unlink()
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores")
    for column, title in enumerate(("median", "fastest", "CPU time", "main")):
        table = {(row[0], row[1]): row[2 + column] for row in rows}
        for name in ("pipeplan", "torch"):
            extra = (table[name, MANY] - table[name, FEW]) / (MANY - FEW)
            print(
                f"{title:8} {name:9} {table[name, FEW]:8.2f} ms with {FEW} microbatches,"
                f" {table[name, MANY]:8.2f} ms with {MANY};"
                f" {extra * 1e3 / (2 * NUM_STAGES):7.1f} us a block;"
                f" {table[name, 1]:8.2f} ms with replicas"
            )
        for count in (FEW, MANY, 1):
            ratio = table["pipeplan", count] / table["torch", count]
            other = "DDP" if count == 1 else f"Schedule1F1B with {count} microbatches"
            print(f"{title:8} ratio {ratio:.3f} against {other}")


if __name__ == "__main__":
    main()
