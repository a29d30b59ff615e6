"""Training that goes on with whatever devices are left.

    torchrun --nnodes 1:4 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d \
        --rdzv-endpoint HOST:29400 examples/elastic/train.py

Every start of the ranks plans for as many devices as there are, and goes on from the newest
checkpoint: if a node is lost, torchrun starts the others again, with fewer ranks, and the new plan
takes up what the old one has saved. On one machine, `restart.py` shows the same.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from text_model import build_model, loss_fn, make_batch

import pipeplan as pp
from pipeplan.runtime import Pipeline
from pipeplan.splitting import profile_layers

ROWS, MICROBATCHES = 8, 4
STEPS = int(os.environ.get("STEPS", "12"))
FOLDER = os.environ.get("CHECKPOINTS", "checkpoints")
SAVE_EVERY = 3


def make_plan(model: torch.nn.Module) -> pp.Plan:
    """The same plan on every rank, for the devices that are there now."""
    plans = [None]
    if dist.get_rank() == 0:
        inputs, targets = make_batch(0, ROWS)
        profile = profile_layers(model, inputs, loss_fn=loss_fn, targets=targets)
        host = pp.HostGroup(devices=dist.get_world_size(), bandwidth_gb_per_s=1.0)
        plans = [pp.plan(profile, pp.expand_hosts("left", [host]), microbatches=MICROBATCHES)]
    dist.broadcast_object_list(plans)
    return plans[0]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = build_model()
    plan = make_plan(model)
    # Devices are names only here: each rank is the plan's device of its number.
    name = plan.cluster.devices[dist.get_rank()].name
    with Pipeline(
        plan, model, loss_fn, lambda found: torch.optim.AdamW(found, lr=3e-3), device_name=name
    ) as pipeline:
        pipeline.load(FOLDER)
        if pipeline.rank == 0:
            shape = " ".join(f"{len(s.layers)}x{s.num_replicas}" for s in plan.stages)
            print(f"{dist.get_world_size()} ranks, stages {shape}, step {pipeline.num_steps}")
        while pipeline.num_steps < STEPS:
            loss = pipeline.step(*make_batch(pipeline.num_steps, ROWS * MICROBATCHES))
            if pipeline.rank == 0:
                print(f"step {pipeline.num_steps:3d}  loss {loss:.4f}", flush=True)
            if pipeline.num_steps % SAVE_EVERY == 0:
                pipeline.save(FOLDER)
            lost = os.environ.get("LOSE_AT")  # "step:rank", to try it out
            if lost == f"{pipeline.num_steps}:{pipeline.rank}" and first_start():
                os.kill(os.getpid(), 9)
    dist.destroy_process_group()


def first_start() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


if __name__ == "__main__":
    main()
