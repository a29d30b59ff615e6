"""Layers that are hard to split, on ranks with several stages and shared-out optimizers.

Each model is trained by one plan and by one process; both have to agree, or the plan is refused.
"""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from pipeplan.errors import PipeplanError  # noqa: E402
from pipeplan.runtime import Pipeline  # noqa: E402
from runtime.samples import WIDTH, mlp_loss  # noqa: E402
from runtime.test_families import v_plan  # noqa: E402
from runtime.workers import run_ranks  # noqa: E402

NAMES = [str(i) for i in range(8)]


def lines(num=7):
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num)]


def stack(**places):
    """Eight layers: linear ones, and others at these places, such as `at3=...`."""
    layers = [*lines(), nn.Linear(WIDTH, 4)]
    for place, layer in places.items():
        layers[int(place.removeprefix("at"))] = layer
    return nn.Sequential(*layers)


class Doubling(torch.autograd.Function):
    """Keeps things for itself, and reads saved tensors twice."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.factor = [2.0]
        return 2 * x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, _ = ctx.saved_tensors
        _, weight = ctx.saved_tensors
        factor = ctx.factor.pop()  # a second run would find nothing
        return factor * gradient * weight, (factor * gradient * x).sum(0)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return Doubling.apply(x, self.weight)


class Sometimes(nn.Module):
    """Uses one of its weights for some rows only, and for some microbatches not at all."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        chosen = x[:, 0] > 0.4
        if not chosen.any():
            return self.always(x).tanh()
        return (self.always(x) + chosen[:, None] * self.sometimes(x)).tanh()


class Never(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.used(x).tanh()


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(torch.relu_(self.first(x))).add_(x).mul_(0.5)


class CheckpointedFunction(nn.Module):
    """A checkpoint around a function, in which no module is called."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x):
        return checkpoint(lambda y: (y @ self.weight).tanh(), x, use_reentrant=False)


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv1d(1, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.ReLU(True), nn.Conv1d(3, 1, 1)
        )

    def forward(self, x):
        return self.inner(x[:, None])[:, 0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        return self.inner(x.view(-1, 3, 4))[0].flatten(1)


class Odd(nn.Module):
    """A parameter without dimensions, one that is transposed, one that needs no gradient."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH + 1).t()[:WIDTH] / 3)
        self.fixed = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x):
        return (self.scale * (x @ self.turned + self.fixed)).tanh()


class Dicts(nn.Module):
    """Passes a dict on, with whole numbers and a list in it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if not isinstance(x, dict):
            x = {"values": [x, x.detach() * 2], "signs": (x[:, :1] > 0).long()}
        first, second = x["values"]
        new = self.inner(first).tanh() + second * x["signs"]
        return {"values": [new, second], "signs": 1 - x["signs"]}


class FromDict(nn.Linear):
    def forward(self, x):
        return super().forward(x["values"][0])


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.weight.register_hook(lambda gradient: gradient * 0.5)

    def forward(self, x):
        x = self.first(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 3)
        return self.second(x.sin())


def same_module():
    """One module at four places: twice on one rank, and on other ranks."""
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return stack(at0=layer, at2=layer, at3=layer, at6=layer)


def shared_weights():
    model = stack()
    for other in (2, 4, 6):
        model[other][0].weight = model[0][0].weight
    model[5][0].bias = model[3][0].bias
    return model


def frozen_stages():
    model = stack()
    for number in (0, 1, 2, 4):
        model[number].requires_grad_(False)
    return model


MODELS = {
    "own function": lambda: stack(at0=Own(), at2=Own(), at4=Own()),
    "sometimes": lambda: stack(at1=Sometimes(), at2=Sometimes(), at5=Sometimes()),
    "never": lambda: stack(at1=Never(), at4=Never(), at6=Never()),
    "in place": lambda: stack(at1=InPlace(), at2=InPlace(), at6=InPlace()),
    "checkpointed function": lambda: stack(at0=CheckpointedFunction(), at4=CheckpointedFunction()),
    "convolutions": lambda: stack(at1=Convolved(), at2=Convolved(), at4=Convolved()),
    "recurrent": lambda: stack(at0=Recurrent(), at2=Recurrent(), at6=Recurrent()),
    "odd parameters": lambda: stack(at1=Odd(), at3=Odd(), at6=Odd()),
    "dicts": lambda: stack(
        **{f"at{place}": Dicts() for place in range(1, 7)}, at7=FromDict(WIDTH, 4)
    ),
    "hooked": lambda: stack(at1=Hooked(), at3=Hooked(), at6=Hooked()),
    "normed": lambda: stack(
        at1=nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        at4=nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    ),
    "same module": same_module,
    "shared weights": shared_weights,
    "frozen stages": frozen_stages,
    "whole numbers": lambda: stack(at0=nn.Sequential(nn.Embedding(9, WIDTH), nn.Tanh())),
    "sparse": lambda: stack(at0=nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), nn.Tanh())),
}
MAY_REFUSE = {"sparse": "sparse"}


def batch_for(kind, step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)
    if kind in ("whole numbers", "sparse"):
        inputs = torch.randint(9, (8,), generator=generator)
    return inputs, torch.randn(8, 4, generator=generator, dtype=torch.float64)


def make(kind):
    torch.manual_seed(3)
    return MODELS[kind]().double()


def find_problems(kind, plan):
    """What differs from one process in two steps; or the refusal."""
    model, alone = make(kind), make(kind)  # a deep copy has no hooks
    found = []
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    try:
        with Pipeline(plan, model, mlp_loss, lambda p: torch.optim.AdamW(p, lr=0.01)) as pipeline:
            for step in range(3):
                inputs, targets = batch_for(kind, step)
                loss = pipeline.step(inputs, targets)
                optimizer.zero_grad()
                expected = mlp_loss(alone(inputs), targets)
                expected.backward()
                if abs(loss - expected.item()) > 1e-10:
                    found.append(f"step {step}: loss {loss}, not {expected.item()}")
                known = dict(alone.named_parameters(remove_duplicate=False))
                for name, parameter in pipeline.model.named_parameters():
                    other = known[name].grad
                    if (parameter.grad is None) != (other is None):
                        found.append(f"step {step}: {name} has a gradient on one side only")
                    elif other is not None and not (parameter.grad - other).abs().max() < 1e-10:
                        found.append(f"step {step}: gradient of {name}")
                optimizer.step()
                for name, parameter in pipeline.model.named_parameters():
                    if not (parameter - known[name]).abs().max() < 1e-9:
                        found.append(f"step {step}: value of {name}")
    except PipeplanError as error:
        return [f"refused: {error}"]
    return found


def attack(rank, kinds, plan):
    return {kind: find_problems(kind, plan) for kind in kinds}


def check(kinds, **changes):
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    shards = changes.pop("shard_optimizer", False)
    plan = replace(v_plan(NAMES, **changes), shard_optimizer=shards)
    for rank, found in enumerate(run_ranks(3, attack, kinds, plan, timeout_s=400)):
        for kind, problems in found.items():
            if kind in MAY_REFUSE and problems:
                assert MAY_REFUSE[kind] in problems[0], (rank, kind, problems)
            else:
                assert not problems, (rank, kind, problems)


def test_hard_layers_with_gradients_in_parts_and_a_sharded_optimizer():
    check(list(MODELS), gradient_buckets=3, shard_optimizer=True)


@pytest.mark.full
def test_hard_layers_with_recomputation():
    check(list(MODELS), recompute=True, gradient_buckets=5)


@pytest.mark.full
def test_hard_layers():
    check(list(MODELS))
