r"""Trains while devices or nodes are lost or come, and continues under a new plan.

One node loses a device: after the fifth step, rank 1 notes that its device is lost, and dies::

    LOSE_AT=5:1 torchrun --nproc-per-node 3 --max-restarts 2 examples/elastic/train.py

Two to three nodes: start this on each of them. Kill one of the agents with its ranks, and start it
again later::

    STEPS=300 PAUSE_S=0.5 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2:3 \
        --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id text \
        --max-restarts 3 examples/elastic/train.py

In both cases the other ranks end within seconds. torchrun starts all that are left again. Rank 0
plans for their devices. The new plan has other cuts and replicas, and continues from the newest
checkpoint of the old one. A rank whose device is lost stays idle. (Where devices really fail, your
monitoring writes the note.)

- CHECKPOINTS is a folder that all nodes see.
- The variable TORCH_... gives each start a store of its own. Without it, torch 2.13's agents keep
  using the first store. That store may have ended with its node, and a new node does not know it.
- HOST has to stay. Its agent holds the rendezvous, and all nodes end without it. If no node is sure
  to stay, keep the rendezvous in etcd (`--rdzv-backend etcd-v2`; we have not tried that).
- For gloo, the name of each host has to resolve to an address that the others can reach.
- torchrun gives up a node after 15 s without a sign of life. Then it waits 30 s for others to come.
  `--rdzv-conf keep_alive_interval=2,last_call_timeout=5` shortens that to 6 s and 5 s.
- Each loss uses up at most one of the restarts of each node that stays.
"""

import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from text_model import build_model, loss_fn, make_batch

import pipeplan as pp
from pipeplan import measure
from pipeplan.runtime import Pipeline, join_ranks

ROWS, MICROBATCHES, SAVE_EVERY = 8, 4, 2
STEPS = int(os.environ.get("STEPS", "10"))
PAUSE_S = float(
    os.environ.get("PAUSE_S", "0")
)  # between steps, so that there is time to kill a node
FOLDER = Path(os.environ.get("CHECKPOINTS", "checkpoints"))


def plan_for(model: torch.nn.Module, ranks: list[int]) -> pp.Plan:
    """A plan for the devices of these ranks."""
    inputs, targets = make_batch(0, ROWS)
    profile = measure.profile(model, inputs, loss_fn=loss_fn, targets=targets)
    row = (0.02,) * len(ranks)  # GB/s: slow enough that cutting the model pays
    devices = tuple(pp.Device(name=f"device{rank}") for rank in ranks)
    cluster = pp.Cluster(name="left", devices=devices, bandwidth_gb_per_s=(row,) * len(ranks))
    return pp.plan(profile, cluster, microbatches=MICROBATCHES)


def plan_together(model: torch.nn.Module, *, is_lost: bool) -> pp.Plan:
    """Rank 0's plan for all devices that are not lost. Only rank 0 times, so that all agree."""
    lost, plans = [False] * dist.get_world_size(), [None]
    dist.all_gather_object(lost, is_lost)
    if dist.get_rank() == 0:
        plans = [plan_for(model, [rank for rank, gone in enumerate(lost) if not gone])]
    dist.broadcast_object_list(plans)
    return plans[0]


def train(pipeline: Pipeline, note: Path) -> None:
    """Continue from the newest checkpoint. Any plan may have saved it."""
    pipeline.load(FOLDER)
    rank, is_lost = pipeline.rank, note.exists()
    if rank == 0:
        plan = pipeline.plan
        shape = ", ".join(f"{len(s.layers)} layers x {s.num_replicas}" for s in plan.stages)
        where = f"on {len(plan.cluster.devices)} devices"
        print(f"plan: {shape} {where}; after step {pipeline.num_steps}", flush=True)
    while pipeline.num_steps < STEPS:
        loss = pipeline.step(*make_batch(pipeline.num_steps, ROWS * MICROBATCHES))
        if rank == 0:
            print(f"step {pipeline.num_steps:3d}  loss {loss:.5f}", flush=True)
        if pipeline.num_steps % SAVE_EVERY == 0:
            pipeline.save(FOLDER)
        if not is_lost and os.environ.get("LOSE_AT") == f"{pipeline.num_steps}:{rank}":
            note.touch()
            os.kill(os.getpid(), 9)
        time.sleep(PAUSE_S)


def main() -> None:
    torch.set_num_threads(1)
    join_ranks()
    model, rank = build_model(), dist.get_rank()
    note = FOLDER / f"lost.{socket.gethostname()}.{os.environ['LOCAL_RANK']}"
    plan = plan_together(model, is_lost=note.exists())
    with Pipeline(
        plan,
        model,
        loss_fn,
        lambda found: torch.optim.AdamW(found, lr=3e-3),
        device_name=None if note.exists() else f"device{rank}",  # ranks change from start to start
    ) as pipeline:
        train(pipeline, note)
    dist.barrier()  # rank 0 may hold the store, so nobody leaves before all are done
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
