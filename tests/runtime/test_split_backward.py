"""A backward in two halves gives what a whole one gives, whatever the graph looks like."""

import random
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.autograd.graph import get_gradient_edge  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from pipeplan.splitting.split_backward import SavedBoxes, run_input_half  # noqa: E402
from runtime.samples import Block  # noqa: E402

ROWS, WIDTH = 5, 12


class Scale(torch.autograd.Function):
    """Changes what it has kept, as fused losses do; so it must not run twice."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.kept = [torch.ones_like(x), x.detach().clone()]
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        ctx.kept[0] *= gradient
        return ctx.kept[0] * ctx.weight, (ctx.kept[0] * ctx.kept[1]).sum(0)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return Scale.apply(x, self.weight)


class Shared(nn.Module):
    """One weight at two places, another one whose transpose is used, too."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = self.norm(self.inner(x).tanh())
        return self.norm(x @ self.inner.weight + self.inner.bias)


class MadeWeight(nn.Module):
    """A weight that is computed of others, one of which another layer uses."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x @ (self.left.tanh() @ self.right)
        return self.last(x * self.right[0])


class Hooked(nn.Module):
    """Hooks of tensors inside, of a weight, and of the module."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.weight.register_hook(lambda gradient: gradient * 0.5)
        self.second.register_full_backward_hook(lambda module, inside, out: (inside[0] * 2,))

    def forward(self, x):
        x = self.first(x)
        x.register_hook(lambda gradient: gradient * 3)
        return self.second(x.sin())


class HookedTwice(nn.Module):
    """A weight with a hook that is used at two places."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.weight.register_hook(lambda gradient: gradient * 0.5)

    def forward(self, x):
        return self.inner(self.inner(x).sin())


class Checkpointed(nn.Module):
    def __init__(self, *, is_reentrant):
        super().__init__()
        self.block, self.is_reentrant = Block(WIDTH), is_reentrant
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = checkpoint(self.block, x, use_reentrant=self.is_reentrant)
        return self.last(x)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(torch.relu_(self.first(x))).add_(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.requires_grad_(False)

    def forward(self, x):
        return self.second(self.first(x).relu())


class Beside(nn.Module):
    """Something that does not depend on the input, and what is not used at all."""

    def __init__(self):
        super().__init__()
        self.places, self.unused = nn.Parameter(torch.randn(3, WIDTH)), nn.Linear(2, 2)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.mix(self.places).mean(0), self.mix(self.places).sum() * torch.ones(len(x))


class Penalised(nn.Module):
    """A gradient inside of the forward, through which the backward goes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.first(x).tanh()
        (slope,) = torch.autograd.grad(y.sum(), y, create_graph=True)
        (more,) = torch.autograd.grad(self.second(y).pow(2).sum(), y, create_graph=True)
        return self.second(y) + slope + more


MODULES = {
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
    "blocks": lambda: nn.Sequential(Block(WIDTH), nn.Dropout(0.3), Block(WIDTH)),
    "one layer": lambda: nn.Linear(WIDTH, WIDTH),
    "no weights": lambda: nn.Tanh(),
    "convolutions": lambda: nn.Sequential(
        nn.Conv1d(ROWS, ROWS, 3, padding=1), nn.BatchNorm1d(ROWS), nn.ReLU(inplace=True)
    ),
    "normed": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    ),
    "scaled": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(), nn.Linear(WIDTH, WIDTH)),
    "shared": Shared,
    "made weight": MadeWeight,
    "hooked": Hooked,
    "hooked twice": HookedTwice,
    "checkpointed": lambda: Checkpointed(is_reentrant=False),
    "checkpointed re-entrantly": lambda: Checkpointed(is_reentrant=True),
    "in place": InPlace,
    "recurrent": Recurrent,
    "frozen": Frozen,
    "beside": Beside,
    "penalised": Penalised,
}


def run(module, inputs, *, is_split):
    """Outputs, gradients of inputs and of weights, over two microbatches."""
    module.zero_grad()
    boxes, found, halves = SavedBoxes(), [], []
    for number in range(2):
        torch.manual_seed(number)
        leaves = [x[number].detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        entered = [leaf.clone() for leaf in leaves]
        if is_split:
            with boxes.packing():
                outputs = module(*entered)
        else:
            outputs = module(*entered)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        roots = [
            (get_gradient_edge(y), torch.linspace(-1, 2, y.numel()).view(y.shape).to(y.dtype))
            for y in outputs
            if y.requires_grad
        ]
        found += [y.detach().clone() for y in outputs]
        del outputs
        if not is_split:
            if roots:
                torch.autograd.backward(*zip(*roots, strict=True))
            found += [leaf.grad for leaf in leaves]
        elif roots:
            gradients, half = run_input_half(roots, leaves, boxes)
            found += gradients
            halves.append(half)
        else:
            found += [None] * len(leaves)
        if is_split and number:
            for half in halves:
                half.run()
    return found + [p.grad for p in module.parameters()]


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_two_halves_give_what_a_whole_backward_gives(name, needs_gradient):
    torch.manual_seed(3)
    module = MODULES[name]().double()
    x = torch.randn(2, ROWS, ROWS, WIDTH, dtype=torch.float64, requires_grad=needs_gradient)
    if name == "checkpointed re-entrantly" and not needs_gradient:
        return  # torch itself gives no gradients then
    state = {key: value.clone() for key, value in module.state_dict().items()}
    whole = run(module, [x], is_split=False)
    module.load_state_dict(state)
    halves = run(module, [x], is_split=True)
    assert len(whole) == len(halves)
    for expected, got in zip(whole, halves, strict=True):
        assert (expected is None) == (got is None)
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def count_weight_gradients(module, x):
    """How many weights have a gradient after I, and after W."""
    boxes, counts = SavedBoxes(), []
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    with boxes.packing():
        y = module(leaf.clone())
    _, half = run_input_half([(get_gradient_edge(y), torch.ones_like(y))], [leaf], boxes)
    counts.append(sum(p.grad is not None for p in module.parameters()))
    half.run()
    counts.append(sum(p.grad is not None for p in module.parameters()))
    return counts


def test_weights_wait_for_their_half():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    assert count_weight_gradients(MODULES["mlp"](), x) == [0, 4]
    assert count_weight_gradients(MODULES["blocks"](), x[None]) == [0, 20]
    assert count_weight_gradients(Shared(), x) == [4, 4]  # each is used twice
    assert count_weight_gradients(MODULES["scaled"](), x) == [1, 5]


def test_each_weight_gets_its_gradient_once():
    module, seen = MODULES["mlp"](), []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(id(p)))
    count_weight_gradients(module, torch.randn(ROWS, WIDTH, requires_grad=True))
    assert sorted(seen) == sorted(map(id, module.parameters()))


class Square(nn.Module):
    """Saves its input for the input's gradient alone, and tells when it is freed."""

    def __init__(self):
        super().__init__()
        self.kept = None

    def forward(self, x):
        y = x * 2
        self.kept = weakref.ref(y.untyped_storage())
        return y * y


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_what_only_the_first_half_needs_is_freed(needs_gradient):
    first, square, last = nn.Linear(WIDTH, WIDTH), Square(), nn.Linear(WIDTH, WIDTH)
    module, boxes = nn.Sequential(first, square, last), SavedBoxes()
    leaf = torch.randn(ROWS, WIDTH, requires_grad=needs_gradient)
    with boxes.packing():
        y = module(leaf.clone())
    edge = get_gradient_edge(y)
    del y
    assert square.kept() is not None
    _, half = run_input_half([(edge, torch.ones(ROWS, WIDTH))], [leaf], boxes)
    assert square.kept() is None
    half.run()
    assert all(p.grad is not None for p in module.parameters())


def test_a_saved_tensor_that_changes_in_place_is_refused():
    boxes, leaf = SavedBoxes(), torch.randn(ROWS, requires_grad=True)
    with boxes.packing():
        x = leaf.clone()
        y = x.tanh()
        z = y.sin()
    y.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        run_input_half([(get_gradient_edge(z), torch.ones(ROWS))], [leaf], boxes)


def random_module(rng):
    """Any graph of a few weights and operations."""
    weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(4))

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = weights

        def forward(self, x):
            values = [x, *([weights[0] @ weights[1]] if steps[0][0] % 2 else [])]
            for kind, first, second, weight in steps:
                a, b = values[first % len(values)], values[second % len(values)]
                w = weights[weight]
                if kind == 0:
                    values.append(a @ w)
                elif kind == 1:
                    values.append(a.tanh() + b[:1] * 0.5)
                elif kind == 2:
                    values.append(a * w[0])
                elif kind == 3:
                    values.append(a @ (w.sin() @ w.t()))
                else:
                    values.append(torch.nn.functional.layer_norm(a, (WIDTH,), w[1], w[2]))
            return values[-1], values[len(values) // 2]

    steps = [
        (rng.randrange(5), rng.randrange(9), rng.randrange(9), rng.randrange(4)) for _ in range(8)
    ]
    return Graph()


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    module = random_module(rng).double()
    x = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, requires_grad=rng.random() < 0.6)
    whole, halves = run(module, [x], is_split=False), run(module, [x], is_split=True)
    for expected, got in zip(whole, halves, strict=True):
        assert (expected is None) == (got is None)
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
