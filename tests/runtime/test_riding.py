"""In a chain of single ranks, the notice of a step and its sums ride with messages."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from pipeplan.errors import RuntimeMismatchError  # noqa: E402
from pipeplan.pipeline import Kind  # noqa: E402
from pipeplan.runtime import Pipeline, add_loss  # noqa: E402
from pipeplan.runtime.exchange.contents import HEADER_BYTES, noted_header  # noqa: E402
from pipeplan.runtime.exchange.riding import NUM_WORDS, Ride, can_ride  # noqa: E402
from pipeplan.runtime.extra_losses import collect_losses  # noqa: E402
from runtime.samples import cut_plan  # noqa: E402
from runtime.workers import Ranks, run_ranks  # noqa: E402

NUM_RANKS = 3


def chain_plan(microbatches=4, rows=2):
    return cut_plan(list("0123"), [0, 1, 3], [1, 1, 1], microbatches, rows)


class Adds(nn.Module):
    """A layer with a loss of its own."""

    def __init__(self, width, factor):
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.ones(width)), factor

    def forward(self, x):
        x = x * self.weight
        add_loss(x.square().mean() * self.factor)
        return x


def make_model(width):
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), Adds(width, 0.1), nn.Linear(width, width), Adds(width, 0.2)]
    return nn.Sequential(*layers).double()


def make_batch(width, rows, step, length=1):
    generator = torch.Generator().manual_seed(step)
    shape = (rows, length, width)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    return made[0], made[1]


def largest(output, targets):
    return (output - targets).abs().mean()


def count_sends(pipeline):
    """Counts what goes from host to host."""
    counts, send = {"sent": 0}, pipeline._transport.send_header

    def counted(*args):
        counts["sent"] += 1
        return send(*args)

    pipeline._transport.send_header = counted
    return counts


def train(rank):
    """Losses of updates, accumulation, evaluation and short batches; and messages a step."""
    found, width = {}, 6
    with Pipeline(
        chain_plan(),
        make_model(width),
        nn.functional.mse_loss,
        lambda p: torch.optim.SGD(p, lr=0.05),
        metrics={"error": largest},
    ) as pipeline:
        losses, counts = [], count_sends(pipeline)
        rows_of = [8, 8, 8, 3, 1, 8, 8]
        for step, rows in enumerate(rows_of):
            batch, targets = make_batch(width, rows, step)
            given = None if rank == 1 and step % 2 else batch
            before = counts["sent"]
            loss = pipeline.step(given, targets if rank == 2 else None, update=step != 5)
            losses.append((loss, pipeline.metrics["error"]))
            losses.append((pipeline.evaluate(given, targets if rank == 2 else None), 0.0))
            found[step] = counts["sent"] - before
        state = pipeline.full_state_dict()
    return losses, found, {name: tensor.tolist() for name, tensor in (state or {}).items()}


def train_alone():
    model = make_model(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []

    def loss_of(batch, targets):
        with collect_losses() as extra:
            output = model(batch)
        return nn.functional.mse_loss(output, targets) + sum(extra), output

    for step, rows in enumerate([8, 8, 8, 3, 1, 8, 8]):
        batch, targets = make_batch(6, rows, step)
        loss, output = loss_of(batch, targets)
        losses.append((loss.item(), largest(output, targets).item()))
        (loss / (2 if step >= 5 else 1)).backward()
        if step != 5:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses.append((loss_of(batch, targets)[0].item(), 0.0))
    return losses, {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def test_sums_ride_and_are_those_of_one_process():
    ranks = run_ranks(NUM_RANKS, train)
    losses, state = train_alone()
    for found, _, _ in ranks:
        assert found == ranks[0][0], "all ranks know the same"
        assert np.allclose(found, losses, rtol=1e-12, atol=1e-14)
    assert ranks[0][2].keys() == state.keys()
    for name, values in state.items():
        assert np.allclose(ranks[0][2][name], values, rtol=1e-12, atol=1e-14)
    # A step: 4 outputs over two cuts and 4 gradients back. An evaluation: 4 outputs, and a sum.
    assert sum(counts[2] for _, counts, _ in ranks) == 2 * 4 + 2 * 4 + 2 * 4 + 2 * 2


WRONG = {
    "rows": (lambda x: x[:-1], "batch: rank 1 has 7 rows, but rank 0 has 8"),
    "more rows": (lambda x: torch.cat([x, x, x]), "batch: rank 1 has 24 rows, but rank 0 has 8"),
    "values": (lambda x: x + 1, "batch: rank 1 has other values than rank 0"),
    "type": (lambda x: x.float(), "batch: rank 1 has tensors of other shapes or types than rank 0"),
}


def run_wrongly(rank, length, name):
    change, _ = WRONG[name]
    pipeline = Pipeline(
        chain_plan(),
        make_model(6),
        nn.functional.mse_loss,
        lambda p: torch.optim.SGD(p, lr=0.05),
    )
    for step in range(3):
        pipeline.step(*make_batch(6, 8, step, length))
    batch, targets = make_batch(6, 8, 3, length)
    said = ""
    if rank == 1:
        try:
            pipeline.step(change(batch), targets)
        except RuntimeMismatchError as error:
            said = str(error)
    else:
        pipeline.step(batch, targets)
    dist.barrier()
    return said


@pytest.mark.parametrize(
    ("length", "name"), [*((1, name) for name in WRONG), (700, "more rows"), (700, "values")]
)
def test_another_batch_in_a_later_step_is_refused(tmp_path, length, name):
    """Whatever the sizes: gloo would abort the process on a message that is too large."""
    errors = tmp_path / "errors"
    with Ranks(NUM_RANKS, run_wrongly, length, name, stderr=errors) as ranks:
        codes = ranks.wait(60)
        assert None not in codes, codes
        text = errors.read_text()
    last = [line for line in text.splitlines() if line.endswith("; all ranks end")]
    assert len(last) == 1, text
    assert f"rank 1 (stage 1 on d1) raised RuntimeMismatchError: {WRONG[name][1]}" in last[0]


def ride(is_last=False, own=None):
    return Ride(
        opening=None, notice=(7,) * NUM_WORDS, compare=lambda _: None, is_last=is_last, own=own
    )


def header(note):
    return bytearray(noted_header(note).numpy().tobytes())


def test_sums_go_down_and_totals_come_back():
    first, middle, last = ride(own=lambda: [1.5, 0.0]), ride(own=lambda: [0.25, 0.0]), ride(True)
    last.own = lambda: [2.0, 8.0]
    note = first.note_output(is_first=True, is_last=True)
    assert len(header(note)) == HEADER_BYTES
    middle.take_notice(header(note))
    assert middle.notice == (7,) * NUM_WORDS
    middle.take_sums(header(note), Kind.FORWARD)
    last.take_sums(header(middle.note_output(is_first=False, is_last=True)), Kind.FORWARD)
    middle.take_sums(header(last.note_gradients(is_last=True)), Kind.BACKWARD)
    first.take_sums(header(middle.note_gradients(is_last=True)), Kind.BACKWARD)
    assert first.totals(2) == middle.totals(2) == last.totals(2) == [3.75, 8.0]
    assert first.note_output(is_first=False, is_last=False) is None
    assert last.note_gradients(is_last=False) is None


def test_only_chains_of_single_ranks_ride():
    plan = chain_plan()
    assert can_ride(plan, [[0], [1], [2]], 3, 2)
    assert can_ride(plan, [[2], [0], [1]], 3, NUM_WORDS)
    assert not can_ride(plan, [[0], [1], [2]], 3, NUM_WORDS + 1), "too many metrics"
    assert not can_ride(plan, [[0], [1], [2]], 4, 2), "a rank without a stage"
    assert not can_ride(plan, [[0], [1, 2], [3]], 4, 2), "replicas"
    assert not can_ride(plan, [[0], [1], [0]], 2, 2), "two stages a rank"
    row = plan.schedule[0]
    forwards = [block for block in row if block.kind is Kind.FORWARD]
    swapped = {forwards[0]: forwards[1], forwards[1]: forwards[0]}
    rows = [tuple(swapped.get(block, block) for block in row), *list(plan.schedule)[1:]]
    schedule = type(plan.schedule)(tuple(rows))
    assert not can_ride(dataclasses.replace(plan, schedule=schedule), [[0], [1], [2]], 3, 2)
