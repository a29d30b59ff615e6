"""Plan, then train a small language model: `torchrun --nproc-per-node 4 examples/train_text.py`."""

import sys

import torch
import torch.distributed as dist
from text_model import build_model, loss_fn, make_batch

import pipeplan as pp
from pipeplan import measure
from pipeplan.runtime import Pipeline, join_ranks

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
ROWS, MICROBATCHES = 8, 8

torch.set_num_threads(1)
join_ranks()
model, plans = build_model(), [None]
if dist.get_rank() == 0:  # one rank times and plans, so that all run the same plan
    inputs, targets = make_batch(0, ROWS)
    profile = measure.profile(model, inputs, loss_fn=loss_fn, targets=targets)
    host = pp.HostGroup(devices=dist.get_world_size(), bandwidth_gb_per_s=1.0)
    plans = [pp.plan(profile, pp.expand_hosts("here", [host]), microbatches=MICROBATCHES)]
dist.broadcast_object_list(plans)
plan = plans[0]
with Pipeline(plan, model, loss_fn, lambda found: torch.optim.AdamW(found, lr=3e-3)) as pipeline:
    for step in range(STEPS):
        loss = pipeline.step(*make_batch(step, ROWS * MICROBATCHES))
        if pipeline.rank == 0:
            times = f"{pipeline.iteration_ms:.0f} ms, predicted {plan.iteration_ms:.0f} ms"
            print(f"step {step:3d}  loss {loss:.4f}  {times}", flush=True)
    pipeline.write_trace("train_text.trace.json")
dist.destroy_process_group()
