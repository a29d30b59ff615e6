"""A cut model is the whole one, or it is refused with one line: models that trained wrongly."""

import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from pipeplan.runtime import add_loss  # noqa: E402
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
