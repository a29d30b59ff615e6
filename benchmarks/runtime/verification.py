"""Measures what the comparison with the whole model costs, in steps.

Four ranks over gloo train a small transformer by a plan with one stage each: with the comparison
before the first step, and without it. The difference of their first steps, divided by a later step,
is the price. Later comparisons of ranks (batch 1, 2, 4, 8, ...) are measured as well. Times are CPU
times of all ranks, medians of several pipelines.

    python benchmarks/runtime/verification.py [--rounds 5] [--profile]
"""

import argparse
import cProfile
import os
import pstats
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from run import make_optimizer, make_plan
from torch import nn

from pipeplan.runtime import Pipeline

PORT = int(os.environ.get("PIPEPLAN_BENCHMARK_PORT", "29723"))
NUM_RANKS, MICROBATCHES, ROWS = 4, 8, 4
SIZES = {"small": (64, 16), "medium": (128, 64), "large": (256, 128)}
"""Width and length of sequences."""
STEPS = 8
"""Of these, ranks compare what they compute behind steps 1, 2 and 4; the others are ordinary."""
AGAIN = (1, 2, 4)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.drop(self.second(nn.functional.gelu(self.first(self.norms[1](x)))))


def cpu_ms(run) -> float:
    """CPU time of all ranks."""
    dist.barrier()
    start_s = time.process_time()
    run()
    used = torch.tensor([time.process_time() - start_s], dtype=torch.float64)
    dist.barrier()
    dist.all_reduce(used)
    return used.item() * 1e3


def measure(width: int, length: int, verify: str, profile: cProfile.Profile | None):
    """The first step, the median of ordinary later ones, and of those with a comparison."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(NUM_RANKS)))
    batch = torch.randn(MICROBATCHES * ROWS, length, width)
    targets = torch.randn(MICROBATCHES * ROWS, length, width)
    with Pipeline(
        make_plan(MICROBATCHES), model, nn.functional.mse_loss, make_optimizer, verify=verify
    ) as pipeline:
        if profile is not None:
            profile.enable()
        first = cpu_ms(lambda: pipeline.step(batch, targets))
        if profile is not None:
            profile.disable()
        later = {n: cpu_ms(lambda: pipeline.step(batch, targets)) for n in range(1, STEPS)}
    again = statistics.median(later.pop(number) for number in AGAIN)
    return first, statistics.median(later.values()), again


def worker(rank: int, rounds: int, profiles: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=rank, world_size=NUM_RANKS
    )
    for name, size in SIZES.items():
        measure(*size, "first-step", None)  # imports, caches of torch
        profile = cProfile.Profile(time.thread_time) if profiles and rank == 1 else None
        pairs = [
            (measure(*size, "first-step", profile), measure(*size, "off", None))
            for _ in range(rounds)
        ]
        price = statistics.median(verified[0] - plain[0] for verified, plain in pairs)
        step = statistics.median(later for pair in pairs for _, later, _ in pair)
        again = statistics.median(verified[2] for verified, _ in pairs) - step
        if rank == 0:
            print(
                f"{name:7} {price:8.1f} ms, a step {step:8.1f} ms: {price / step:.2f} steps;"
                f" later comparisons {again / step:.2f} steps each"
            )
        if profile is not None:
            pstats.Stats(profile).sort_stats("cumtime").print_stats(45)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    mp.spawn(worker, (options.rounds, options.profile), nprocs=NUM_RANKS)
