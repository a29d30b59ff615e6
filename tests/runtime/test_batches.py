"""Batches are divided by rows or refused; ranks with different batches are refused."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils.rnn import pack_sequence  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402

from pipeplan.errors import RuntimeMismatchError  # noqa: E402
from pipeplan.runtime import Pipeline, Whole  # noqa: E402
from pipeplan.runtime.batch_agreement import BatchAgreement, Mode  # noqa: E402
from pipeplan.runtime.batches import as_call, mark_rows, num_rows, select_rows  # noqa: E402
from pipeplan.runtime.fingerprints import fingerprint, shape_key  # noqa: E402
from runtime.mailbox import Mailbox, MailTransport  # noqa: E402
from runtime.samples import cut_plan, make_mlp, mlp_loss  # noqa: E402
from runtime.workers import Ranks  # noqa: E402

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "a b")


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    names: list
    scale: float = 0.5


@dataclass
class Open:
    x: Any
    inner: Any = None


def rows_of(value, rows, total):
    assert num_rows(value, "batch") == total
    return select_rows(mark_rows(value, total, "batch"), rows, CPU)


X = torch.arange(12.0).view(4, 3)


def test_containers_keep_their_kind():
    batch = {
        "x": X,
        "pair": Pair(X, (X, None)),
        "open": Open(X, Open([X, X + 1])),
        "frozen": Frozen(X, ["a", "b", "c", "d"]),
        "ordered": OrderedDict(x=X, n=3),
        "user": UserDict(x=X),
        "fixed": MappingProxyType({"x": X}),
        "numbers": np.arange(4),
        "flag": True,
        "text": "all rows",
        "whole": Whole([X, {"y": X}]),
        "one": np.float32(2),
        "type": torch.float16,
    }
    found = rows_of(batch, [1, 3], 4)
    expected = X[[1, 3]]
    for tensor in (found["x"], found["pair"].a, found["pair"].b[0], found["open"].x):
        assert torch.equal(tensor, expected)
    assert type(found["pair"]) is Pair
    assert found["pair"].b[1] is None
    assert torch.equal(found["open"].inner.x[1], expected + 1)
    assert found["frozen"] == Frozen(found["frozen"].x, ["b", "d"])
    assert torch.equal(found["frozen"].x, expected)
    assert type(found["ordered"]) is OrderedDict
    assert type(found["user"]) is UserDict
    assert torch.equal(found["user"]["x"], expected)
    assert torch.equal(found["fixed"]["x"], expected)
    assert found["numbers"].tolist() == [1, 3]
    assert (found["flag"], found["text"], found["one"]) == (True, "all rows", 2)
    assert torch.equal(found["whole"][1]["y"], X)
    assert batch["frozen"].names == ["a", "b", "c", "d"], "the batch itself is not changed"
    assert torch.equal(batch["user"]["x"], X)


def test_lists_of_rows_are_sliced():
    """Boxes of an image, texts, names: one entry for each row."""
    boxes = [{"boxes": torch.zeros(n, 4), "labels": torch.ones(n)} for n in (0, 2, 1, 5)]
    found = rows_of((X, boxes, [(i, str(i)) for i in range(4)]), range(1, 3), 4)
    assert [len(entry["boxes"]) for entry in found[1]] == [2, 1]
    assert found[2] == [(1, "1"), (2, "2")]


def test_lists_of_columns_are_sliced():
    found = rows_of({"x": X, "more": [X, [X, X]]}, range(2, 4), 4)
    assert torch.equal(found["more"][1][0], X[2:])


def test_consecutive_rows_are_views():
    assert rows_of(X, range(1, 3), 4).data_ptr() == X[1:].data_ptr()


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ([X, X], "batch: holds only lists, so the number of its rows is not clear; give a tuple"),
        ({"images": [torch.zeros(3, 5)] * 4}, "batch: holds only lists"),
        ((X, [X] * 4), r"batch\[1\]: is a list of 4 entries whose tensors have 4 rows each"),
        ((X, ["a", "b"]), r"batch\[1\]: is a list of 2 entries for 4 rows; give one entry for"),
        ((X, []), r"batch\[1\]: is a list of 0 entries for 4 rows"),
        ((X, [torch.zeros(2)] * 3), r"batch\[1\]: is a list of 3 entries"),
        ({"x": X, "s": {1, 2}}, r"batch\['s'\]: a set cannot be divided into rows; give tensors"),
        (Open(X, object()), r"batch.inner: a object cannot be divided"),
        ((X, pack_sequence([torch.ones(2)])), r"batch\[1\]: a PackedSequence cannot be divided"),
        ((X, range(4)), r"batch\[1\]: a range cannot be divided"),
        ((X, torch.tensor(1.0)), r"batch\[1\]: holds a tensor without rows; wrap it in"),
        ((X, np.array(1.0)), r"batch\[1\]: holds a tensor without rows"),
        ((X, X[:2]), "batch: its tensors have 2 and 4 rows; wrap"),
        ((X, np.zeros(3)), "batch: its tensors have 3 and 4 rows"),
        ({"n": 3}, "batch: holds no tensor with rows"),
        ({}, "batch: holds no tensor with rows"),
    ],
)
def test_what_cannot_be_divided_is_refused(batch, problem):
    with pytest.raises(RuntimeMismatchError, match=problem):
        rows_of(batch, [0], 4)


def test_targets_may_hold_only_lists():
    """The batch tells the number of rows."""
    assert select_rows(mark_rows(["a", "b", "c"], 3, "targets"), [0, 2], CPU) == ["a", "c"]
    with pytest.raises(RuntimeMismatchError, match=r"targets: has shape \(4, 3\) for 5 rows"):
        mark_rows(X, 5, "targets")


def test_a_library_dict_gives_arguments():
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": X.long(), "mask": X > 1})
    args, kwargs = as_call(mark_rows(encoding, 4, "batch"))
    assert args == ()
    assert torch.equal(select_rows(kwargs, [2], CPU)["mask"], X[2:3] > 1)
    inner = rows_of({"x": X, "inner": encoding}, [3], 4)["inner"]
    assert type(inner) is transformers.BatchEncoding
    assert inner.input_ids.tolist() == X[3:].long().tolist()
    assert len(encoding["input_ids"]) == 4


# ------------------------------------------------------------------ fingerprints


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2],
)
@pytest.mark.parametrize("size", [(8,), (64, 100), (513, 1024)])
def test_other_values_have_other_fingerprints(dtype, size):
    torch.manual_seed(0)
    first = (torch.randn(size).relu() * 2).to(dtype)
    second = (torch.randn(size).relu() * 2).to(dtype)
    assert fingerprint({"x": first}, 3) == fingerprint({"x": first.clone()}, 3)
    assert fingerprint({"x": first}, 3) != fingerprint({"x": second}, 3)
    assert shape_key(first, "a") == shape_key(second, "a") != shape_key(first, "b")


def test_fingerprints_read_everything():
    values = [
        *(X, X.double(), X.flatten(), -X, X.T, Whole(X + 1), (X, X), [X, 1], [X, 2], [X, 1.0]),
        *({"a": "x"}, {"a": "y"}, {"a": None}, np.arange(4), np.arange(4.0), Frozen(X, ["a"])),
        *(Frozen(X, ["b"]), np.array(["a", None], dtype=object)),
    ]
    assert len({fingerprint(value, 0) for value in values}) == len(values)
    assert fingerprint(X.T, 0) == fingerprint(X.T.contiguous(), 0)
    assert fingerprint({"a": X, "b": -X}, 0) == fingerprint({"b": -X, "a": X}, 0)
    assert fingerprint({"a": X, "b": -X}, 0) != fingerprint({"b": X, "a": -X}, 0)
    assert fingerprint((X, object()), 0) == fingerprint((X, object()), 0)


def test_one_other_value_is_found_after_some_steps():
    first, second = torch.zeros(64, 512), torch.zeros(64, 512)
    second[17, 100:102] = 1.0
    found = [step for step in range(100) if fingerprint(first, step) != fingerprint(second, step)]
    assert found
    assert found[0] < 50


# ------------------------------------------------------------------ agreement


def agree(given, stage_ranks=((0,), (1,), (2, 3)), modes=None, steps=None, **options):
    """What each rank agrees on: the ranks take turns, in the order of the tree."""
    mailbox, num_ranks = Mailbox(), len(given)
    used = [rank for ranks in stage_ranks for rank in ranks]
    found = {}
    for rank in [*used, *(rank for rank in range(num_ranks) if rank not in used)]:
        agreement = BatchAgreement(rank, stage_ranks, num_ranks, **options)
        mode = modes[rank] if modes else Mode.TRAINING
        step = steps[rank] if steps else 4
        found[rank] = agreement.agree(*given[rank], mode, step, MailTransport(mailbox, rank))
    assert mailbox.is_empty()
    return found


def test_equal_batches_agree():
    found = agree([(X.clone(), X + 1) for _ in range(6)])
    assert len(set(found.values())) == 1
    assert found[0].rows == 4


def test_ranks_may_give_none():
    found = agree([(X, None), (None, None), (None, X), (None, X.clone()), (None, None)])
    assert {agreed.rows for agreed in found.values()} == {4}
    assert len({agreed.key for agreed in found.values()}) == 1


@pytest.mark.parametrize(
    ("rank", "given", "problem"),
    [
        (1, (X + 1, X), "batch: rank 1 has other values than rank 0; a DistributedSampler or an"),
        (3, (X, X + 1), "targets: rank 3 has other values than rank 0; a DistributedSampler"),
        (2, (X[:3], X), "batch: rank 2 has 3 rows, but rank 0 has 4; a DistributedSampler"),
        (4, (X.double(), X), "batch: rank 4 has tensors of other shapes or types than rank 0"),
        (5, (X[:, :2], None), "batch: rank 5 has tensors of other shapes or types than rank 0"),
        (1, ((X, 2), X), "batch: rank 1 has other values than rank 0"),
    ],
)
def test_other_batches_are_refused(rank, given, problem):
    everyone = [(X, X)] * 6
    everyone[rank] = given
    with pytest.raises(RuntimeMismatchError, match=problem):
        agree(everyone)


def test_targets_of_the_last_stage_are_compared_even_if_the_first_has_none():
    with pytest.raises(RuntimeMismatchError, match="targets: rank 3 has other values than rank 2"):
        agree([(X, None), (None, None), (None, X), (None, X + 1)])


def test_training_against_evaluation_is_refused():
    modes = [Mode.TRAINING, Mode.TRAINING, Mode.EVALUATION, Mode.TRAINING]
    with pytest.raises(
        RuntimeMismatchError,
        match="step: rank 2 is in evaluation step 4, but rank 0 in training step 4; all ranks call",
    ):
        agree([(X, X)] * 4, modes=modes)
    with pytest.raises(RuntimeMismatchError, match="rank 1 is in training step 5, but rank 0 in"):
        agree([(X, X)] * 4, steps=[4, 5, 4, 4])


def test_values_need_not_be_compared():
    agree([(X + rank, X) for rank in range(4)], compares_values=False)


def train_with_sampler(rank):
    """The mistake that everyone makes who comes from data parallelism."""
    data = torch.utils.data.TensorDataset(torch.randn(64, 12), torch.randn(64, 4))
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    plan = cut_plan(list("01234"), [0, 3], [1, 1], 2, 4)
    torch.manual_seed(0)
    with Pipeline(plan, make_mlp(), mlp_loss, torch.optim.AdamW) as pipeline:
        for inputs, targets in DataLoader(data, batch_size=8, sampler=sampler):
            pipeline.step(inputs, targets)


def test_a_distributed_sampler_is_explained(tmp_path):
    errors = tmp_path / "errors"
    with Ranks(2, train_with_sampler, stderr=errors) as ranks:
        codes = ranks.wait(60)
        assert all(codes), codes
        text = errors.read_text() + ranks.error(1)
    assert "batch: rank 1 has other values than rank 0; a DistributedSampler" in text
