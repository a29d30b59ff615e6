"""A cut model is the whole one, or it is refused with one line: models that trained wrongly."""

import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from pipeplan.errors import RuntimeMismatchError  # noqa: E402
from pipeplan.runtime import add_loss  # noqa: E402
from pipeplan.runtime.parameters import find_loss_module, require_initialised  # noqa: E402
from pipeplan.splitting import cut, lay_out  # noqa: E402
from runtime.judging import Subject, find_error, find_refusal  # noqa: E402
from runtime.samples import TinyLanguageModel, make_mlp, mlp_loss, token_loss  # noqa: E402

LIST_NAMES = ["before", "blocks.0", "blocks.1", "blocks.2", "behind"]


def rows_of(width=6, out=6, count=4):
    generator = torch.Generator().manual_seed(7)
    return (
        torch.randn(count, width, generator=generator),
        torch.randn(count, out, generator=generator),
    )


def tokens_of(count=4):
    tokens = torch.randint(17, (count, 6), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1], tokens[:, 1:]


def subject(model, loss_fn=mlp_loss, data=None):
    batch, targets = data or rows_of()
    return Subject(model, loss_fn, batch, targets)


def language(model, loss_fn=token_loss):
    return subject(model, loss_fn, tokens_of())


# ------------------------------------------------------------------ what has to be right


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cuts", [[0], [0, 1], [0, 2, 4], [0, 4]])
@pytest.mark.parametrize("tied", [False, True])
def test_plain_language_models_agree(tied, cuts, recompute):
    def make():
        torch.manual_seed(0)
        return language(TinyLanguageModel(tied=tied))

    assert find_refusal(make, LIST_NAMES, cuts, recompute=recompute) is None
    assert find_error(make, LIST_NAMES, cuts, recompute=recompute) is None


def test_chains_agree():
    def make():
        torch.manual_seed(0)
        return subject(make_mlp(), data=rows_of(12, 4))

    assert find_refusal(make, None, [0, 2, 3]) is None
    assert find_error(make, None, [0, 2, 3]) is None


# ------------------------------------------------------------------ what trained wrongly before


class Functional(nn.Module):
    """Does something between its named modules."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.fc3(self.fc2(F.relu(self.fc1(x))))


class ScaledEmbedding(TinyLanguageModel):
    def forward(self, tokens):
        x = self.embed(tokens) * math.sqrt(12)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Sequential):
    """An nn.Sequential with a forward of its own."""

    def forward(self, x):
        for layer in self:
            x = x + layer(x)
        return x


class KeepsLoss(nn.Module):
    """A layer that keeps an auxiliary loss, as mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.aux = torch.zeros(())

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        self.aux = y.square().mean()
        return y


class AddsLoss(KeepsLoss):
    def forward(self, x):
        y = super().forward(x)
        add_loss(0.3 * self.aux)
        return y


def closing(model):
    def loss_fn(output, targets):
        return mlp_loss(output, targets) + 0.3 * sum(layer.aux for layer in model)

    return loss_fn


def regularised(model):
    weight = model[0].weight

    def loss_fn(output, targets):
        return mlp_loss(output, targets) + 0.1 * weight.square().sum()

    return loss_fn


class CarriesPast(TinyLanguageModel):
    def forward(self, tokens):
        first = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first))


MEMORY = {}


class Writes(nn.Module):
    """Leaves its input in a global."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        MEMORY["first"] = x
        return self.linear(x)


class Reads(Writes):
    def forward(self, x):
        return self.linear(x) + MEMORY["first"]


class Counts(nn.Module):
    """Its buffer, and its output, depend on how often it was called."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))
        self.calls = 0

    def forward(self, x):
        self.count += 1
        self.calls += 1
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.linear(x - self.mean) / (self.count + self.calls)


class ScaledLoss(nn.Module):
    """A loss with parameters."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, output, targets):
        return mlp_loss(output * self.scale, targets)


class TiedLoss(nn.Module):
    """A loss with a weight of the model and one of its own."""

    def __init__(self, model):
        super().__init__()
        self.weight = model[0].weight
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, output, targets):
        return mlp_loss(output @ self.weight.T + self.bias, targets)


def tied_layers():
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    model[1].weight = model[0].weight
    return model


def of(make_model, loss=None):
    def make():
        torch.manual_seed(0)
        MEMORY.clear()
        model = make_model()
        loss_fn = loss(model) if loss else mlp_loss
        return subject(model, loss_fn)

    return make


def words(make_model, loss_fn=token_loss):
    def make():
        torch.manual_seed(0)
        return language(make_model(), loss_fn)

    return make


@pytest.mark.parametrize("cuts", [[0], [0, 1], [0, 2]])
def test_operations_between_named_modules(cuts):
    refusal = find_refusal(of(Functional), ["fc1", "fc2", "fc3"], cuts)
    assert "layer 'fc2': its argument 0 is not that of the whole model" in refusal


@pytest.mark.parametrize("cuts", [[0, 1], [0, 3], [0, 2, 5]])
def test_an_operation_that_only_some_cuts_lose(cuts):
    names = ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    refusal = find_refusal(words(ScaledEmbedding), names, cuts)
    error = find_error(words(ScaledEmbedding), names, cuts)
    assert (refusal is None) == (error is None)
    if cuts[-1] == 5:  # then all layers are a chain
        assert "layer 'blocks.0'" in refusal


@pytest.mark.parametrize("cuts", [[0, 1], [0, 1, 2]])
def test_a_sequential_with_a_forward_of_its_own(cuts):
    make = of(lambda: Residual(*(nn.Linear(6, 6) for _ in range(3))))
    refusal = find_refusal(make, None, cuts)
    assert "is not that of the whole model" in refusal
    assert "nn.Sequential" in refusal


@pytest.mark.parametrize("cuts", [[0, 1], [0, 2]])
def test_losses_kept_on_layers(cuts):
    make = of(lambda: nn.Sequential(KeepsLoss(), KeepsLoss(), KeepsLoss()), closing)
    assert "add_loss" in find_refusal(make, None, cuts)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cuts", [[0, 1], [0, 2], [0, 1, 2]])
def test_losses_that_layers_add(cuts, recompute):
    make = of(lambda: nn.Sequential(AddsLoss(), AddsLoss(), AddsLoss()))
    assert find_refusal(make, None, cuts, recompute=recompute) is None
    assert find_error(make, None, cuts, recompute=recompute) is None


def test_a_loss_that_closes_over_the_model():
    make = of(lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))), regularised)
    assert "parameter '0.weight'" in find_refusal(make, None, [0, 1])


@pytest.mark.parametrize("recompute", [False, True])
def test_a_loss_module_with_parameters(recompute):
    make = of(lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))), lambda _: ScaledLoss())
    assert find_refusal(make, None, [0, 2], recompute=recompute) is None
    assert find_error(make, None, [0, 2], recompute=recompute) is None


@pytest.mark.parametrize("cuts", [[0], [0, 1], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("make_model", [lambda: nn.Sequential(*tied_layers()[::2]), tied_layers])
def test_a_loss_module_with_a_weight_of_the_model(cuts, make_model):
    make = of(make_model, TiedLoss)
    cuts = [cut for cut in cuts if cut < len(make_model())]
    assert find_refusal(make, None, cuts) is None
    assert find_error(make, None, cuts) is None


@pytest.mark.parametrize("cuts", [[0, 1], [0, 3]])
def test_values_carried_past_layers(cuts):
    refusal = find_refusal(words(CarriesPast), LIST_NAMES, cuts)
    assert "values of other stages that no layer returns" in refusal


def test_values_passed_by_a_global():
    make = of(lambda: nn.Sequential(Writes(), nn.Linear(6, 6), Reads()))
    refusal = find_refusal(make, None, [0, 2])
    assert "layers 2..2: raise when they run as a stage" in refusal
    assert "what others keep (losses, activations, globals" in refusal
    make = of(lambda: nn.Sequential(nn.Linear(6, 6), Writes(), Reads()))
    assert find_refusal(make, None, [0, 1]) is None
    assert find_error(make, None, [0, 1]) is None


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputation_counts_once(recompute):
    make = of(lambda: nn.Sequential(Counts(), nn.Linear(6, 6), Counts()))
    assert find_refusal(make, None, [0, 1], recompute=recompute) is None
    assert find_error(make, None, [0, 1], recompute=recompute) is None


@pytest.mark.parametrize("recompute", [False, True])
def test_spectral_norm(recompute):
    def make_model():
        return nn.Sequential(
            *(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)) for _ in range(3))
        )

    assert find_refusal(of(make_model), None, [0, 1], recompute=recompute) is None
    assert find_error(of(make_model), None, [0, 1], recompute=recompute) is None


class DropsBetween(TinyLanguageModel):
    """Drops between its layers, where no module is."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = F.dropout(block(x), 0.1, self.training)
        return self.head(self.norm(x))


def test_a_dropout_that_a_chain_loses():
    names = ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    assert find_refusal(words(DropsBetween), names, [0, 5])  # a chain
    for cuts in ([0, 1], [0, 2], [0, 4]):
        assert find_refusal(words(DropsBetween), LIST_NAMES, cuts) is None


class NoOp(nn.Module):
    """A dropout that drops nothing: only the list of random operations shows it."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.fc1(x)
        torch.rand(3)
        return self.fc2(y)


def test_random_operations_are_compared_by_name():
    assert "the whole model draws random numbers by rand" in find_refusal(
        of(NoOp), ["fc1", "fc2"], [0, 1]
    )


class ReturnsLoss(TinyLanguageModel):
    """Its layers return losses, which the model sums up."""

    def forward(self, tokens):
        x, total = self.embed(tokens), 0.0
        for block in self.blocks:
            x = block(x)
            total = total + x.square().mean()
        return self.head(self.norm(x)), total


def test_losses_that_the_model_sums_up():
    make = words(ReturnsLoss, lambda out, targets: token_loss(out[0], targets) + 0.1 * out[1])
    assert "add_loss" in find_refusal(make, LIST_NAMES, [0, 3])
    # Here nothing is lost: the second stage sees all outputs that it sums up.
    assert find_refusal(make, LIST_NAMES, [0, 2]) is None
    assert find_error(make, LIST_NAMES, [0, 2]) is None


class Branching(TinyLanguageModel):
    """Uses the embeddings behind its layers once `use` is set, in several ways."""

    use = None

    def forward(self, tokens):
        x = first = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.use is not None:
            x = self.use(x, first)
        return self.head(self.norm(x))


def write(x, first):
    x = x.clone()
    x[:, 0] = first[:, 0]
    return x


LATER = {
    "adds": lambda x, first: x + first,
    "hides NaN": lambda x, first: x + first.nan_to_num(),
    "compares": lambda x, first: x * (first > 0),
    "selects": lambda x, first: torch.where(first > 0, x, -x),
    "asks": lambda x, first: -x if first.sum() > 0 else x,
    "counts": lambda x, first: x * len(first.nonzero()),
    "writes": write,
}


@pytest.mark.parametrize("use", LATER.values(), ids=LATER)
def test_a_branch_that_is_taken_later_is_refused_then(use):
    model, tokens = Branching(), torch.randint(17, (2, 5))
    part = cut(model, lay_out(model), range(3, 5))
    carried = torch.randn(2, 5, 12)
    assert part(carried, (tokens,), {}).shape == (2, 5, 17)
    model.use = use
    with pytest.raises(RuntimeMismatchError, match="use values of other stages"):
        part(carried, (tokens,), {})


def test_shapes_of_other_stages_may_be_asked_for():
    model, tokens = Branching(), torch.randint(17, (2, 5))
    part = cut(model, lay_out(model), range(3, 5))

    def use(x, first):
        threes = torch.full_like(first, first.ndim)
        return x + torch.zeros_like(first) + first.new_ones(first.shape) + threes

    model.use = use
    carried = torch.randn(2, 5, 12)
    expected = model.head(model.norm(model.blocks[2](carried) + 4))
    assert torch.allclose(part(carried, (tokens,), {}), expected, atol=1e-5)


class Skipping(TinyLanguageModel):
    """Leaves out a layer, if asked, in the model's own forward."""

    skips = False

    def forward(self, tokens):
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            if not (self.skips and index == 1):
                x = block(x)
        return self.head(self.norm(x))


def test_a_layer_that_is_left_out_later_is_noticed():
    model, tokens = Skipping(), torch.randint(17, (2, 5))
    part = cut(model, lay_out(model), range(3, 5))
    carried = torch.randn(2, 5, 12)
    assert not part(carried, (tokens,), {}).isnan().any()
    model.skips = True
    with pytest.raises(RuntimeMismatchError, match=r"its forward skips the layer in front of"):
        part(carried, (tokens,), {})


def test_a_layer_that_gets_its_shape_in_the_first_forward_is_refused():
    with pytest.raises(RuntimeMismatchError, match=r"its parameter '0.weight' has no shape yet"):
        require_initialised(nn.Sequential(nn.LazyLinear(3)))


def test_a_loss_module_that_holds_the_model_is_refused():
    class Holds(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

    model = make_mlp()
    with pytest.raises(RuntimeMismatchError, match="'model' is a part of the model"):
        find_loss_module(model, Holds(model))


def test_generators_of_layers_cannot_be_recomputed():
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.generator = torch.Generator().manual_seed(1)

        def forward(self, x):
            return self.linear(x) + torch.randn(x.shape, generator=self.generator)

    make = of(lambda: nn.Sequential(Draws(), Draws()))
    assert find_refusal(make, None, [0, 1]) is None
    assert "a generator of their own" in find_refusal(make, None, [0, 1], recompute=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_agrees(dtype):
    def make():
        torch.manual_seed(0)
        return language(TinyLanguageModel(tied=True))

    assert find_refusal(make, LIST_NAMES, [0, 2, 4], amp_dtype=dtype) is None


class Normalised(torch.autograd.Function):
    """Divides a gradient by its norm over all rows."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_backward_in_which_rows_meet_is_told(capsys, dropout):
    class Couples(nn.Module):
        def forward(self, x):
            return Normalised.apply(x)

    def make(*between):
        return of(lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(dropout), *between, nn.Tanh()))

    assert find_refusal(make(Couples()), None, [0, 2]) is None
    assert "rows influence each other in the model: the gradient of '0." in capsys.readouterr().err
    assert find_refusal(make(), None, [0, 2]) is None
    assert capsys.readouterr().err == ""


def test_a_loss_that_is_no_mean(capsys):
    def with_loss(loss_fn):
        return of(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), lambda _: loss_fn)

    summed = with_loss(lambda output, targets: F.mse_loss(output, targets, reduction="sum"))
    assert "loss_fn: is a sum over rows" in find_refusal(summed, None, [0, 1])
    assert find_refusal(with_loss(mlp_loss), None, [0, 1]) is None
    assert capsys.readouterr().err == ""
    coupled = with_loss(lambda output, targets: torch.cdist(output, targets).logsumexp(0).mean())
    assert "loss_fn: is no mean over rows" in find_refusal(coupled, None, [0, 1])
    assert find_refusal(coupled, None, [0, 1], weight_fn=len) is None
    assert "rows influence each other in the model or in loss_fn" in capsys.readouterr().err


def test_losses_of_routers_of_hugging_face():
    transformers = pytest.importorskip("transformers")

    def balance(router, inputs, output):
        shares = output[0].softmax(-1).flatten(0, -2).mean(0)
        add_loss(0.1 * shares.square().sum() * len(shares))

    def make():
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                vocab_size=17,
                hidden_size=12,
                intermediate_size=12,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                num_local_experts=3,
                num_experts_per_tok=2,
                max_position_embeddings=16,
            )
        )
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(balance)
        return language(model, lambda output, targets: token_loss(output.logits, targets))

    names = ["before", "model.layers.0", "model.layers.1", "behind"]
    assert find_refusal(make, names, [0, 2]) is None
    assert find_error(make, names, [0, 2]) is None
