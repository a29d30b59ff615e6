"""Tensors of any strides travel, are compared and are saved as bytes."""

import pytest

torch = pytest.importorskip("torch")

from pipeplan.runtime.byte_views import as_bytes  # noqa: E402
from pipeplan.runtime.exchange.contents import AS_FORECAST, describe  # noqa: E402
from pipeplan.runtime.exchange.packing import find_packing  # noqa: E402
from pipeplan.runtime.fingerprints import fingerprint  # noqa: E402


def columns(num_rows):
    """What a layer returns beside its output: a column of numbers, and one of flags."""
    tokens = torch.arange(6 * num_rows).reshape(num_rows, 6)
    return [tokens * 0.5, tokens[:, 1], tokens[:, 2] > 3, (tokens[:, 3] * 1j).conj()]


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_columns_travel_in_one_message(num_rows):
    """A single element counts as contiguous, whatever its stride."""
    sent = columns(num_rows)
    contents = describe(sent, [False] * len(sent), ["tensor", 0], num_rows, 0)
    packing = find_packing(contents, num_rows)
    arrived = packing.unpack(packing.pack(sent, AS_FORECAST))
    assert [a.dtype for a in arrived] == [s.dtype for s in sent]
    assert all(torch.equal(a, s) for a, s in zip(arrived, sent, strict=True))
    assert fingerprint(tuple(sent), 0) == fingerprint(tuple(t.clone() for t in sent), 0)


def test_bytes_are_a_view_where_that_is_possible():
    values = torch.arange(3.0)
    as_bytes(values)[:4] = 0
    assert values.tolist() == [0, 1, 2]
    assert as_bytes(torch.arange(12.0).reshape(2, 6)[:1, 3]).numel() == 4
    assert as_bytes(torch.zeros(0)).numel() == 0
