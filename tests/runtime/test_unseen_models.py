"""Models that trained wrongly without a word: each is right, or refused in one line."""

import copy

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from pipeplan.pipeline import Block as PlanBlock  # noqa: E402
from pipeplan.pipeline import Kind, Plan, Schedule, Stage  # noqa: E402
from pipeplan.runtime import Pipeline, RuntimeMismatchError  # noqa: E402
from pipeplan.runtime.root_watch import RootWatch  # noqa: E402
from pipeplan.runtime.verification.row_division import row_orders  # noqa: E402
from pipeplan.splitting import cut, lay_out  # noqa: E402
from runtime.judging import Subject, find_refusal  # noqa: E402
from runtime.samples import cut_plan  # noqa: E402
from runtime.small_layers import Layer, W, rows_of, tokens_of  # noqa: E402
from runtime.workers import run_ranks  # noqa: E402

CHAIN = list("0123")
LIST = ["before", "blocks.0", "blocks.1", "blocks.2", "behind"]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class Listed(nn.Module):
    num_rounds = 1

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(W, W)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(W, W)

    def forward(self, x):
        x = self.embed(x)
        for _ in range(self.num_rounds):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


# ------------------------------------------------------------------ rows that cannot be divided


class Turned(Layer):
    def forward(self, x):
        return super().forward(x).flip(0)


class Sorted(Layer):
    def forward(self, x):
        order = x[:, 0].argsort()
        return super().forward(x)[order], order.argsort()


class Pair(Layer):
    def forward(self, value):
        return super().forward(value[0]), value[1]


class Unsorted(Layer):
    def forward(self, value):
        return super().forward(value[0])[value[1]]


class Table(Layer):
    """Returns a parameter with as many rows as a microbatch has."""

    def __init__(self, num_rows):
        super().__init__()
        self.table = nn.Parameter(torch.randn(num_rows, W))

    def forward(self, x):
        return super().forward(x), self.table * 1.0


class Reading(Layer):
    def forward(self, value):
        return torch.tanh(self.linear(value[0]) + value[1].sum(0))


class Summing(Layer):
    def forward(self, x):
        return super().forward(x) + x.cumsum(0)


class TimeMajor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, W)
        self.blocks = nn.ModuleList(Summing() for _ in range(3))
        self.head = nn.Linear(W, 11)

    def forward(self, tokens):
        x = self.embed(tokens).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(0, 1)


def token_loss(output, targets):
    return F.cross_entropy(output.reshape(-1, 11), targets.reshape(-1))


def chain(*layers):
    return lambda: nn.Sequential(*(make() for make in layers))


def with_norm():
    """Its rows meet in training, and in a layer without statistics in evaluation too."""
    return nn.Sequential(Layer(), nn.BatchNorm1d(W), Layer(), Layer())


def with_batch_norm():
    return nn.Sequential(Layer(), nn.BatchNorm1d(W, track_running_stats=False), Layer(), Layer())


ORDER, SHAPE = "has its rows in another order", "has the shape"
DIVIDED = {
    "turned": (chain(Layer, Turned, Turned, Layer), CHAIN, rows_of, ORDER),
    "sorted": (chain(Sorted, Pair, Unsorted, Layer), CHAIN, rows_of, ORDER),
    "table": (chain(Layer, lambda: Table(2), Reading, Layer), CHAIN, rows_of, SHAPE),
    "row": (chain(Layer, lambda: Table(1), Reading, Layer), CHAIN, rows_of, SHAPE),
    "time": (TimeMajor, LIST, lambda step: tokens_of(step, 8, 3), SHAPE),
    "longer": (TimeMajor, LIST, lambda step: tokens_of(step, 8, 5), SHAPE),
    "norm": (with_norm, CHAIN, rows_of, ""),
    "batch norm": (with_batch_norm, CHAIN, rows_of, ""),
    "plain": (chain(Layer, Layer, Layer, Layer), CHAIN, rows_of, ""),
}


def outcome(plan, make, data, loss_fn=F.mse_loss, before=None, steps=3):
    """What is said in which step; or the largest difference to ordinary training."""
    torch.manual_seed(1)
    model, text, step, pipeline = make(), "", 0, None
    reference, other_loss = copy.deepcopy((model, loss_fn))
    losses = []
    try:
        pipeline = Pipeline(plan, model, loss_fn, sgd)
        for step in range(steps):
            if before is not None:
                before(model, step)
            losses.append(pipeline.step(*data(step)))
    except RuntimeMismatchError as error:
        text = str(error)
    dist.barrier()
    if pipeline is not None:
        pipeline.close()
    if text:
        return text, step
    more = other_loss.parameters() if isinstance(other_loss, nn.Module) else ()
    optimizer = sgd([*reference.parameters(), *more])
    worst = 0.0
    for step in range(steps):
        inputs, targets = data(step)
        optimizer.zero_grad()
        loss = other_loss(reference(inputs), targets)
        loss.backward()
        optimizer.step()
        worst = max(worst, abs(loss.item() - losses[step]))
    return "", worst


def divide(rank):
    found = {}
    for name, (make, names, data, _) in DIVIDED.items():
        for replicas in ([1, 2], [2, 1]):
            num_parts = 2 if "norm" in name else 4  # a norm needs two rows on each replica
            plan = cut_plan(names, [0, 2], replicas, num_parts, 8 // num_parts)
            loss_fn = token_loss if names is LIST else F.mse_loss
            found[name, tuple(replicas)] = outcome(plan, make, data, loss_fn)
    return found


def test_rows_that_replicas_cannot_divide_are_refused():
    first, *others = run_ranks(3, divide)
    for (name, replicas), (text, number) in first.items():
        expected = DIVIDED[name][3]
        assert expected in text, (name, replicas, text)
        assert bool(text) == bool(expected), (name, text)
        assert "\n" not in text
        if name == "plain":
            assert number < 1e-5
    for other in others:
        assert {key: text for key, (text, _) in other.items()} == {
            key: text for key, (text, _) in first.items()
        }


def test_orders_of_rows_differ_from_each_other():
    assert row_orders(1) == []
    assert row_orders(2) == [(0, 1), (1, 0), (1,)]
    assert row_orders(4) == [(0, 1, 2, 3), (3, 1, 2)]


# ------------------------------------------------------------------ what changes later


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, W)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(W, 11)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def ignored_later(step):
    tokens, labels = tokens_of(step)
    labels = labels.clone()
    if step >= 1:
        labels[0, 1:] = -100
    return (tokens, labels), labels


def take_output(output, targets):
    return output


def loop_twice(model, step):
    model.num_rounds = 1 if step < 3 else 2


class Scaled(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, output, targets):
        return F.mse_loss(output * self.scale, targets)


def split_plan(names):
    """Two ranks with two stages each, and backwards in two halves."""
    order = [[], []]
    for microbatch in range(2):
        for stage in range(4):
            order[stage % 2].append(PlanBlock(Kind.FORWARD, stage, microbatch))
    for kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT):
        for microbatch in range(2):
            for stage in reversed(range(4)):
                order[stage % 2].append(PlanBlock(kind, stage, microbatch))
    plan = cut_plan(names, [0, 1, 2, 3], [1, 1, 1, 1], 2, 4)
    return Plan(
        model=plan.model,
        cluster=cut_plan(names, [0, 1], [1, 1], 2, 4).cluster,
        microbatches=2,
        stages=tuple(
            Stage(layers=range(index, index + 1), devices=(index % 2,)) for index in range(4)
        ),
        schedule=Schedule(order),
        planner="test",
    )


def change_later(rank):
    listed = cut_plan(LIST, [0, 2], [1, 1], 2, 4)
    layers = chain(Layer, Layer, Layer, Layer)
    return {
        "loops": outcome(listed, Listed, rows_of, before=loop_twice, steps=5),
        "labels": outcome(listed, OwnLoss, ignored_later, take_output),
        "loss": outcome(split_plan(CHAIN), layers, rows_of, Scaled()),
    }


def test_changes_in_later_steps_are_refused():
    for found in run_ranks(2, change_later):
        text, step = found["loops"]
        assert "calls the layer 'blocks.0' more than once" in text
        assert step == 3  # though ranks look by themselves at batch 4 only
        assert "the model's own loss is" in found["labels"][0]
        assert found["labels"][1] == 1
        assert found["loss"][0] == ""
        assert found["loss"][1] < 1e-5


def test_hooks_of_containers_are_refused_later():
    """A chain calls its layers alone, so such a hook would never run."""
    model = nn.Sequential(nn.Sequential(Layer(), Layer()), Layer())
    stage = cut(model, lay_out(model, ["0.0", "0.1", "1"]), range(1))
    stage.require_same_layers()
    for name, module in (("root", model), ("module '0'", model[0])):
        handle = module.register_forward_hook(lambda module, args, output: output * 2)
        with pytest.raises(RuntimeMismatchError, match=f"its {name} has got or lost a hook"):
            stage.require_same_layers()
        handle.remove()
    model[0][0].register_forward_hook(lambda module, args, output: output * 2)  # of a layer
    stage.require_same_layers()


def test_attributes_of_the_root_count_at_some_of_their_changes():
    model = Listed()
    watch = RootWatch([model])
    found = []
    for step in range(10):
        model.num_rounds = step
        found.append(watch.have_changed())
    assert [step for step, is_due in enumerate(found) if is_due] == [1, 2, 4, 8]
    assert not watch.have_changed()


# ------------------------------------------------------------------ operations between layers


class Named(nn.Module):
    """Three layers, and something between them that does nothing yet."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Layer(), Layer(), Layer()
        self.temperature = 1.0
        self.calls = 0

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class Clamped(Named):
    def forward(self, x):
        return self.c(self.b(self.a(x).clamp(-9, 9)))


class ClampedInPlace(Named):
    def forward(self, x):
        x = self.a(x)
        x.clamp_(-9, 9)
        return self.c(self.b(x))


class Masked(Named):
    def forward(self, x):
        x = self.a(x)
        x[x > 9] = 0
        return self.c(self.b(x))


class Dropped(Named):
    def forward(self, x):
        return self.c(F.dropout(self.b(self.a(x)), p=0.0, training=self.training))


class Tempered(Named):
    def forward(self, x):
        return super().forward(x) / self.temperature


class Cleaned(Named):
    def forward(self, x):
        return super().forward(torch.nan_to_num(x))


class Sliced(Named):
    def forward(self, x):
        return self.c(self.b(self.a(x)[:, :100]))


class Evaluated(Named):
    def forward(self, x):
        x = self.a(x)
        return self.c(self.b(x if self.training else x.clamp(-9, 9)))


class Subclassed(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = layer(x).clamp(-9, 9)
        return x


class Harmless(Named):
    """Looks at what passes, and leaves it as it is."""

    def forward(self, x):
        self.calls = len(x) + x.detach().abs().max().item()
        x = torch.utils.checkpoint.checkpoint(self.a, x.contiguous(), use_reentrant=False)
        x = torch.utils.checkpoint.checkpoint(self.b, x.to(x.dtype), use_reentrant=True)
        assert x.shape[1] == W
        return self.c(x)


def harmless():
    model = Harmless()
    model.a.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.b.register_forward_hook(lambda module, args, output: output.clamp(-9, 9))
    model.c.register_full_backward_hook(lambda module, given, got: None)
    return model


def hooked():
    model = nn.Sequential(Layer(), Layer(), Layer())
    model.register_forward_pre_hook(lambda module, args: (args[0].clamp(-9, 9),))
    return model


BETWEEN = {
    "clamp": (Clamped, "'clamp' on what passes from layer 'a' to layer 'b'"),
    "in place": (ClampedInPlace, "'clamp' on what passes from layer 'a' to layer 'b'"),
    "mask": (Masked, "'setitem' on what passes from layer 'a' to layer 'b'"),
    "dropout": (Dropped, "'dropout' on what passes from layer 'b' to layer 'c'"),
    "temperature": (Tempered, "'div' on what passes from layer 'c' to the model's output"),
    "nan": (Cleaned, "'nan_to_num' on what passes from the model's input to layer 'a'"),
    "slice": (Sliced, "on what passes from layer 'a' to layer 'b'"),
    "evaluation": (Evaluated, "'clamp' on what passes from layer 'a' to layer 'b'"),
    "subclass": (lambda: Subclassed(Layer(), Layer()), "'clamp' on what passes from layer '0'"),
    "hook of a container": (hooked, "'clamp' on what passes from the model's input"),
    "harmless": (harmless, None),
    "plain": (Named, None),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_operations_between_layers_of_a_chain_are_refused_whatever_they_do(name):
    make, expected = BETWEEN[name]

    def subject():
        torch.manual_seed(0)
        return Subject(make(), F.mse_loss, *rows_of(0, 4))

    names = [each for each, _ in make().named_children()]
    found = find_refusal(subject, names, [0, 1])
    if expected is None:
        assert found is None
    else:
        assert found.startswith("model: its forward works by ")
        assert expected in found
        assert "\n" not in found


# ------------------------------------------------------------------ classes of tensors


class Special(torch.Tensor):
    pass


class Typed(Layer):
    def forward(self, x):
        factor = 2.0 if isinstance(x, Special) else 1.0
        y = super().forward(x.as_subclass(torch.Tensor)) * factor
        return y.as_subclass(Special)


class Typing(Layer):
    """Returns a class of its own, which no layer asks for."""

    def forward(self, x):
        return super().forward(x.as_subclass(torch.Tensor)).as_subclass(Special)


def plain_loss(output, targets):
    return F.mse_loss(output.as_subclass(torch.Tensor), targets)


def test_messages_have_no_classes_of_tensors():
    def subject(kind):
        torch.manual_seed(0)
        return Subject(nn.Sequential(*(kind() for _ in range(3))), plain_loss, *rows_of(0, 4))

    assert "layer '1': its output is not" in find_refusal(lambda: subject(Typed), None, [0, 1])
    assert find_refusal(lambda: subject(Typing), None, [0, 1]) is None
