"""Where all ranks are replicas of all stages, loss and metrics ride behind the gradients."""

import math
import zlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from pipeplan.runtime import Pipeline, add_loss  # noqa: E402
from pipeplan.runtime.exchange.rank_tree import TreeSum  # noqa: E402
from pipeplan.runtime.extra_losses import collect_losses  # noqa: E402
from pipeplan.runtime.gradient_notes import GradientNotes  # noqa: E402
from runtime.samples import cut_plan  # noqa: E402
from runtime.workers import run_ranks  # noqa: E402

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NUMBERS = [
    [0.1, -math.inf, 1e308, float(zlib.crc32(b"changed")), 5e-324],
    [1 / 3, 1.0, -1e308, -float(zlib.crc32(b"changed")), 0.0],
    [-0.0, 2.0, 1e-30, 255.0, -1e-300],
]


def ride(dtype, numbers):
    """The totals of each rank, after a sum of what all wrote."""
    riders = [GradientNotes(rank, len(numbers), 6) for rank in range(len(numbers))]
    places = [torch.full((rider.num_elements,), 7.0, dtype=dtype) for rider in riders]
    for rider, place, own in zip(riders, places, numbers, strict=True):
        rider.take_place(place)
        rider.own = lambda own=own: own
        rider.write()
    total = sum(places[1:], places[0])
    for place in places:
        place.copy_(total)
    return [rider.totals(len(numbers[0])) for rider in riders]


@pytest.mark.parametrize("dtype", TYPES)
def test_all_ranks_read_the_exact_sums(dtype):
    found = ride(dtype, NUMBERS)
    expected = [sum(each) for each in zip(*NUMBERS, strict=True)]
    assert found == [expected] * 3


@pytest.mark.parametrize("dtype", TYPES)
def test_a_loss_that_is_not_a_number_stays_alone(dtype):
    for totals in ride(dtype, [[math.nan, 1.0], [2.0, 3.0]]):
        assert math.isnan(totals[0])
        assert totals[1] == 4.0


def test_complex_gradients_carry_nothing():
    rider = GradientNotes(0, 2, 1)
    rider.take_place(torch.zeros(rider.num_elements, dtype=torch.complex64))
    assert not rider.can_ride
    rider.write()


class Adds(nn.Module):
    """A layer with a loss of its own."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x * self.weight
        add_loss(x.square().mean() * 0.1)
        return x


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), Adds(5), nn.Linear(5, 5)).double()


ROWS = [6, 6, 1, 6, 4, 6]
KEPT = 3
"""The step whose gradients are kept for the next one."""


def make_batch(step):
    generator = torch.Generator().manual_seed(step)
    shape = (ROWS[step], 5)
    inputs, targets = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return inputs, targets


def largest(output, targets):
    return (output - targets).abs().mean()


def train(rank, options):
    """Losses, metrics and weights; and how many sums went along the tree."""
    started, start = [], TreeSum.start
    TreeSum.start = lambda self, numbers: (started.append(len(numbers)), start(self, numbers))[1]
    plan = cut_plan(list("012"), [0], [3], 2, 3)
    with Pipeline(
        plan,
        make_model(),
        nn.functional.mse_loss,
        lambda p: torch.optim.SGD(p, lr=0.05),
        metrics={"error": largest},
        **options,
    ) as pipeline:
        losses = []
        for step in range(len(ROWS)):
            loss = pipeline.step(*make_batch(step), update=step != KEPT)
            losses.append((loss, pipeline.metrics["error"]))
        num_sums = len(started)
        pipeline.evaluate(*make_batch(0))
        state = pipeline.model.state_dict()
    TreeSum.start = start
    return losses, {name: tensor.tolist() for name, tensor in state.items()}, num_sums


def train_alone():
    model, losses = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, rows in enumerate(ROWS):
        batch, targets = make_batch(step)
        with collect_losses() as extra:
            output = model(batch)
        loss = nn.functional.mse_loss(output, targets) + sum(extra)
        losses.append((loss.item(), largest(output, targets).item()))
        share = {KEPT: ROWS[KEPT], KEPT + 1: rows}.get(step, 0) / (ROWS[KEPT] + ROWS[KEPT + 1])
        (loss * (share or 1.0)).backward()
        if step != KEPT:
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: tensor.tolist() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("options", "num_sums"),
    [({}, 1), ({"bucket_bytes": 8}, 1), ({"clip_norm": 1e9}, len(ROWS))],
)
def test_losses_ride_and_are_those_of_one_process(options, num_sums):
    """The tree is needed where nothing is summed (one step), or the norm decides about the step."""
    losses, state = train_alone()
    ranks = run_ranks(3, train, options)
    for found, weights, sums in ranks:
        assert found == ranks[0][0], "all ranks know the same"
        assert np.allclose(found, losses, rtol=1e-12, atol=1e-14)
        assert weights.keys() == state.keys()
        for name, values in state.items():
            assert np.allclose(weights[name], values, rtol=1e-12, atol=1e-14)
        assert sums == num_sums
