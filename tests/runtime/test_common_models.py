"""Models and losses as users write them, which were refused once: they are right."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from pipeplan.splitting import lay_out  # noqa: E402
from pipeplan.splitting.stage_modules import cut_all  # noqa: E402
from runtime.judging import Subject, find_refusal  # noqa: E402

W = 6
LIST = ["before", "blocks.0", "blocks.1", "behind"]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Listed(nn.Module):
    def __init__(self, words=11):
        super().__init__()
        self.embed = nn.Embedding(words, W)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(W, words)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def subject_of(kind, loss_fn, dtype=torch.float32):
    torch.manual_seed(0)
    model = kind().to(dtype)
    ids = torch.randint(11, (2, 7))
    targets = ids.roll(-1, 1)
    targets[0, 3:] = -100
    return Subject(model, loss_fn, ids, targets)


def num_targets(targets):
    return (targets != -100).sum()


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def token_loss_in_float32(logits, targets):
    return token_loss(logits.float(), targets)


@pytest.mark.parametrize(
    ("loss_fn", "dtype"),
    [(token_loss, torch.float32), (token_loss_in_float32, torch.float64)],
)
def test_a_loss_may_be_weighted_by_uneven_numbers_of_tokens(loss_fn, dtype):
    """Three and seven tokens: a share of 0.3 rounds otherwise in float32 than in float64."""

    def make():
        return subject_of(Listed, loss_fn, dtype)

    assert find_refusal(make, LIST, [0, 2], weight_fn=num_targets) is None


# ------------------------------------------------------------------ what runs before the layers


class Watched(Listed):
    """Changes and watches gradients of what runs before its layers, and between them."""

    def forward(self, ids):
        x = self.embed(ids)
        x *= 2.0
        if self.training:
            x.register_hook(lambda gradient: 0.5 * gradient)
        for block in self.blocks:
            x = block(x)
            if self.training:
                x.retain_grad()
        return self.head(x)


def scale_gradient(module, args, output):
    if module.training:
        output.register_hook(lambda gradient: 3.0 * gradient)


class Hooked(Listed):
    def __init__(self):
        super().__init__()
        self.embed.register_forward_hook(scale_gradient)


class ShortEmbedding(nn.Embedding):
    """Drops half of its tokens in training."""

    def forward(self, ids):
        return super().forward(ids[:, ::2] if self.training else ids)


class Shortened(Listed):
    """Gives all layers the places of what the embedding leaves."""

    def __init__(self):
        super().__init__()
        self.embed = ShortEmbedding(11, W)

    def forward(self, ids):
        x = self.embed(ids)
        places = torch.arange(x.shape[1])[:, None]
        for block in self.blocks:
            x = block(x + 0.1 * places)
        return self.head(x)


@pytest.mark.parametrize("kind", [Watched, Hooked, Shortened])
@pytest.mark.parametrize("cuts", [[0, 1], [0, 2], [0, 3], [0, 1, 2]])
def test_what_runs_before_a_cut_runs_again_without_values(kind, cuts):
    """With the same need of gradients, and in the same mode."""

    def make():
        return subject_of(kind, lambda logits, targets: logits.square().mean())

    assert find_refusal(make, LIST, cuts) is None


def test_stand_ins_of_a_rank_with_two_stages_have_the_mode_of_the_model():
    """Between blocks they are not in the model, so that its eval() does not reach them."""
    torch.manual_seed(0)
    model, ids = Shortened(), torch.randint(11, (2, 7))
    layout = lay_out(model, LIST, [0, 2, 3])
    _, last = cut_all(model, layout, [range(2), range(3, 4)])
    for trains, length in ((True, 4), (False, 7)):
        model.train(trains)
        carried = torch.randn(2, length, W)
        assert torch.equal(last(carried, (ids,), {}), model.head(carried))


class OnlyTrained(Listed):
    """Cannot be evaluated under torch.no_grad."""

    def forward(self, ids):
        x = super().forward(ids)
        x.register_hook(lambda gradient: gradient)
        return x


def test_a_model_that_cannot_be_evaluated_is_told_so():
    def make():
        return subject_of(OnlyTrained, lambda logits, targets: logits.square().mean())

    found = find_refusal(make, LIST, [0, 2])
    assert "raises on 1 rows of the batch in evaluation, under torch.no_grad" in found
