"""Layers by name, and parts that together are the model."""

import copy
import itertools

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from pipeplan.runtime.errors import RuntimeMismatchError  # noqa: E402
from pipeplan.splitting import cut, holders, lay_out, profile_layers  # noqa: E402
from pipeplan.splitting.layout import LayoutKind  # noqa: E402
from runtime.samples import Block, TinyLanguageModel, make_mlp  # noqa: E402

NAMES = ("before", "blocks.0", "blocks.1", "blocks.2", "behind")


def test_names_of_a_sequential_and_of_a_layer_list():
    assert lay_out(make_mlp()).names == ("0", "1", "2", "3", "4")
    assert lay_out(TinyLanguageModel()).names == NAMES


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


@pytest.mark.parametrize("make", [make_mlp, TinyLanguageModel])
def test_first_profile(make):
    model = make()
    inputs = torch.randn(4, 12) if make is make_mlp else torch.randint(17, (4, 5))
    profile = profile_layers(model, inputs, loss_fn=lambda output, _: output.sum())
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
