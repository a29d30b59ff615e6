"""Models and losses as users write them, which were refused or ended in an error: they are right."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

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
