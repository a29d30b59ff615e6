"""Models and batches that change from step to step and from microbatch to microbatch.

Each scene trains by a plan and in one process, and compares. All of them share four ranks.
"""

import copy
import enum
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from pipeplan.runtime import Pipeline, RuntimeMismatchError  # noqa: E402
from pipeplan.splitting.nesting import take_tensors  # noqa: E402
from runtime.samples import cut_plan  # noqa: E402
from runtime.workers import Ranks, run_ranks, share_from_first  # noqa: E402

NUM_RANKS = 4
WIDTH = 6
NOW = {"step": 0, "evaluates": False}
"""What layers may look at; the same on all ranks."""


def adamw(parameters):
    # Weight decay moves parameters whose gradient is zero, but not those without one.
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5)


def mean_square(output, targets):
    return nn.functional.mse_loss(output, targets)


class Chain(nn.Module):
    """Named layers, one after another; tuples are spread over the arguments of the next."""

    def __init__(self, *layers):
        super().__init__()
        for index, layer in enumerate(layers):
            self.add_module(f"l{index}", layer)

    def forward(self, *values):
        for layer in self.children():
            values = layer(*values)
            values = values if isinstance(values, tuple) else (values,)
        return values[0] if len(values) == 1 else values


def names_of(model):
    return [name for name, _ in model.named_children()]


def judge(plan, model, data, loss_fn=mean_square, evaluations=(), **options):
    """Train by the plan and alone, with evaluations between steps; assert that all is equal."""
    reference = copy.deepcopy(model).double()
    losses, alone = [], []
    with Pipeline(plan, model.double(), loss_fn, adamw, **options) as pipeline:
        for step, (inputs, targets) in enumerate(data):
            NOW.update(step=step, evaluates=False)
            losses.append(pipeline.step(inputs, targets))
            NOW["evaluates"] = True
            losses += [pipeline.evaluate(*batch) for batch in evaluations]
        state = pipeline.full_state_dict()
    if pipeline.rank == 0:
        optimizer = adamw(reference.parameters())
        for step, (inputs, targets) in enumerate(data):
            NOW.update(step=step, evaluates=False)
            optimizer.zero_grad()
            loss = loss_fn(call(reference, inputs), targets)
            loss.backward()
            optimizer.step()
            alone.append(loss.item())
            NOW["evaluates"] = True
            reference.eval()
            with torch.no_grad():
                for inputs, targets in evaluations:
                    alone.append(loss_fn(call(reference, inputs), targets).item())
            reference.train()
        assert losses == pytest.approx(alone, rel=1e-9), (losses, alone)
        for name, value in reference.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-9, atol=1e-11), name


def call(model, inputs):
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def batch(rows, *shape, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rows)
    return torch.randn(rows, *shape, generator=generator, dtype=torch.float64)


def batches(sizes, *shape):
    return [
        (batch(rows, *shape, seed=i), batch(rows, *shape, seed=i + 50))
        for i, rows in enumerate(sizes)
    ]


def linear():
    return nn.Linear(WIDTH, WIDTH)


def plain_chain(depth=4):
    torch.manual_seed(3)
    return Chain(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(depth)))


# ------------------------------------------------------------------ plain values


class Anneal(nn.Module):
    """Returns a temperature that falls from step to step."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        return self.linear(x), 1.0 / (1 + NOW["step"])


class Use(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x, temperature):
        return torch.tanh(self.linear(x) / temperature), temperature


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x, *_):
        return self.linear(x)


def scene_annealed_temperature(rank):
    torch.manual_seed(0)
    model = Chain(Anneal(), Use(), Use(), Last())
    for schedule, replicas in (("1f1b", [2, 1, 1]), ("gpipe", [1, 2, 1])):
        plan = cut_plan(names_of(model), [0, 1, 3], replicas, 4, 3, schedule=schedule)
        judge(plan, copy.deepcopy(model), batches([12] * 4, WIDTH))


class Mixed(nn.Module):
    """Returns another plain value or container in each step."""

    VALUES = (
        *(1, 1.0, True, "on", None, float("nan"), -0.0, float("inf"), 2**70, "ü" * 400),
        *((), [], {}, {"a": [1, (2.0, None)]}, [[True]], ("x", 1), "on"),
    )

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x, *before):
        expected = self.VALUES[NOW["step"] % len(self.VALUES)]
        for value in before:
            assert repr(value) == repr(expected), (value, expected)
        return self.linear(x), expected


def scene_any_plain_value(rank):
    torch.manual_seed(1)
    model = Chain(Mixed(), Mixed(), Mixed(), Last())
    plan = cut_plan(names_of(model), [0, 1, 2], [1, 2, 1], 2, 3)
    judge(plan, model, batches([6] * len(Mixed.VALUES), WIDTH))


# ------------------------------------------------------------------ shapes


class Crop(nn.Module):
    """Cuts off the padding that all rows of a microbatch share; padding is zeros."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        used = x.abs().amax((0, 2)) > 0
        length = int(used.nonzero().max()) + 1 if used.any() else 0
        return torch.tanh(self.linear(x[:, :length]))


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        return self.linear(x.sum(1))


def padded(rows, length, seed):
    x = batch(rows, length, WIDTH, seed=seed)
    lengths = torch.randint(0, length + 1, (rows,), generator=torch.Generator().manual_seed(seed))
    return x * (torch.arange(length) < lengths[:, None])[..., None]


def scene_lengths_of_microbatches(rank):
    """Each microbatch is cropped to its own longest row, sometimes to nothing."""
    torch.manual_seed(2)
    model = Chain(Crop(), Crop(), Crop(), Pool())
    for schedule in ("1f1b", "pe"):
        plan = cut_plan(names_of(model), [0, 1, 2, 3], [1, 1, 1, 1], 4, 2, schedule=schedule)
        data = [(padded(8, 7, step), batch(8, WIDTH, seed=step)) for step in range(8)]
        judge(plan, copy.deepcopy(model), data, evaluations=data[:2])


class Each(nn.Module):
    """Works on each position of a sequence of any length."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        return torch.tanh(self.linear(x))


def scene_lengths_of_steps(rank):
    """Short after long and long after short, training and evaluation in turn, with replicas."""
    torch.manual_seed(3)
    model = Chain(Each(), Each(), Each(), Each())
    plan = cut_plan(names_of(model), [0, 1, 3], [1, 2, 1], 3, 4)
    data = [
        (batch(12, n, WIDTH, seed=i), batch(12, n, WIDTH, seed=i + 9))
        for i, n in enumerate((5, 2, 9, 9, 1, 400, 3, 400, 5))
    ]
    evaluations = [(b[:r], t[:r]) for (b, t), r in zip(data[1:4], (12, 3, 7), strict=True)]
    judge(plan, model, data, evaluations=evaluations)


class Grow(nn.Module):
    """Makes the sequence longer in training than in evaluation, by step, behind the batch."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        times = 1 if NOW["evaluates"] else 1 + (NOW["step"] * 7) % 5
        return self.linear(x).repeat(1, times * 30)


class Shrink(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        return self.linear(x.unflatten(1, (-1, WIDTH)).mean(1))


def scene_shapes_behind_the_batch(rank):
    """The batch has one shape; what crosses the cuts has others, small and large."""
    torch.manual_seed(4)
    model = Chain(Grow(), nn.Tanh(), Shrink(), Last())
    data = batches([120] * 9, WIDTH)
    for options in ({}, {"receive_ahead": 0}, {"receive_ahead": 5}):
        plan = cut_plan(names_of(model), [0, 1, 2, 3], [1, 1, 1, 1], 4, 30)
        judge(plan, copy.deepcopy(model), data, evaluations=data[:1], **options)


# ------------------------------------------------------------------ tensors that come and go


class Sometimes(nn.Module):
    """A second tensor, None, detached, of another type or empty, by step."""

    def __init__(self):
        super().__init__()
        self.main, self.side = linear(), linear()

    def forward(self, x, *_):
        way = NOW["step"] % 6
        if way == 0:
            return self.main(x), None
        if way == 1:
            return self.main(x), self.side(x)
        if way == 2:
            return self.main(x), self.side(x).detach()
        if way == 3:
            return self.main(x), (self.side(x) > 0)
        if way == 4:
            return self.main(x), self.side(x)[:, :0]
        return {"main": self.main(x), "side": [self.side(x), 5]}


class Accept(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x, side=None):
        if isinstance(x, dict):
            x, side = x["main"], x["side"][0]
        if side is None or not side.shape[1:].numel():
            return torch.tanh(self.linear(x))
        return torch.tanh(self.linear(x) + side)


def scene_none_and_others(rank):
    for recompute in (False, True):
        torch.manual_seed(5)
        model = Chain(Sometimes(), Accept(), Sometimes(), Accept())
        plan = cut_plan(names_of(model), [0, 1, 3], [1, 1, 2], 3, 4, recompute=recompute)
        judge(plan, model, batches([12] * 13, WIDTH))


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.main, self.side = linear(), linear()

    def forward(self, x):
        return self.main(x), self.side(x)


class Forgetful(nn.Module):
    """Does not use its second input in every step: its gradient is None, not zero."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x, side):
        return self.linear(x + side) if NOW["step"] % 3 else self.linear(x)


class Picky(nn.Module):
    """Uses its second input only in microbatches, or on replicas, where a row asks for it."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x, side, wanted):
        wanted = wanted * (NOW["step"] % 2)
        if wanted.any():
            x = x + side * wanted
        return self.linear(x)


class Ask(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = Both()

    def forward(self, x, wanted):
        return (*self.both(x), wanted)


def scene_gradients_that_are_none(rank):
    torch.manual_seed(6)
    model = Chain(Both(), Forgetful(), linear())
    for recompute in (False, True):
        plan = cut_plan(names_of(model), [0, 1, 2], [1, 2, 1], 3, 4, recompute=recompute)
        judge(plan, copy.deepcopy(model), batches([12] * 7, WIDTH))
    model = Chain(Ask(), Picky(), linear())
    wanted = torch.zeros(12, 1, dtype=torch.float64)
    wanted[[4, 11]] = 1.0
    data = [((x, wanted), t) for x, t in batches([12] * 6, WIDTH)]
    plan = cut_plan(names_of(model), [0, 1], [2, 2], 3, 4)
    judge(plan, model, data)


class Types(nn.Module):
    """Sends many tensors of many types and sizes; more of them in later steps."""

    KINDS = (torch.bool, torch.int16, torch.bfloat16, torch.complex64, torch.uint8, torch.float64)

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x, many=None):
        if many is not None:
            for i, tensor in enumerate(many):
                assert tensor.dtype is self.KINDS[i % len(self.KINDS)]
                assert torch.equal(tensor, self.make(x, i)), i
        return self.linear(x), [self.make(x, i) for i in range(3 * NOW["step"])]

    def make(self, x, index):
        tensor = torch.full((len(x), 1 + index % 3, index % 5), index % 2 + 1.0)
        tensor = tensor.to(self.KINDS[index % len(self.KINDS)])
        return tensor.transpose(1, 2) if index % 2 else tensor


def scene_many_types(rank):
    torch.manual_seed(7)
    model = Chain(Types(), Types(), Types(), Last())
    plan = cut_plan(names_of(model), [0, 1, 3], [2, 1, 1], 2, 4)
    judge(plan, model, batches([8] * 8, WIDTH))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        y = self.linear(x)
        conjugate = torch.view_as_complex(y.view(-1, 3, 2)).conj()  # a flag, until it is resolved
        return y, y, conjugate, conjugate.imag


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x, y, z, imaginary):
        z = torch.view_as_real(z.resolve_conj()).flatten(1)
        return self.linear(x + y + z) + imaginary.repeat(1, 2)


def scene_one_tensor_twice(rank):
    torch.manual_seed(8)
    model = Chain(Twice(), Sum(), Twice(), Sum())
    plan = cut_plan(names_of(model), [0, 1, 3], [1, 2, 1], 3, 4)
    judge(plan, model, batches([12] * 3, WIDTH))


# ------------------------------------------------------------------ rows


def scene_any_number_of_rows(rank):
    """Fewer rows than microbatches, fewer than replicas, one row; evaluation, too."""
    sizes = [12, 5, 1, 12, 2, 3, 1, 7, 11, 12, 4]
    for replicas, schedule in (
        ([1, 2, 1], "1f1b"),
        ([2, 2], "pe"),
        ([1, 3], "gpipe"),
        ([4], "1f1b"),
    ):
        model = plain_chain()
        cuts = list(range(len(replicas)))
        plan = cut_plan(names_of(model), cuts, replicas, 4, 3, schedule=schedule)
        judge(plan, model, batches(sizes, WIDTH), evaluations=batches([1, 6], WIDTH))


def scene_uneven_shares_leave_a_replica_idle(rank):
    model = plain_chain()
    plan = cut_plan(names_of(model), [0, 2], [1, 3], 2, 4)
    stages = (plan.stages[0], replace(plan.stages[1], shares=(0.9, 0.05, 0.05)))
    judge(replace(plan, stages=stages), model, batches([8, 2, 8, 1], WIDTH))


def scene_random_changes(rank):
    """Rows, lengths and plans at random."""
    rng = random.Random(9)
    for _ in range(4):
        model = Chain(Each(), Crop(), Each(), Pool())
        plan = cut_plan(
            names_of(model),
            sorted({0, *rng.sample([1, 2, 3], 2)}),
            [1, 1, 1],
            rng.randint(1, 5),
            3,
            schedule=rng.choice(["1f1b", "gpipe", "pe"]),
            recompute=rng.random() < 0.5,
            num_devices=4,
        )
        data = []
        for step in range(8):
            rows, length = rng.randint(1, 14), rng.choice([1, 4, 4, 30])
            data.append((padded(rows, length, step), batch(rows, WIDTH, seed=step)))
        judge(plan, model, data, evaluations=data[2:4])


def scene_ranks_without_batches(rank):
    """Ranks in the middle give None now and then, and batches change their shapes."""
    torch.manual_seed(10)
    model = nn.Sequential(Each(), Each(), Each(), Each())
    reference = copy.deepcopy(model).double()
    plan = cut_plan(names_of(model), [0, 1, 2], [1, 1, 1], 2, 4, num_devices=4)
    shapes = [(8, 3), (5, 9), (8, 1), (1, 4)]
    data = [(batch(r, n, WIDTH, seed=r), batch(r, n, WIDTH, seed=n)) for r, n in shapes]
    losses = []
    with Pipeline(plan, model.double(), mean_square, adamw) as pipeline:
        for step, (inputs, targets) in enumerate(data):
            needs = (pipeline.stage == 0, pipeline.stage == 2)
            inputs = inputs if needs[0] or step % 2 else None
            losses.append(pipeline.step(inputs, targets if needs[1] else None))

    def alone():
        optimizer, found = adamw(reference.parameters()), []
        for inputs, targets in data:
            optimizer.zero_grad()
            loss = mean_square(reference(inputs), targets)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses == pytest.approx(share_from_first(alone), rel=1e-9)


class Texts(nn.Module):
    """Reads a list of texts, a numpy array, a number and a dataclass."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x, texts, table, scale, info):
        lengths = torch.tensor([len(text) for text in texts], dtype=x.dtype)
        table = torch.as_tensor(table, dtype=x.dtype)
        return self.linear(x * scale) + lengths[:, None] + table + info.extra


@dataclass
class Info:
    extra: Any
    note: str = "for all rows"


def scene_strange_batches(rank):
    torch.manual_seed(11)
    model = Chain(Texts(), Each(), Each())
    data = []
    for rows in (8, 3, 8, 1, 5):
        x, targets = batches([rows], WIDTH)[0]
        texts = ["a" * (row % 5) for row in range(rows)]
        table = np.arange(rows * WIDTH).reshape(rows, WIDTH) / 9
        data.append(((x, texts, table, 0.5, Info(batch(rows, 1))), targets))
    for replicas in ([2, 1, 1], [3, 1]):
        cuts = list(range(len(replicas)))
        judge(cut_plan(names_of(model), cuts, replicas, 3, 3), copy.deepcopy(model), data)


def scene_targets_in_lists(rank):
    """One dict for each row, with another number of boxes."""
    model = plain_chain()

    def loss_fn(output, targets):
        pairs = zip(output, targets, strict=True)
        return torch.stack([(o.sum() - t["boxes"].sum()) ** 2 for o, t in pairs]).mean()

    data = [
        (batch(rows, WIDTH), [{"boxes": batch(row % 3, 2)} for row in range(rows)])
        for rows in (8, 4, 2, 8, 1)
    ]
    judge(cut_plan(names_of(model), [0, 2], [2, 2], 3, 3), model, data, loss_fn)


class Stretch(nn.Module):
    """Another length in every call, so in every microbatch; the result does not depend on it."""

    num_calls = 0

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        Stretch.num_calls += 1
        times = 1 + (Stretch.num_calls * 2654435761 >> 7) % 4
        return self.linear(x).unsqueeze(1).expand(-1, times * 50, -1), times


class Average(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x, times):
        assert x.shape[1] == times * 50
        return self.linear(x.mean(1))


def scene_lengths_at_random(rank):
    torch.manual_seed(12)
    model = Chain(Stretch(), Average(), Stretch(), Average())
    for schedule in ("1f1b", "gpipe", "pe"):
        Stretch.num_calls = 0  # ranks have made different calls before, and are compared
        plan = cut_plan(names_of(model), [0, 1, 2, 3], [1, 1, 1, 1], 5, 20, schedule=schedule)
        data, evaluations = batches([100, 100, 70, 100], WIDTH), batches([60], WIDTH)
        # A layer that counts its calls cannot be compared with another run of itself.
        judge(plan, copy.deepcopy(model), data, evaluations=evaluations, verify="off")


SCENES = {name: scene for name, scene in sorted(globals().items()) if name.startswith("scene_")}


def play(rank):
    for scene in SCENES.values():
        scene(rank)
        torch.distributed.barrier()
    return list(SCENES)


def freeze_and_thaw(rank):
    """Gradual unfreezing: the optimizer and the other replicas would not know."""
    model = plain_chain()
    model.l1.requires_grad_(False)
    plan = cut_plan(names_of(model), [0, 2], [1, 1], 2, 4)
    with Pipeline(plan, model.double(), mean_square, adamw) as pipeline:
        data = batches([8], WIDTH)[0]
        pipeline.step(*data)
        if rank == 0:
            pipeline.model.requires_grad_(True)
        pipeline.step(*data)


class Longest(nn.Module):
    def forward(self, x):
        return x, x.mean().item()


def send_other_numbers(rank):
    """The mean of a replica's rows is not the mean of the microbatch."""
    model = Chain(linear(), Longest(), Last())
    plan = cut_plan(names_of(model), [0, 2], [2, 1], 1, 8)
    with Pipeline(plan, model.double(), mean_square, adamw) as pipeline:
        pipeline.step(*batches([8], WIDTH)[0])


class Colour(enum.IntEnum):
    RED = 1


def test_an_enum_does_not_become_a_number():
    with pytest.raises(RuntimeMismatchError, match="here: a Colour cannot cross a cut"):
        take_tensors((torch.zeros(1), Colour.RED), "here")


@pytest.mark.parametrize(
    ("program", "num_ranks", "problem"),
    [
        (freeze_and_thaw, 2, "parameter l1.0.weight: was frozen when the pipeline was made"),
        (send_other_numbers, 3, "microbatch 0: rank 0 sends the plain values"),
    ],
)
def test_what_cannot_be_right_is_refused(tmp_path, program, num_ranks, problem):
    errors = tmp_path / "errors"
    with Ranks(num_ranks, program, stderr=errors) as ranks:
        assert all(ranks.wait(60))
        text = errors.read_text() + "".join(ranks.error(rank) for rank in range(num_ranks))
    assert problem in text


def test_all_scenes():
    assert run_ranks(NUM_RANKS, play, timeout_s=180)[0] == list(SCENES)
