"""Models of plausible but unkind users: each is trained rightly, or refused with one line."""

import contextvars
import functools
import random
from collections import OrderedDict

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from runtime.judging import Subject, find_error, find_refusal  # noqa: E402
from runtime.samples import Block, TinyLanguageModel, mlp_loss, token_loss  # noqa: E402

LIST = ("before", "blocks.0", "blocks.1", "blocks.2", "behind")
CASES = {}


def case(*cut_lists, names=None, expect="right", random=False, recomputes=True):
    """Register a subject: its cuts, and whether it is trained rightly or refused."""

    def register(make):
        for cuts in cut_lists:
            for recompute in (False, True) if recomputes else (False,):
                key = f"{make.__name__}-{'-'.join(map(str, cuts))}{'-recompute' * recompute}"
                CASES[key] = (make, names, list(cuts), recompute, expect, random)
        return make

    return register


def linear():
    return nn.Linear(6, 6)


def rows(model, loss_fn=mlp_loss):
    generator = torch.Generator().manual_seed(7)
    data = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
    return Subject(model, loss_fn, *data)


def words(model, loss_fn=token_loss):
    tokens = torch.randint(17, (4, 6), generator=torch.Generator().manual_seed(3))
    return Subject(model, loss_fn, tokens[:, :-1], tokens[:, 1:])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        return torch.tanh(self.linear(x))


# ------------------------------------------------------------------ Python state between layers

CURRENT = contextvars.ContextVar("current", default=None)
REGISTRY = {}


class Strided(nn.Module):
    """Reads the memory of its input as it lies there, and leaves columns of rows behind."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        lying = x.as_strided(x.shape, (x.shape[1], 1)) if x.storage_offset() == 0 else x
        return self.linear(lying).t().contiguous().t()


@case((0, 2), (0, 1, 3), expect="refused")
def strides_are_read():
    return rows(nn.Sequential(linear(), *(Strided() for _ in range(3))))


@case((0, 2), (0, 1), expect="refused")
def contextvar_carries_activations():
    class Sets(Layer):
        def forward(self, x):
            CURRENT.set(x)
            return super().forward(x)

    class Gets(Layer):
        def forward(self, x):
            return super().forward(x) + CURRENT.get()

    return rows(nn.Sequential(Sets(), Layer(), Gets()))


@case((0, 2), expect="refused")
def registry_of_modules():
    class Borrows(Layer):
        """Uses the first layer's weight, which it finds in a registry."""

        def forward(self, x):
            return F.linear(super().forward(x), REGISTRY["first"].linear.weight)

    REGISTRY["first"] = Layer()
    return rows(nn.Sequential(REGISTRY["first"], Layer(), Borrows()))


@case((0, 2), expect="refused")
def forward_hook_captures_activations():
    seen = []
    model = nn.Sequential(Layer(), Layer(), Layer())
    model[0].register_forward_hook(lambda m, a, out: seen.append(out))
    model[2].register_forward_hook(lambda m, a, out: out + seen.pop())
    return rows(model)


def halve(module, inputs, outputs):
    return (inputs[0] * 0.5,)


@case((0, 1), (0, 2))
def hooks_that_stay_in_their_layer():
    model = nn.Sequential(Layer(), Layer(), Layer())
    for layer in model:
        layer.register_forward_pre_hook(lambda m, args: (args[0] * 0.9,))
        layer.register_forward_hook(lambda m, args, out: out * 1.1)
        layer.linear.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    for layer in model[1:]:
        layer.linear.register_full_backward_hook(halve)
    return rows(model)


@case((0, 1), (0, 2))
def tensors_stored_on_self():
    class Remembers(Layer):
        def forward(self, x):
            self.last = super().forward(x)
            self.history = [*getattr(self, "history", []), self.last]
            return self.last + self.history[-1]

    return rows(nn.Sequential(Remembers(), Remembers(), Remembers()))


@case((0, 1), expect="refused")
def layer_reads_a_neighbours_attribute():
    class Remembers(Layer):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    class Peeks(Layer):
        def __init__(self, other):
            super().__init__()
            self.other = [other]

        def forward(self, x):
            return super().forward(x) * self.other[0].last.mean()

    first = Remembers()
    return rows(nn.Sequential(first, Peeks(first)))


@functools.cache
def table(width):
    return torch.linspace(-1, 1, width)


@case((0, 1), (0, 2))
def cache_of_constants():
    class Shifted(Layer):
        def forward(self, x):
            return super().forward(x) + table(x.shape[-1])

    return rows(nn.Sequential(Shifted(), Shifted(), Shifted()))


COUNTER = {"calls": 0}


@case((0, 1), expect="refused")
def global_counter_of_the_first_layer():
    class Ticks(Layer):
        def forward(self, x):
            COUNTER["calls"] += 1
            return super().forward(x)

    class Anneals(Layer):
        def forward(self, x):
            return super().forward(x) / (1 + COUNTER["calls"])

    COUNTER["calls"] = 0
    return rows(nn.Sequential(Ticks(), Anneals()))


@case((0, 1), expect="refused")
def state_for_the_backward_is_overwritten_by_the_next_microbatch():
    class Late(Layer):
        def forward(self, x):
            self.mean = x.mean().item()
            y = super().forward(x)
            y.register_hook(lambda g: g * self.mean)
            return y

    return rows(nn.Sequential(Late(), Late()))


# ------------------------------------------------------------------ gradients


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


@case((0, 1), (0, 2))
def gradient_reversal():
    class Reverses(Layer):
        def forward(self, x):
            return Reverse.apply(super().forward(x))

    return rows(nn.Sequential(Layer(), Reverses(), Layer()))


@case((0, 1), expect="refused")
def backward_inside_a_forward():
    class Local(Layer):
        """Learns by a loss of its own, at once."""

        def forward(self, x):
            y = super().forward(x.detach())
            if torch.is_grad_enabled():
                y.square().mean().backward()
            return y.detach()

    return rows(nn.Sequential(Local(), Local(), Layer()))


@case((0, 1), expect="refused")
def loss_divided_by_itself():
    """Its value is a mean over rows, its gradient is not."""

    def loss_fn(output, targets):
        loss = mlp_loss(output, targets)
        return loss / loss.detach()

    return rows(nn.Sequential(Layer(), Layer()), loss_fn)


@case((0, 1), (0, 2))
def no_grad_blocks_and_detach():
    class Stops(Layer):
        def forward(self, x):
            with torch.no_grad():
                y = super().forward(x)
            return self.linear(x) + y + x.detach()

    return rows(nn.Sequential(Layer(), Stops(), Layer()))


@case((0, 1), (0, 2))
def frozen_layers():
    model = nn.Sequential(Layer(), Layer(), Layer())
    model[0].requires_grad_(False)
    model[2].linear.bias.requires_grad_(False)
    return rows(model)


@case((0, 1), (0, 2))
def straight_through():
    class Rounds(Layer):
        def forward(self, x):
            y = super().forward(x)
            return y + (y.round() - y).detach()

    return rows(nn.Sequential(Rounds(), Rounds(), Rounds()))


@case((0, 1), expect="refused")
def weight_used_by_a_function_of_another_stage():
    model = nn.Sequential(Layer(), Layer())
    weight = model[0].linear.weight

    class Projects(Layer):
        def forward(self, x):
            return super().forward(x) @ weight

    return rows(nn.Sequential(model[0], Projects()))


@case((0, 1), (0, 2), (0, 1, 2))
def one_submodule_in_two_layers():
    model = nn.Sequential(Layer(), Layer(), Layer())
    model[2].linear = model[0].linear
    return rows(model)


@case((0, 1), (0, 2), (0, 1, 3))
def one_module_many_times():
    layer, act = linear(), nn.Tanh()
    return rows(nn.Sequential(layer, act, layer, act))


@case((0, 1), (0, 2))
def tied_and_transposed():
    model = nn.Sequential(Layer(), Layer(), Layer())
    model[2].linear.weight = model[0].linear.weight
    return rows(model)


@case((0, 1), (0, 2))
def zero_last_layer():
    model = nn.Sequential(Layer(), Layer(), linear())
    nn.init.zeros_(model[2].weight)
    return rows(model)


@case((0, 1), (0, 3), names=LIST, expect="refused")
def gate_at_zero():
    """What a cut loses counts nothing at first, since its gate is zero."""

    class Gated(TinyLanguageModel):
        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(()))

        def forward(self, tokens):
            first = x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x + torch.nan_to_num(first) * self.gate))

    return words(Gated())


@case((0, 1), names=("a", "b"), expect="refused")
def gate_between_modules_at_zero():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Layer(), Layer()
            self.a.gate = nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return self.b(self.a(x) + self.a.gate * x.square())

    return rows(Gated())


@case((0, 1), (0, 2))
def own_parameter_groups_of_weight_norm():
    return rows(nn.Sequential(*(nn.utils.parametrizations.weight_norm(linear()) for _ in "123")))


# ------------------------------------------------------------------ control flow


@case((0, 1), (0, 2))
def different_in_training_and_evaluation():
    class Modal(Layer):
        def forward(self, x):
            return super().forward(x) if self.training else x

    return rows(nn.Sequential(Modal(), Modal(), Modal()))


@case((0, 1), (0, 3), names=LIST, expect="refused")
def past_the_layers_in_evaluation_only():
    class Modal(TinyLanguageModel):
        def forward(self, tokens):
            first = x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x if self.training else x + first))

    return words(Modal())


@case((0, 2), names=LIST, expect="refused")
def branch_on_values_of_another_stage():
    class Branches(TinyLanguageModel):
        def forward(self, tokens):
            x = self.embed(tokens)
            is_large = bool(x.abs().max() > 0)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x)) * (2.0 if is_large else 1.0)

    return words(Branches())


@case((0, 2), (0, 3), names=LIST)
def branch_on_inputs():
    class Branches(TinyLanguageModel):
        def forward(self, tokens):
            x = self.embed(tokens)
            scale = 2.0 if bool((tokens > 3).any()) else 1.0
            for block in self.blocks:
                x = block(x) * scale
            return self.head(self.norm(x))

    return words(Branches())


@case((0, 2), names=LIST, expect="refused")
def layers_run_twice():
    class Twice(TinyLanguageModel):
        def forward(self, tokens):
            x = self.embed(tokens)
            for _ in range(2):
                for block in self.blocks:
                    x = block(x)
            return self.head(self.norm(x))

    return words(Twice())


@case((0, 2), (0, 4), names=LIST, expect="refused")
def layers_run_backwards():
    class Reversed(TinyLanguageModel):
        def forward(self, tokens):
            x = self.embed(tokens)
            for block in reversed(self.blocks):
                x = block(x)
            return self.head(self.norm(x))

    return words(Reversed())


@case((0, 2), (0, 3), names=LIST, random=True)
def stochastic_depth_inside_layers():
    class Deep(Block):
        def forward(self, x):
            if self.training and random.random() < 0.5:
                return x + torch.rand_like(x) * 0.1
            return super().forward(x)

    model = TinyLanguageModel()
    model.blocks = nn.ModuleList(Deep() for _ in range(3))
    return words(model)


@case((0, 2), (0, 1), names=LIST, random=True)
def noise_between_layers():
    class Noisy(TinyLanguageModel):
        def forward(self, tokens):
            x = F.dropout(self.embed(tokens), 0.1, self.training)
            for block in self.blocks:
                x = block(x) + 0.01 * torch.randn_like(x)
            return self.head(self.norm(x))

    return words(Noisy())


@case((0, 2), names=LIST, expect="refused", random=True)
def one_random_mask_for_all_layers():
    class Variational(TinyLanguageModel):
        def forward(self, tokens):
            x = self.embed(tokens)
            mask = torch.bernoulli(torch.full(x.shape[-1:], 0.8)) / 0.8
            for block in self.blocks:
                x = block(x) * mask
            return self.head(self.norm(x))

    return words(Variational())


# ------------------------------------------------------------------ kinds of values


@case((0, 1), (0, 2))
def outputs_are_dicts():
    class Dicts(Layer):
        def forward(self, value):
            x = value["x"] if isinstance(value, dict) else value
            return {"x": super().forward(x), "depth": 1, "names": ["a", None]}

    return rows(nn.Sequential(Dicts(), Dicts(), Dicts()), lambda out, t: mlp_loss(out["x"], t))


@case((0, 1), (0, 2))
def in_place_edits():
    class Edits(Layer):
        def forward(self, x):
            x += 1
            return self.linear(x).mul_(0.5)

    return rows(nn.Sequential(linear(), Edits(), Edits()))


@case((0, 1), (0, 2), names=LIST)
def edits_between_layers():
    class Edits(TinyLanguageModel):
        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
                x += 0.5
            return self.head(self.norm(x))

    return words(Edits())


@case((0, 1), expect="refused", recomputes=False)
def views_of_one_tensor_cross_the_cut():
    class Splits(Layer):
        def forward(self, x):
            y = super().forward(x) * 1.0
            return y[:, :4], y[:, 2:]

    class Shifts(nn.Module):
        def forward(self, parts):
            first, second = parts
            first.data.add_(1.0)
            return torch.cat([first, second[:, :2]], 1)

    return rows(nn.Sequential(Splits(), Shifts(), Layer()))


@case((0, 1), expect="refused", recomputes=False)
def a_kept_tensor_crosses_the_cut():
    class Keeps(Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("last", torch.zeros(2, 6), persistent=False)

        def forward(self, x):
            y = super().forward(x) + self.last.sum()
            self.last = torch.zeros_like(y)
            return y, self.last

    class Writes(Layer):
        def forward(self, parts):
            parts[1].add_(parts[0].detach())
            return super().forward(parts[0])

    return rows(nn.Sequential(Keeps(), Writes()))


@case((0, 1), (0, 2))
def nested_sequentials():
    return rows(nn.Sequential(nn.Sequential(linear(), nn.ReLU(inplace=True)), Layer(), Layer()))


@case((0, 1), (0, 2))
def batch_norm_with_momentum():
    return rows(
        nn.Sequential(linear(), nn.BatchNorm1d(6, momentum=None), nn.BatchNorm1d(6, momentum=0.5))
    )


@case((0, 1), (0, 2))
def moving_codebook():
    """Its output depends on a buffer that each forward changes."""

    class Codebook(Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.randn(5, 6))

        def forward(self, x):
            y = super().forward(x)
            nearest = torch.cdist(y, self.codes).argmin(-1)
            with torch.no_grad():
                self.codes[nearest] = 0.9 * self.codes[nearest] + 0.1 * y
            return y + (self.codes[nearest] - y).detach()

    return rows(nn.Sequential(Codebook(), Codebook(), Codebook()))


@case((0, 1), expect="refused", recomputes=False)
def parameter_of_the_loss_in_a_closure():
    """Nobody sums its gradient; here it is a weight of the first stage."""
    model = nn.Sequential(Layer(), Layer())

    def loss_fn(output, targets):
        return mlp_loss(output, targets) + model[0].linear.bias.square().sum()

    return rows(model, loss_fn)


@case((0, 1), (0, 2), names=LIST)
def parameters_of_the_model_itself():
    class Own(TinyLanguageModel):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.ones(12))

        def forward(self, tokens):
            x = self.embed(tokens) + self.shift
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x)) + self.shift.sum()

    return words(Own())


# ------------------------------------------------------------------ activation checkpoints


def checkpointed(use_reentrant, shared):
    class Checkpointed(TinyLanguageModel):
        def __init__(self):
            super().__init__()
            if shared:
                self.blocks[2].feed = self.blocks[1].feed

        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return self.head(self.norm(x))

    return words(Checkpointed())


@case((0, 2), (0, 3), (0, 4), names=LIST)
def checkpoints():
    return checkpointed(False, False)


@case((0, 2), (0, 3), names=LIST)
def checkpoints_with_shared_weights():
    return checkpointed(False, True)


@case((0, 2), (0, 4), names=LIST, expect="refused")
def reentrant_checkpoints():
    return checkpointed(True, True)


@case((0, 1), names=LIST, expect="refused")
def checkpoint_around_the_entrance():
    return checkpointed(False, False)


@case((0, 1), (0, 2))
def checkpoints_inside_layers():
    class Inside(Layer):
        def __init__(self, reentrant):
            super().__init__()
            self.reentrant = reentrant

        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=self.reentrant)

    model = nn.Sequential(linear(), Inside(True), Inside(False))
    model[2].linear = model[1].linear
    return rows(model)


@pytest.mark.parametrize("key", CASES)
def test_right_or_refused(key):
    make, names, cuts, recompute, expected, is_random = CASES[key]

    def fresh():
        torch.manual_seed(0)
        CURRENT.set(None)
        return make()

    refusal = find_refusal(fresh, names, cuts, recompute=recompute)
    if refusal is None and not is_random:
        assert find_error(fresh, names, cuts, recompute=recompute) is None
    assert (refusal is not None) == (expected == "refused"), refusal
    assert refusal is None or "\n" not in refusal


def test_state_dicts_keep_their_names():
    """Nothing that the comparison needs stays in the model."""
    torch.manual_seed(0)
    subject = rows(nn.Sequential(OrderedDict(a=Layer(), b=Layer())))
    names = list(subject.model.state_dict())
    assert find_refusal(lambda: subject, None, [0]) is None
    assert list(subject.model.state_dict()) == names
