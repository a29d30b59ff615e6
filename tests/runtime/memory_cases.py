"""What ranks hold at once, as a part of what their plan predicts; asked for by `test_memory`."""

import gc
import json
import sys
from dataclasses import replace

import torch
from torch import nn

from instances import flat_cluster
from pipeplan.cost import BYTES_IN_GB, CostModel
from pipeplan.group_memory import group_memory_parts
from pipeplan.group_schedules import group_orders
from pipeplan.measure import profile as profile_model
from pipeplan.pipeline import Plan, Schedule, Stage
from pipeplan.runtime import Pipeline
from pipeplan.runtime.stage_orders import group_of
from runtime.held_memory import HeldMemory
from runtime.samples import Block, cut_plan, mlp_loss
from runtime.workers import run_ranks

NUM_LAYERS, MICROBATCHES = 8, 6


def make_blocks(num_blocks=NUM_LAYERS, rows=32):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(64) for _ in range(num_blocks))), torch.randn(16, rows, 64)


def make_mlp(width=128):
    """Layers that keep hardly more than what crosses a cut."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(NUM_LAYERS))
    return nn.Sequential(*layers), torch.randn(256, width)


MODELS = {"blocks": make_blocks, "mlp": make_mlp}


def profile_in_rank(rank, make):
    """In a rank, with the same single thread."""
    model, sample = make()
    return profile_model(model, sample, loss_fn=mlp_loss, targets=sample, repeats=1)


def measure(rank, make, plans):
    """For each plan, bytes held by this rank as a part of the bytes predicted."""
    found = []
    for plan in plans:
        model, sample = make()
        data = torch.cat([sample] * MICROBATCHES)
        with Pipeline(plan, model, mlp_loss, torch.optim.AdamW) as pipeline:
            for _ in range(3):  # behind batches 1, 2, 4, ... stages are compared with the model
                pipeline.step(data, data)
            gc.collect()  # what the comparison with the whole model has left
            with HeldMemory() as held:
                pipeline.step(data, data)
            held_bytes = state_bytes(pipeline) + held.most
            found.append(held_bytes / predicted_bytes(plan, pipeline))
    return found


def state_bytes(pipeline):
    """Parameters, gradients and moments, which are there before a step begins."""
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for parameter in pipeline.model.parameters()
        for tensor in (parameter, parameter.grad, *pipeline.optimizer.state[parameter].values())
    }
    return sum(held.values())


def predicted_bytes(plan, pipeline):
    number = group_of(plan, pipeline.stage)
    parts = group_memory_parts(
        CostModel(plan.model, plan.cluster),
        plan.stages,
        plan.groups[number],
        plan.schedule.group_codes(number),
        shard_optimizer=plan.shard_optimizer,
    )
    return parts[pipeline.replica].total_gb * BYTES_IN_GB


def of_stages(model, schedules, cuts=(0, 2, 4, 6), replicas=(1, 1, 1, 1)):
    """One stage a device, by named schedules with recomputation or without, on four ranks."""
    names, make = [str(i) for i in range(NUM_LAYERS)], MODELS[model]
    profile = run_ranks(1, profile_in_rank, make)[0]
    plans = []
    for schedule, recompute in schedules:
        options = {"schedule": schedule, "recompute": recompute}
        rows = profile.microbatch_size
        plan = cut_plan(names, cuts, replicas, MICROBATCHES, rows, **options)
        plans.append(replace(plan, model=profile))
    return run_ranks(4, measure, make, plans)


def of_groups(schedule, chain, blocks_a_stage=2, shards=False, **changes):
    """Stages of equal size on the groups of a chain, by a named schedule."""
    num_blocks = blocks_a_stage * len(chain)

    def make():  # more rows than elsewhere, so that a rank's small objects hardly count
        return make_blocks(num_blocks, 64)

    profile = run_ranks(1, profile_in_rank, make)[0]
    stages = tuple(
        Stage(
            layers=range(blocks_a_stage * n, blocks_a_stage * (n + 1)),
            devices=tuple(devices),
            **changes,
        )
        for n, devices in enumerate(chain)
    )
    num_devices = 1 + max(device for devices in chain for device in devices)
    plan = Plan(
        model=profile,
        cluster=flat_cluster(num_devices, 1.0),
        microbatches=MICROBATCHES,
        stages=stages,
        schedule=Schedule.from_group_codes(group_orders(schedule, stages, MICROBATCHES)),
        planner="test",
        shard_optimizer=shards,
    )
    return run_ranks(num_devices, measure, make, [plan])


def main():
    """Answer each case; the ratios of each rank's plans, in one line of JSON."""
    kinds = {"stages": of_stages, "groups": of_groups}
    cases = json.loads(sys.argv[1])
    answers = [kinds[kind](*args, **changes) for kind, args, changes in cases]
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
