"""Models that remember, in containers, code, parameters and generators: right, or refused."""

import collections
import functools
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from pipeplan.runtime.random_state import keeping_random_state, seed_all  # noqa: E402
from runtime.judging import Subject, find_error, find_refusal  # noqa: E402
from runtime.samples import mlp_loss  # noqa: E402

GLOBALS = {}
COUNT = 0


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def subject(*layers, loss_fn=mlp_loss):
    """A function that makes a model with these layers, anew each time."""

    def make():
        global COUNT
        GLOBALS.clear()
        COUNT = 0
        InClass.count = 0
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(7)
        data = [torch.randn(4, 6, generator=generator) for _ in range(2)]
        loss = loss_fn() if isinstance(loss_fn, type) else loss_fn
        return Subject(nn.Sequential(*(layer() for layer in layers)), loss, *data)

    return make


class InObject(Layer):
    class Box:
        count = 0

    def __init__(self):
        super().__init__()
        self.box = self.Box()

    def forward(self, x):
        self.box.count += 1
        return super().forward(x) * self.box.count


class InNestedLists(Layer):
    def __init__(self):
        super().__init__()
        self.seen = {"counts": [0]}

    def forward(self, x):
        self.seen["counts"][0] += 1
        return super().forward(x) * self.seen["counts"][0]


class InDeque(Layer):
    def __init__(self):
        super().__init__()
        self.last = collections.deque(maxlen=2)

    def forward(self, x):
        y = super().forward(x)
        self.last.append(y.detach().mean())
        return y + sum(self.last)


class InTensorOfList(Layer):
    def __init__(self):
        super().__init__()
        self.sums = [torch.zeros(6)]

    def forward(self, x):
        y = super().forward(x)
        self.sums[0] += y.detach().mean(0)
        return y + self.sums[0]


class InLossModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(6), 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, output, targets):
        self.calls += 1
        self.total += 1
        return F.mse_loss(self.norm(output), targets) * self.calls


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("layer", [InObject, InNestedLists, InDeque, InTensorOfList])
def test_what_attributes_hold_is_kept(layer, recompute):
    make = subject(Layer, layer, Layer)
    assert find_refusal(make, None, [0, 1], recompute=recompute) is None
    assert find_error(make, None, [0, 1], recompute=recompute) is None


@pytest.mark.parametrize("recompute", [False, True])
def test_loss_modules_remember(recompute):
    make = subject(Layer, Layer, loss_fn=InLossModule)
    assert find_refusal(make, None, [0, 1], recompute=recompute) is None
    assert find_error(make, None, [0, 1], recompute=recompute) is None


class InClass(Layer):
    count = 0

    def forward(self, x):
        InClass.count += 1
        return super().forward(x) * InClass.count


class InGlobal(Layer):
    def forward(self, x):
        global COUNT
        COUNT += 1
        return super().forward(x) * COUNT


class InGlobalDict(Layer):
    """Remembers the first rows that it sees."""

    def forward(self, x):
        y = super().forward(x)
        if "mean" not in GLOBALS:
            GLOBALS["mean"] = y.detach().mean(0)
        return y - GLOBALS["mean"]


def in_closure():
    count = 0

    class Encloses(Layer):
        def forward(self, x):
            nonlocal count
            count += 1
            return super().forward(x) * count

    return Encloses()


@pytest.mark.parametrize("layer", [InClass, InGlobal, InGlobalDict, in_closure])
def test_what_code_remembers_is_put_back(layer):
    make = subject(Layer, layer, Layer)
    assert find_refusal(make, None, [0, 1]) is None
    assert find_error(make, None, [0, 1]) is None
    fresh = make()
    assert find_refusal(lambda: fresh, None, [0]) is None  # one stage, one model
    assert (COUNT, InClass.count, GLOBALS) == (0, 0, {})


@pytest.mark.parametrize("layer", [InClass, InGlobal])
def test_what_code_of_two_stages_shares_is_refused(layer):
    assert find_refusal(subject(layer, Layer, layer), None, [0, 1]) is not None


class Cached(Layer):
    """Keeps what it computes from a parameter; the comparison must not leave another value."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    @functools.cached_property
    def doubled(self):
        return 2 * self.scale.detach()

    @functools.lru_cache  # noqa: B019
    def tripled(self):
        return 3 * self.scale.detach()

    def forward(self, x):
        return super().forward(x) * self.doubled + self.tripled()


def test_the_comparison_fills_no_cache_with_other_values():
    make = subject(Layer, Cached, Layer)
    made = make()
    assert find_refusal(lambda: made, None, [0]) is None
    assert torch.equal(made.model[1].tripled(), 3 * torch.ones(6))


class Unseeded(Layer):
    def forward(self, x):
        import os

        return super().forward(x) + os.urandom(1)[0] / 100


def test_randomness_without_a_seed_is_named():
    refusal = find_refusal(subject(Layer, Unseeded, Layer), None, [0, 1])
    assert "gives another result for the same rows when it runs again" in refusal


class OwnGenerator(Layer):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return super().forward(x) + torch.rand(x.shape, generator=self.generator)


def test_generators_of_layers_are_as_before():
    made = subject(Layer, OwnGenerator, Layer)()
    expected = made.model[1].generator.get_state()
    assert find_refusal(lambda: made, None, [0]) is None
    assert torch.equal(made.model[1].generator.get_state(), expected)


class Teacher(Layer):
    """A moving average of another layer's weights, kept as parameters."""

    def __init__(self):
        super().__init__()
        self.average = nn.Linear(6, 6).requires_grad_(False)
        self.average.load_state_dict(self.linear.state_dict())

    def forward(self, x):
        with torch.no_grad():
            self.average.weight.lerp_(self.linear.weight, 0.1)
            average = self.average(x)
        return super().forward(x) + average


class Clamped(Layer):
    def forward(self, x):
        self.linear.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("layer", [Teacher, Clamped])
def test_parameters_that_a_forward_changes_are_not_recomputed(layer):
    refusal = find_refusal(subject(Layer, layer, Layer), None, [0, 1], recompute=True)
    assert "the forward changes it" in refusal


def test_averages_without_recomputation_are_right():
    make = subject(Layer, Teacher, Layer)
    assert find_refusal(make, None, [0, 1]) is None
    assert find_error(make, None, [0, 1]) is None


class InPlace(Layer):
    def forward(self, x):
        return super().forward(x.mul_(2.0))


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_that_change_the_batch(recompute):
    make = subject(InPlace, Layer, Layer)
    assert find_refusal(make, None, [0, 1], recompute=recompute) is None


def test_losses_without_gradients_are_refused():
    make = subject(Layer, Layer, loss_fn=lambda output, targets: mlp_loss(output, targets).detach())
    assert "its loss has no gradient" in find_refusal(make, None, [0, 1])


def test_the_generators_of_a_program_stay_as_they_are():
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed_all(5, torch.device("cpu"))
    expected = draw(), draw()
    seed_all(5, torch.device("cpu"))
    found = [draw()]
    with keeping_random_state(torch.device("cpu")):
        seed_all(7, torch.device("cpu"))
        inside = draw()
    with keeping_random_state(torch.device("cpu")):
        seed_all(7, torch.device("cpu"))
        assert draw() == inside
    assert (*found, draw()) == expected


def test_a_generator_of_its_own_is_named_as_such():
    class Draws(Layer):
        def __init__(self):
            super().__init__()
            self.generator = random.Random(0)

        def forward(self, x):
            return super().forward(x) + self.generator.random()

    refusal = find_refusal(subject(Draws, Layer), None, [0, 1])
    assert "draws from a source of its own" in refusal
