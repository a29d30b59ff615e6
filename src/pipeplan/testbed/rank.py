"""What one emulated device does: it joins the others, trains, and tells when its blocks ran."""

import gc
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.errors import InputError
from pipeplan.pipeline import Kind, Plan
from pipeplan.runtime import WatchdogOptions, join_ranks
from pipeplan.testbed.orders import BlockTimes, IterationTimes, Order, RankTimes, Way
from pipeplan.testbed.paced import Pace, PacedPipeline
from pipeplan.testbed.pacing import pace_sockets
from pipeplan.testbed.stand_in import IdleOptimizer, mean_loss, stand_in_model
from pipeplan.testbed.topology import Topology
from pipeplan.user_code import find_function

__all__ = ["preload", "run_rank"]

MS_IN_S = 1e3
JOIN_S = 60.0
HANG_S = 120.0
LEARNING_RATE = 1e-3


def preload() -> None:
    """Import what ranks will need: torch's optimizers load hundreds of modules on first use."""
    IdleOptimizer([nn.Parameter(torch.zeros(1))])


def run_rank(order: Order, plan: Plan, topology: Topology, rank: int) -> RankTimes:
    """Take all steps of an order, and return their times.

    The environment says how to join the other ranks, as torchrun's does.
    """
    torch.set_num_threads(1)
    join_ranks(JOIN_S)
    device = plan.cluster.devices[topology.devices[rank]].name
    watchdog = WatchdogOptions(hang_timeout_s=HANG_S)
    common = {
        "device_name": device,
        "watchdog": watchdog,
        "verify": "off",
        "bucket_bytes": math.inf,
        "receive_ahead": plan.microbatches,
    }
    pace = find_pace(order, plan, topology, rank)
    if order.build is None:
        names = [str(number) for number in range(plan.model.num_layers)]
        pipeline = PacedPipeline(
            pace, plan, stand_in_model(plan), mean_loss, IdleOptimizer, layers=names, **common
        )
    else:
        model, loss_fn = _build(order.build)
        pipeline = PacedPipeline(
            pace, plan, model, loss_fn, lambda p: torch.optim.AdamW(p, lr=LEARNING_RATE), **common
        )
    if order.way is Way.PACING:
        pace_sockets(topology, rank)
    with pipeline:
        times = _take_steps(order, pipeline)
    dist.barrier()  # rank 0 holds the store
    dist.destroy_process_group()
    return times


def _build(path: str) -> tuple[nn.Module, Any]:
    model = find_function(path)()
    if not isinstance(model, nn.Module):
        raise InputError(f"{path!r}: returns no torch.nn.Module")
    return model, find_function(f"{path.partition(':')[0]}:loss_fn")


def _take_steps(order: Order, pipeline: PacedPipeline) -> RankTimes:
    rows = pipeline.plan.microbatches * pipeline.plan.model.microbatch_size
    make_batch = None
    if order.build is not None:
        make_batch = find_function(f"{order.build.partition(':')[0]}:make_batch")
    idle = torch.zeros(rows, 1)
    iterations = []
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection takes milliseconds
    for step in range(order.num_warm_ups + order.num_iterations):
        batch, targets = (idle, None) if make_batch is None else make_batch(step, rows)
        before_end_s = pipeline.end_s
        loss = pipeline.step(batch, targets)
        if step >= order.num_warm_ups:
            iterations.append(_times_of(pipeline, loss, before_end_s))
    return RankTimes(stages=list(pipeline.stages), replica=pipeline.replica, iterations=iterations)


def _times_of(pipeline: PacedPipeline, loss: float, before_end_s: float) -> IterationTimes:
    blocks = [
        BlockTimes(
            str(record.block),
            record.start_s,
            record.end_s,
            record.arrival_s,
            record.over_s,
        )
        for record in pipeline.clock.records
    ]
    return IterationTimes(
        start_s=pipeline.start_s,
        end_s=pipeline.end_s,
        before_end_s=before_end_s,
        reduce_end_s=pipeline.reduce_end_s,
        blocks=blocks,
        loss=loss,
    )


def find_pace(order: Order, plan: Plan, topology: Topology, rank: int) -> Pace:
    """How long the blocks of a rank take, and how far away other ranks are."""
    device = topology.devices[rank]
    stage = next(stage for stage in plan.stages if device in stage.devices)
    ranks = [topology.devices.index(other) for other in stage.devices]
    latencies_s = [topology.latency_s[a][b] for a in ranks for b in ranks]
    lengths_s = {
        (pace.stage, Kind(kind)): seconds
        for pace in order.paces[rank]
        for kind, seconds in pace.seconds.items()
    }
    return Pace(
        lengths_s=lengths_s,
        latency_s=tuple(row[rank] for row in topology.latency_s),
        reduce_latency_s=2 * (len(ranks) - 1) * max(latencies_s),
        again_s={
            pace.stage: plan.stages[pace.stage].recompute * lengths_s[pace.stage, Kind.FORWARD]
            for pace in order.paces[rank]
        },
    )
