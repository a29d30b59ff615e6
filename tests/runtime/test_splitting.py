"""Layers by name, and parts that together are the model."""

import copy
import itertools
import json
import re
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from pipeplan import measure  # noqa: E402
from pipeplan.errors import RuntimeMismatchError  # noqa: E402
from pipeplan.splitting import cut, holders, lay_out  # noqa: E402
from pipeplan.splitting.layout import LayoutKind  # noqa: E402
from pipeplan.splitting.nesting import map_tensors, put_tensors, take_tensors  # noqa: E402
from runtime.samples import Block, TinyLanguageModel, make_mlp  # noqa: E402

NAMES = ("before", "blocks.0", "blocks.1", "blocks.2", "behind")


def test_names_of_a_sequential_and_of_a_layer_list():
    assert lay_out(make_mlp()).names == ("0", "1", "2", "3", "4")
    assert lay_out(TinyLanguageModel()).names == NAMES


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("wrap", "remedy"),
    [
        (torch.compile, "wrapped by torch.compile; give the model itself, and call .compile()"),
        (nn.DataParallel, "wrapped by DataParallel; give the model itself"),
    ],
)
def test_a_wrapped_model_is_refused(wrap, remedy):
    with pytest.raises(RuntimeMismatchError, match=re.escape(remedy)):
        lay_out(wrap(TinyLanguageModel()), NAMES)


@pytest.mark.parametrize("names", [NAMES, NAMES[1:], NAMES[:-1], NAMES[1:-1]])
def test_surroundings_may_be_left_out(names):
    layout = lay_out(TinyLanguageModel(), names)
    assert layout.names == names
    assert layout.atoms_in(range(len(names))) == range(5)


ALL_NAMES = ("embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head")


def run_parts(model, layout, stages, tokens):
    """What comes out of the model's parts, one after another."""
    value = None
    for layers in stages:
        value = cut(copy.deepcopy(model), layout, layers)(value, (tokens,), {})
    return value


def test_named_modules_are_a_chain():
    model = TinyLanguageModel()
    stages = (range(2), range(2, 5), range(5, 6))
    layout = lay_out(model, ALL_NAMES, [layers.start for layers in stages])
    assert layout.kind is LayoutKind.NAMED
    tokens = torch.randint(17, (2, 5))
    assert torch.equal(run_parts(model, layout, stages, tokens), model(tokens))


class Doubling(TinyLanguageModel):
    """Does something between its layers, so they are no chain."""

    def forward(self, tokens):
        x = 2 * self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(3 * self.norm(x))


@pytest.mark.parametrize("names", [ALL_NAMES, ALL_NAMES[:-1], ALL_NAMES[1:], ALL_NAMES[:-2]])
def test_modules_around_a_list_may_be_named(names):
    model = Doubling()
    count = len(names)
    stages = (range(2), range(2, 3), range(3, count))
    layout = lay_out(model, names, [layers.start for layers in stages])
    assert layout.names == names
    assert layout.kind is LayoutKind.LAYER_LIST
    tokens = torch.randint(17, (2, 5))
    assert torch.equal(run_parts(model, layout, stages, tokens), model(tokens))


def test_what_is_no_chain_says_so():
    names = ["blocks.0", "embed", "blocks.1", "blocks.2", "norm", "head"]
    layout = lay_out(TinyLanguageModel(), names)
    with pytest.raises(RuntimeError) as caught:
        run_parts(TinyLanguageModel(), layout, [range(6)], torch.randint(17, (2, 5)))
    assert "layers named one by one are a chain" in caught.value.__notes__[0]


@pytest.mark.parametrize("cuts", [(0, 1, 5), (0, 2, 3, 5), (0, 4, 5), (0, 1, 2, 3, 4, 5)])
def test_parts_together_are_the_model(cuts):
    model = TinyLanguageModel(tied=True)
    layout = lay_out(model)
    tokens = torch.randint(17, (2, 5))
    expected = model(tokens)
    value, held = None, 0
    for start, end in itertools.pairwise(cuts):
        part = cut(copy.deepcopy(model), layout, range(start, end))
        value = part(value, (tokens,), {})
        held += sum(parameter.numel() for parameter in part.model.parameters())
    assert torch.equal(value, expected)
    # Every parameter is in one part alone, except for the tied one.
    assert held == sum(p.numel() for p in model.parameters()) + model.embed.weight.numel()


def test_holders_know_tied_weights():
    found = holders(
        TinyLanguageModel(tied=True), lay_out(TinyLanguageModel()), [range(2), range(2, 5)]
    )
    assert found["embed.weight"] == found["head.weight"] == {0, 1}
    assert found["blocks.2.norm.weight"] == {1}


class OwnParameter(TinyLanguageModel):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(12))

    def forward(self, tokens):
        x = self.embed(tokens) + self.shift + self.embed.weight[0]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) + self.shift.sum()


def test_parameters_of_the_model_itself_are_everywhere():
    model = OwnParameter()
    layout = lay_out(model)
    tokens = torch.randint(17, (2, 5))
    expected = model(tokens)
    assert holders(model, layout, [range(2), range(2, 5)])["shift"] == {0, 1}
    first = cut(copy.deepcopy(model), layout, range(2))
    second = cut(copy.deepcopy(model), layout, range(2, 5))
    assert torch.equal(second(first(None, (tokens,), {}), (tokens,), {}), expected)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("embedding", *NAMES[1:]), r"layers\[0\].name: 'embedding' is no layer"),
        (("blocks.0", "blocks.1", "blocks"), r"layers\[2\].name: 'blocks' and 'blocks.0' overlap"),
        (("embed", "blocks"), "the parameter 'norm.weight' belongs to none of the 2 layers"),
    ],
)
def test_mismatch_is_explained(names, message):
    with pytest.raises(RuntimeMismatchError, match=message):
        lay_out(TinyLanguageModel(), names)


class Backwards(nn.Module):
    """Registers what it calls first behind its list."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.embed = nn.Embedding(5, 12)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def test_wrong_order_of_registration_is_explained():
    part = cut(Backwards(), lay_out(Backwards()), range(2))
    with pytest.raises(RuntimeMismatchError, match="calls 'embed' in front of its layer list"):
        part(None, (torch.zeros(1, 3, dtype=torch.long),), {})


class EarlyNorm(TinyLanguageModel):
    """Registers its last norm before its list, as OPT does."""

    def __init__(self):
        super().__init__()
        blocks, head = self.blocks, self.head
        del self.blocks, self.head
        self.blocks, self.head = blocks, head


def test_registration_before_the_list_of_what_is_used_behind_is_explained():
    model, tokens = EarlyNorm(), torch.randint(17, (2, 5))
    stages = [range(2), range(2, 5)]
    with pytest.raises(RuntimeMismatchError, match="calls 'norm' behind the begin of its layer"):
        run_parts(model, lay_out(model), stages, tokens)


class PastTheList(TinyLanguageModel):
    """Carries the embedding past its layers."""

    def forward(self, tokens):
        first = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) + 0.5 * first
        return self.head(self.norm(x))


class Skips(TinyLanguageModel):
    """Carries a layer's output past the next one."""

    def forward(self, tokens):
        x = self.blocks[0](self.embed(tokens))
        y = self.blocks[1](x)
        return self.head(self.norm(self.blocks[2](y) + x))


class Scaled(TinyLanguageModel):
    """Works between its layers."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + 0.5 * block(x)
        return self.head(self.norm(x))


class MaskedByEmbedding(TinyLanguageModel):
    """Asks embeddings for a mask behind its layers."""

    def forward(self, tokens):
        x = self.embed(tokens)
        mask = x.abs().sum(-1, keepdim=True) > 0
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * mask


class Routed(TinyLanguageModel):
    """Makes an index of embeddings."""

    def forward(self, tokens):
        x = self.embed(tokens)
        way = x.argmax(-1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) + way.unsqueeze(-1)


class HandTied(TinyLanguageModel):
    """Takes another module's weight for its head."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T + self.head(x).sum()


class OnlyInTraining(TinyLanguageModel):
    def forward(self, tokens):
        first = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first if self.training else x))


def test_training_and_evaluation_are_looked_at_each():
    model, tokens = OnlyInTraining(), torch.randint(17, (2, 5))
    part = cut(copy.deepcopy(model), lay_out(model), range(3, 5))
    carried = torch.randn(2, 5, 12)
    part.model.eval()
    part(carried, (tokens,), {})
    part.model.train()
    with pytest.raises(RuntimeMismatchError, match="use values of other stages that no layer"):
        part(carried, (tokens,), {})


def test_looking_leaves_no_trace():
    """Dropout draws what it would draw, and running means count a microbatch once."""

    class Noisy(TinyLanguageModel):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.means = nn.BatchNorm1d(5)

        def forward(self, tokens):
            return self.drop(self.means(super().forward(tokens)))

    model, tokens = Noisy(), torch.randint(17, (4, 5))
    part = cut(copy.deepcopy(model), lay_out(model), range(3, 5))
    carried = torch.randn(4, 5, 12)
    outputs = []
    for count in (1, 2):
        torch.manual_seed(3)
        outputs.append((part(carried, (tokens,), {}), torch.rand(1)))
        assert part.model.means.num_batches_tracked == count
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])


@pytest.mark.parametrize(
    "make", [PastTheList, Skips, Scaled, MaskedByEmbedding, Routed, HandTied, OnlyInTraining]
)
@pytest.mark.parametrize("cut_at", [1, 3])
def test_values_that_no_layer_returns_are_noticed(make, cut_at):
    model, tokens = make(), torch.randint(17, (2, 5))
    stages = [range(cut_at), range(cut_at, 5)]
    if make is Skips and cut_at == 1:  # all of it is behind the cut
        assert torch.equal(run_parts(model, lay_out(model), stages, tokens), model(tokens))
        return
    with pytest.raises(RuntimeMismatchError, match="use values of other stages that no layer"):
        run_parts(model, lay_out(model), stages, tokens)


class Undefined(TinyLanguageModel):
    """Its own output holds NaN, which is its business."""

    def forward(self, tokens):
        return super().forward(tokens) * torch.tensor([float("nan")] + [1.0] * 16)


def test_genuine_nan_are_let_through():
    model, tokens = Undefined(), torch.randint(17, (2, 5))
    output = run_parts(model, lay_out(model), [range(2), range(2, 5)], tokens)
    assert torch.equal(output[..., 1:], model(tokens)[..., 1:])
    assert output[..., 0].isnan().all()


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x, shift):
        return self.block(x + shift), 2 * shift


class PairList(TinyLanguageModel):
    """Its layers return two tensors, which the model unpacks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Pairs() for _ in range(3))

    def forward(self, tokens):
        x = self.embed(tokens)
        shift = tokens.unsqueeze(-1) / 17
        for block in self.blocks:
            x, shift = block(x, shift)
        return self.head(self.norm(x + shift))


@pytest.mark.parametrize("cuts", [(0, 1, 5), (0, 2, 5), (0, 2, 3, 5), (0, 4, 5)])
def test_layers_of_a_list_may_return_tuples(cuts):
    model, tokens = PairList(), torch.randint(17, (2, 5))
    stages = [range(start, end) for start, end in itertools.pairwise(cuts)]
    assert torch.equal(run_parts(model, lay_out(model), stages, tokens), model(tokens))


def test_one_module_may_stand_in_several_places_of_a_sequential():
    act, linear = nn.Tanh(), nn.Linear(12, 12)
    model = nn.Sequential(linear, act, nn.Linear(12, 12), act, linear, act)
    layout = lay_out(model)
    assert layout.names == tuple("012345")
    x = torch.randn(3, 12)
    expected = model(x)
    value = None
    for layers in (range(2), range(2, 4), range(4, 6)):
        value = cut(copy.deepcopy(model), layout, layers)(value, (x,), {})
    assert torch.equal(value, expected)
    stages = [range(3), range(3, 6)]
    assert holders(model, layout, stages)["0.weight"] == {0, 1}


class Point(NamedTuple):
    x: torch.Tensor
    scale: float


def test_named_tuples_cross_cuts():
    value = (Point(torch.ones(2), 0.5), [None, torch.zeros(3)])
    tensors, template = take_tensors(value, "here")
    again = put_tensors(json.loads(json.dumps(template)), tensors)
    assert again[0].x is value[0].x
    assert isinstance(again[0], Point)
    assert map_tensors(value, lambda tensor: tensor.shape[0]) == (Point(2, 0.5), [None, 3])

    class Hidden(NamedTuple):
        x: torch.Tensor

    with pytest.raises(RuntimeMismatchError, match="other ranks cannot import it"):
        take_tensors(Hidden(torch.ones(1)), "here")


def test_a_list_of_one_module_many_times_is_explained():
    model = TinyLanguageModel()
    model.blocks = nn.ModuleList([Block()] * 3)
    with pytest.raises(RuntimeMismatchError, match="'blocks' holds one module several times"):
        lay_out(model)


@pytest.mark.parametrize("names", [("0", "2"), ("1", "0", "2"), ("0", "1")])
def test_layers_of_a_sequential_are_all_its_children_in_order(names):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    with pytest.raises(RuntimeMismatchError, match=r"this nn.Sequential calls 0, 1, 2"):
        lay_out(model, names)


def test_a_chain_leaves_no_module_out():
    class Activated(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act, self.second = nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)

    with pytest.raises(RuntimeMismatchError, match="the module 'act' belongs to none of the 2"):
        lay_out(Activated(), ("first", "second"))
    assert lay_out(Activated(), ("first", "act", "second")).kind is LayoutKind.NAMED


def test_before_without_its_list_is_explained():
    with pytest.raises(RuntimeMismatchError, match="'before' needs all layers of the list"):
        lay_out(TinyLanguageModel(), ("before", "blocks.1", "blocks.0", "blocks.2", "behind"))


@pytest.mark.parametrize("make", [make_mlp, TinyLanguageModel])
def test_first_profile(make):
    model = make()
    inputs = torch.randn(4, 12) if make is make_mlp else torch.randint(17, (4, 5))
    profile = measure.profile(model, inputs, loss_fn=lambda output, _: output.sum())
    assert [layer.name for layer in profile.layers] == list(lay_out(model).names)
    assert profile.microbatch_size == 4
    total = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert sum(layer.parameter_bytes for layer in profile.layers) == total
    for layer in profile.layers:
        assert layer.forward_ms > 0
        assert layer.backward_ms > 0
        assert layer.output_bytes > 0
    assert profile.layers[1].output_bytes == (4 * 12 * 4 if make is make_mlp else 4 * 5 * 12 * 4)
    assert all(not parameter.is_meta for parameter in model.parameters())


def test_last_layers_memory_is_what_its_loss_needs_at_once():
    """Logarithms of probabilities are kept; their gradient and that of logits come and go."""
    rows, vocabulary = 64, 500
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, vocabulary))
    targets = torch.randint(vocabulary, (rows,))
    loss_fn = nn.functional.cross_entropy
    profile = measure.profile(model, torch.randn(rows, 12), loss_fn=loss_fn, targets=targets)
    logits_bytes = rows * vocabulary * 4
    assert profile.layers[0].activation_bytes == rows * 12 * 4
    assert profile.layers[1].activation_bytes == pytest.approx(3 * logits_bytes, rel=0.1)
    alone = measure.profile(model, torch.randn(rows, 12))
    assert alone.layers[1].activation_bytes == rows * 12 * 4
    assert all(parameter.grad is None for parameter in model.parameters())
