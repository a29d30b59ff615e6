"""Training that loses a device and goes on without it, under a new plan.

    LOSE_AT=5:1 torchrun --nproc-per-node 3 --max-restarts 2 examples/elastic/train.py

After the fifth step rank 1 notes that its device is lost and dies. The other ranks end within
seconds, torchrun starts all ranks again, and rank 0 plans for the devices that are left: the new
plan has other cuts and fewer replicas, and takes up the checkpoint that the old one has saved.
The rank of the lost device stays idle. (Where devices really fail, the note comes from whatever
watches over them.)
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from text_model import build_model, loss_fn, make_batch

import pipeplan as pp
from pipeplan.runtime import Pipeline, join_ranks
from pipeplan.splitting import profile_layers

ROWS, MICROBATCHES, SAVE_EVERY = 8, 4, 2
STEPS = int(os.environ.get("STEPS", "10"))
FOLDER = Path(os.environ.get("CHECKPOINTS", "checkpoints"))


def plan_for(model: torch.nn.Module, ranks: list[int]) -> pp.Plan:
    """A plan for the devices of these ranks."""
    inputs, targets = make_batch(0, ROWS)
    profile = profile_layers(model, inputs, loss_fn=loss_fn, targets=targets)
    row = (0.02,) * len(ranks)  # GB/s: slow enough that cutting the model pays
    devices = tuple(pp.Device(name=f"device{rank}") for rank in ranks)
    cluster = pp.Cluster(name="left", devices=devices, bandwidth_gb_per_s=(row,) * len(ranks))
    return pp.plan(profile, cluster, microbatches=MICROBATCHES, runnable=True)


def main() -> None:
    torch.set_num_threads(1)
    join_ranks()
    rank, model, plans = dist.get_rank(), build_model(), [None]
    if rank == 0:
        lost = {int(note.suffix[1:]) for note in FOLDER.glob("lost.*")}
        plans = [plan_for(model, [r for r in range(dist.get_world_size()) if r not in lost])]
    dist.broadcast_object_list(plans)
    plan, own = plans[0], f"device{rank}"
    known = own in {device.name for device in plan.cluster.devices}
    with Pipeline(
        plan,
        model,
        loss_fn,
        lambda found: torch.optim.AdamW(found, lr=3e-3),
        device_name=own if known else None,
    ) as pipeline:
        pipeline.load(FOLDER)
        if rank == 0:
            shape = ", ".join(f"{len(s.layers)} layers x {s.num_replicas}" for s in plan.stages)
            print(f"plan: {shape}; after step {pipeline.num_steps}", flush=True)
        while pipeline.num_steps < STEPS:
            loss = pipeline.step(*make_batch(pipeline.num_steps, ROWS * MICROBATCHES))
            if rank == 0:
                print(f"step {pipeline.num_steps:3d}  loss {loss:.4f}", flush=True)
            if pipeline.num_steps % SAVE_EVERY == 0:
                pipeline.save(FOLDER)
            if known and os.environ.get("LOSE_AT") == f"{pipeline.num_steps}:{rank}":
                (FOLDER / f"lost.{rank}").touch()
                os.kill(os.getpid(), 9)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
