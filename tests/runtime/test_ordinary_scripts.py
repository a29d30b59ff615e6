"""Ordinary training scripts, with all that ranks may have of their own: none is refused.

Timers, counters, loggers, files and generators differ between ranks, and are often read inside of
models and losses. All scripts run one after another on the same three ranks, of which two are
replicas.
"""

import argparse
import collections
import itertools
import logging
import os
import random
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from pipeplan.runtime import Pipeline  # noqa: E402
from runtime.samples import cut_plan  # noqa: E402
from runtime.workers import run_ranks  # noqa: E402

STEPS = 4
START = time.time()
STEP = 0
TIMES = []
HISTORY = collections.defaultdict(list)
LOG = logging.getLogger("train")
BEST = float("inf")
RNG = np.random.default_rng()
PICK = random.Random()
IS_MAIN = True
OUT_DIR = "out"
COUNTER = itertools.count()
ARGS = argparse.Namespace(local_rank=0, lr=0.05, log_every=2, output_dir="out", device="cpu")
METER = None
TRACKER = None


class Net(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def batches(seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        yield torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def fit(model=None, loss_fn=nn.functional.mse_loss, between=lambda step, loss: None, **options):
    """The losses of a few steps; `between` is what the script does after each."""
    plan = cut_plan(list("012"), [0, 2], [1, 2], 2, 4)
    losses = []
    with Pipeline(plan, model or Net(), loss_fn, sgd, **options) as pipeline:
        for step, (inputs, targets) in enumerate(batches()):
            losses.append(pipeline.step(inputs, targets))
            between(step, losses[-1])
        losses.append(pipeline.evaluate(inputs, targets))
    return losses


# ------------------------------------------------------------------------------- the scripts


def with_timers(rank):
    """Globals with times, which the loss reads to log its speed."""
    global START
    START = time.time() + rank

    def loss_fn(output, targets):
        TIMES.append(time.time() - START)
        return nn.functional.mse_loss(output, targets)

    def between(step, loss):
        global START
        START = time.time()
        if rank == 0:
            TIMES.clear()

    return fit(loss_fn=loss_fn, between=between)


def with_counters(rank):
    """A loss that counts its calls, which replicas with other rows have others of."""

    def loss_fn(output, targets):
        loss_fn.calls += len(output)
        next(COUNTER)
        HISTORY["mean"].append(float(output.detach().mean()))
        return nn.functional.mse_loss(output, targets)

    loss_fn.calls = rank
    return fit(loss_fn=loss_fn)


def with_logger(rank):
    """The main rank logs to a file, others nowhere."""
    global LOG, IS_MAIN
    IS_MAIN = rank == 0
    LOG = logging.getLogger(f"train.{rank}")
    LOG.addHandler(logging.FileHandler(os.devnull) if rank == 0 else logging.NullHandler())
    LOG.setLevel(logging.INFO if rank == 0 else logging.ERROR)

    def loss_fn(output, targets):
        loss = nn.functional.mse_loss(output, targets)
        if IS_MAIN:
            LOG.info("loss %.3f", loss.item())
        return loss

    return fit(loss_fn=loss_fn)


def with_arguments(rank):
    """Argparse's namespace with the local rank, a folder and a device of this rank."""
    ARGS.local_rank, ARGS.output_dir, ARGS.device = rank, f"out/rank{rank}", f"cuda:{rank}"

    def loss_fn(output, targets):
        if ARGS.local_rank == 0 and STEP % ARGS.log_every == 0:
            os.path.join(ARGS.output_dir, "log")
        return nn.functional.mse_loss(output, targets)

    return fit(loss_fn=loss_fn)


class Tracker:
    """As wandb's run: it has an id, a start time and what was logged; on the main rank alone."""

    def __init__(self, rank):
        self.id, self.start_s, self.rows = f"{random.getrandbits(32):x}", time.time(), []
        self.enabled = rank == 0

    def log(self, **values):
        if self.enabled:
            self.rows.append({**values, "time": time.time() - self.start_s})


def with_tracker(rank):
    global TRACKER
    TRACKER = Tracker(rank)

    def loss_fn(output, targets):
        loss = nn.functional.mse_loss(output, targets)
        TRACKER.log(loss=loss.item())
        return loss

    return fit(loss_fn=loss_fn, between=lambda step, loss: TRACKER.log(mean=loss))


def with_optional_tracker(rank):
    """Only the main rank has one at all."""
    global TRACKER
    TRACKER = Tracker(rank) if rank == 0 else None

    def loss_fn(output, targets):
        if TRACKER is not None:
            TRACKER.log(size=len(output))
        return nn.functional.mse_loss(output, targets)

    return fit(loss_fn=loss_fn)


class Meter:
    def __init__(self):
        self.sum, self.count, self.last = 0.0, 0, None

    def update(self, value):
        self.sum, self.count, self.last = self.sum + value, self.count + 1, value


def with_meter(rank):
    """A mean over steps that the program resets, on the main rank alone."""
    global METER
    METER = Meter()

    def loss_fn(output, targets):
        loss = nn.functional.mse_loss(output, targets)
        METER.update(loss.item())
        return loss

    def between(step, loss):
        global METER
        if step % 2:
            METER = Meter()

    return fit(loss_fn=loss_fn, between=between)


def with_best_loss(rank):
    """The main rank keeps the best loss and early stopping's patience."""
    global BEST
    state = SimpleNamespace(best=float("inf"), bad=0)

    def between(step, loss):
        global BEST
        if rank == 0 and loss < state.best:
            state.best = BEST = loss
        elif rank == 0:
            state.bad += 1

    return fit(between=between)


def with_augmentation(rank):
    """Batches are augmented on the host with generators alike; others are the rank's own."""
    global RNG, PICK
    RNG, PICK = np.random.default_rng(rank), random.Random(rank)
    alike = np.random.default_rng(7)
    plan = cut_plan(list("012"), [0, 2], [1, 2], 2, 4)
    with Pipeline(plan, Net(), nn.functional.mse_loss, sgd) as pipeline:
        losses = []
        for inputs, targets in batches():
            noise = torch.from_numpy(alike.normal(size=inputs.shape)).float()
            RNG.normal(), PICK.random()
            losses.append(pipeline.step(inputs + 0.1 * noise, targets))
    return losses


@dataclass
class TrainerState:
    global_step: int = 0
    is_world_process_zero: bool = True
    log_history: list = field(default_factory=list)
    epoch: float = 0.0
    started_s: float = field(default_factory=time.time)


class Trainer:
    """In the manner of Hugging Face's: the loss is a method, which reads the trainer's state."""

    def __init__(self, rank, model):
        self.model, self.state = model, TrainerState(is_world_process_zero=rank == 0)
        self.args = SimpleNamespace(process_index=rank, logging_steps=2, output_dir=f"out-{rank}")
        self.callbacks = [self.report] if rank == 0 else []
        self.losses = []

    def report(self):
        self.state.log_history.append({"time": time.time(), "step": self.state.global_step})

    def compute_loss(self, output, targets):
        if self.state.is_world_process_zero and self.state.global_step % self.args.logging_steps:
            self.report()
        return nn.functional.mse_loss(output, targets)

    def train(self):
        plan = cut_plan(list("012"), [0, 2], [1, 2], 2, 4)
        with Pipeline(plan, self.model, self.compute_loss, sgd) as pipeline:
            data = TensorDataset(*map(torch.cat, zip(*batches(), strict=True)))
            generator = torch.Generator().manual_seed(3)
            loader = DataLoader(data, batch_size=8, shuffle=True, generator=generator)
            for batch in loader:
                self.losses.append(pipeline.step(*batch))
                self.state.global_step += 1
                self.state.epoch = self.state.global_step / len(loader)
                for callback in self.callbacks:
                    callback()
        return self.losses


def with_trainer(rank):
    return Trainer(rank, Net()).train()


def with_progress_bar(rank):
    """A bar that shows the loss, disabled on other ranks; closures share it with the loss."""
    shown = SimpleNamespace(n=0, disable=rank != 0, text="", start_t=time.time(), file=sys.stderr)

    def loss_fn(output, targets):
        shown.n += 1
        if not shown.disable:
            shown.text = f"{shown.n} {time.time() - shown.start_t:.1f} s"
        return nn.functional.mse_loss(output, targets)

    def between(step, loss):
        if not shown.disable:
            shown.text = f"{loss:.3f}"

    return fit(loss_fn=loss_fn, between=between)


def with_annealing(rank):
    """A global that all ranks set alike, beside one that each has of its own."""
    global STEP, OUT_DIR

    def loss_fn(output, targets):
        if rank == 0 and STEP < 0:
            os.path.join(OUT_DIR, "x")
        return nn.functional.mse_loss(output, targets) * (1.0 + 0.5**STEP)

    def between(step, loss):
        global STEP, OUT_DIR
        STEP, OUT_DIR = step + 1, f"out/{rank}/{step}"

    STEP = 0
    return fit(loss_fn=loss_fn, between=between)


class Watched(nn.Module):
    """A layer that keeps what people like to look at."""

    def __init__(self):
        super().__init__()
        self.layer, self.verbose, self.dump = nn.Linear(6, 3), False, ""
        self.seen, self.last_mean, self.took_s, self.names = 0, 0.0, 0.0, []

    def forward(self, x):
        start_s = time.time()
        self.seen += len(x)
        self.last_mean = float(x.detach().mean())
        if self.verbose and self.dump:
            self.names.append(self.dump)
        output = self.layer(x)
        self.took_s = time.time() - start_s
        return output


def with_watched_layers(rank):
    """Attributes that layers and the program set, among them the rank's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Watched())

    def between(step, loss):
        if rank:
            model[2].verbose, model[2].dump = rank == 0, f"dump-{rank}-{step}.pt"
            model[2].last_step, model[2].wall_s = step, time.time()
            model[2].seen = 0
        model.run_name = f"run-{rank}-{time.time()}"

    return fit(model=model, between=between)


SCRIPTS = [
    *(with_timers, with_counters, with_logger, with_arguments, with_tracker, with_optional_tracker),
    *(with_meter, with_best_loss, with_augmentation, with_trainer, with_progress_bar),
    *(with_annealing, with_watched_layers),
]


def run_all(rank):
    losses = {}
    for script in SCRIPTS:
        losses[script.__name__] = script(rank)
        dist.barrier()
    return losses


def test_no_ordinary_script_is_refused():
    first, *others = run_ranks(3, run_all)
    for losses in others:
        assert losses == first
    assert all(np.isfinite(losses).all() for losses in first.values())
