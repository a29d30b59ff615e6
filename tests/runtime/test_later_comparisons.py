"""Later comparisons of ranks do not refuse models with state, and training stays what it was.

Behind batch 1, 2, 4 and 8 each rank runs the whole model with what other ranks hold. So whatever
changes in layers while they are trained has to come along: buffers, numbers, modes, frozen weights.
"""

import contextlib
import copy
from dataclasses import replace
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402

from pipeplan.runtime import Pipeline, RuntimeMismatchError, add_loss  # noqa: E402
from pipeplan.runtime.verification import later_stages, rechecks  # noqa: E402
from runtime.samples import cut_plan  # noqa: E402
from runtime.workers import run_ranks  # noqa: E402

NAMES = list("0123")
STEPS = 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Counting(Layer):
    """Its scale depends on how often it was called in training."""

    def __init__(self):
        super().__init__()
        self.num_calls, self.scales = 0, [1.0]

    def forward(self, x):
        y = super().forward(x) * self.scales[-1]
        if self.training and torch.is_grad_enabled():
            self.num_calls += 1
        return y / (1.0 + 0.01 * self.num_calls)


class Averaging(Layer):
    """A moving average in a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x):
        y = super().forward(x) - self.mean
        if self.training and torch.is_grad_enabled():
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()  # another tensor each time
        return y


class Spectral(Layer):
    def __init__(self):
        super().__init__()
        parametrizations.spectral_norm(self.linear)


class Weighed(Layer):
    def __init__(self):
        super().__init__()
        parametrizations.weight_norm(self.linear)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round(decimals=1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Rounding(Layer):
    def forward(self, x):
        return Straight.apply(super().forward(x))


class Borrowing(Layer):
    def forward(self, x):
        weights = {"weight": self.linear.weight * 0.5, "bias": self.linear.bias}
        return torch.func.functional_call(self.linear, weights, (x,))


class Routing(Layer):
    """Its forward depends on what is in the rows, and adds a loss."""

    def forward(self, x):
        add_loss(0.1 * self.linear(x).square().mean())
        return torch.where(x.sum(1, keepdim=True) > 0, super().forward(x), x)


class Casting(Layer):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
        return x + y.float()


class Hooking(Layer):
    def __init__(self):
        super().__init__()
        self.linear.weight.register_hook(lambda gradient: gradient * 0.5)
        self.linear.register_forward_hook(lambda module, args, output: output * 2)


class Dropping(Layer):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(super().forward(x))


class ScaledLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, output, targets):
        return nn.functional.mse_loss(output * self.scale, targets)


def freeze_later(pipeline, step):
    if step == 2:
        for parameter in pipeline.model.parameters():
            parameter.requires_grad_(parameter.ndim > 1)


def drop_less_later(pipeline, step):
    for module in pipeline.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5 / (1 + step)
            if step == 4:
                module.eval()


def scale_later(pipeline, step):
    for module in pipeline.model.modules():
        if isinstance(module, Counting):
            module.scales.append(1.0 / (1 + step))


def tied():
    layers = [Layer() for _ in NAMES]
    layers[3].linear.weight = layers[0].linear.weight
    return layers


def each(kind):
    return lambda: [kind() for _ in NAMES]


MODELS = {
    "counting": (each(Counting), scale_later),
    "averaging": (each(Averaging), None),
    "spectral": (each(Spectral), None),
    "weight norm": (each(Weighed), freeze_later),
    "rounding": (each(Rounding), None),
    "functional": (each(Borrowing), freeze_later),
    "routing": (each(Routing), None),
    "autocast": (each(Casting), None),
    "hooks": (each(Hooking), None),
    "dropout": (each(Dropping), drop_less_later),
    "tied": (tied, None),
}


def make_batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


def train(plan, layers, change, verify):
    torch.manual_seed(0)
    model, loss_fn = nn.Sequential(*layers()), ScaledLoss()
    with Pipeline(
        plan, model, loss_fn, lambda p: torch.optim.SGD(p, lr=0.05), verify=verify
    ) as pipeline:
        losses = []
        for step in range(STEPS):
            if change is not None:
                change(pipeline, step)
            losses.append(pipeline.step(*make_batch(step), update=step % 3 != 1))
        weights = [copy.deepcopy(p.detach()) for p in pipeline.model.parameters()]
    dist.barrier()
    return losses, weights


def train_all(rank, replicas):
    found = {}
    plan = cut_plan(NAMES, [0, 2], replicas, 2, 4)
    for name, (layers, change) in MODELS.items():
        try:
            losses, weights = train(plan, layers, change, "first-step")
            others, same = train(plan, layers, change, "off")
            is_same = losses == others and all(map(torch.equal, weights, same))
            found[name] = "" if is_same else f"{losses} {others}"
        except RuntimeMismatchError as error:
            found[name] = str(error)
            dist.barrier()
    return found


@pytest.mark.parametrize("replicas", [[1, 1], [2, 1]])
def test_models_with_state_are_trained_as_without_comparisons(replicas, capfd):
    for found in run_ranks(sum(replicas), train_all, replicas):
        assert not {name: text for name, text in found.items() if text}
    assert "not refused" not in capfd.readouterr().err


def raise_of_memory(*_, **__):
    raise torch.OutOfMemoryError("out of memory: tried to allocate 80 GiB")


def without_room(rank, place):
    """Train where something does not fit on rank 1: the model, a microbatch of it, or both."""
    plan = cut_plan(NAMES, [0, 2], [1, 1], 2, 4)
    hungry = rank == 1
    size = 3 * sum(p.nbytes for p in nn.Sequential(*each(Layer)()).parameters())
    if place == "microbatch":
        layers = tuple(replace(layer, activation_bytes=1e6) for layer in plan.model.layers)
        plan = replace(plan, model=replace(plan.model, layers=layers))
        shortage = patch.object(rechecks, "_free_bytes", lambda _: size + 2e6 if hungry else 1e12)
    elif place == "model":
        shortage = patch.object(rechecks, "_free_bytes", lambda _: size if hungry else 1e12)
    else:
        module, name = {
            "late": (rechecks, "numbers_of_whole"),
            "later whole": (later_stages, "run_whole"),
            "later stage": (later_stages, "run_stage"),
        }[place]
        shortage = (
            patch.object(module, name, raise_of_memory) if hungry else contextlib.nullcontext()
        )
    with shortage:
        first = train(plan, each(Layer), None, "first-step")
    losses, weights = train(plan, each(Layer), None, "off")
    return losses == first[0] and all(map(torch.equal, weights, first[1]))


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("model", "the whole model does not fit into a rank's memory again, so ranks do not"),
        ("microbatch", "a microbatch of the whole model does not fit into a rank's memory, so"),
        ("late", "the whole model did not fit into a rank's memory, so ranks do not compare"),
        ("later whole", "the whole model did not fit into a rank's memory, so ranks do not"),
        ("later stage", "the whole model did not fit into a rank's memory, so ranks do not"),
    ],
)
def test_without_room_it_is_said_once_and_training_goes_on(place, line, capfd):
    assert run_ranks(2, without_room, place) == [True, True]
    told = [each for each in capfd.readouterr().err.splitlines() if each.startswith("pipeplan: ")]
    assert len(told) == 1
    assert told[0].startswith(f"pipeplan: {line}")
