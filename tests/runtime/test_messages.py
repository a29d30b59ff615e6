"""Every message may differ from the one before; no process is started.

The sender and the receiver run in one process, over a mailbox that insists on equal sizes. So a
receive that was posted for other tensors than come fails here, where gloo would leave old memory.
"""

import math
import random

import pytest

torch = pytest.importorskip("torch")

from pipeplan.errors import RuntimeMismatchError  # noqa: E402
from pipeplan.pipeline import Kind  # noqa: E402
from pipeplan.runtime.exchange.contents import (  # noqa: E402
    describe,
    encode_header,
    parse_template,
    read_header,
)
from pipeplan.runtime.exchange.forecasts import MOST_KEYS, Forecasts  # noqa: E402
from pipeplan.runtime.exchange.inbox import Inbox  # noqa: E402
from pipeplan.runtime.exchange.joining import require_agreement  # noqa: E402
from pipeplan.runtime.exchange.lanes import Lane  # noqa: E402
from pipeplan.runtime.exchange.outbox import Outbox  # noqa: E402
from pipeplan.runtime.exchange.row_routing import RowRun  # noqa: E402
from pipeplan.runtime.exchange.sends import LazySends, PolledSends, Works  # noqa: E402
from pipeplan.splitting.nesting import put_tensors, take_tensors  # noqa: E402
from runtime.mailbox import Mailbox, MailTransport, Work  # noqa: E402

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
]
PLAIN = [None, True, 1, 1.0, 0, -0.0, 0.0, math.nan, math.inf, 2**70, "x", "ä\ud800", 1e-300, ""]


class Wire:
    """Senders 0 .. n-1 and one receiver, over many steps."""

    def __init__(self, lengths, *, posts_ahead, kind=Kind.FORWARD, ahead=2):
        self.mailbox, self.kind, self.ahead = Mailbox(), kind, ahead
        self.lengths, self.receiver = lengths, len(lengths)
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        pairs = zip(lengths, ends, strict=True)
        self.runs_in = [RowRun(rank=i, start=e - n, stop=e) for i, (n, e) in enumerate(pairs)]
        self.transports = [
            MailTransport(self.mailbox, rank, posts_ahead=posts_ahead)
            for rank in range(self.receiver + 1)
        ]
        self.forecasts = [Forecasts() for _ in self.transports]

    def step(self, messages, order, taken=None, key=0, rng=None):
        """Send `messages[m][sender]` = (tensors, flags, template); what arrives, by microbatch."""
        count = len(messages)
        inbox = Inbox(
            self.transports[-1],
            Lane.of(0, self.kind, [self.runs_in] * count, order),
            self.ahead,
            self.forecasts[-1].begin(key).of(self.kind),
        )
        runs_out = [[RowRun(rank=self.receiver, start=0, stop=n)] for n in self.lengths]
        outboxes = [
            Outbox(
                self.transports[sender],
                Lane.of(0, self.kind, [runs_out[sender]] * count, order),
                lambda _: LazySends(),
                self.forecasts[sender].begin(key).of(self.kind),
            )
            for sender in range(len(self.lengths))
        ]
        if rng is None or rng.random() < 0.5:
            inbox.post(order[0])  # before anything is sent
        for microbatch in order:
            for sender, (tensors, flags, template) in enumerate(messages[microbatch]):
                contents = describe(tensors, flags, template, self.lengths[sender], 0)
                outboxes[sender].send(microbatch, tensors, contents)
        found = {microbatch: inbox.take(microbatch) for microbatch in taken or order}
        assert self.mailbox.is_empty()
        return found


def random_value(rng, rows, depth=0):
    kind = rng.choice(["tensor"] * 4 + ["plain"] + (["tuple", "list", "dict"] if depth < 2 else []))
    if kind == "tensor":
        shape = [rng.choice([0, 1, 2, 5, 40]) for _ in range(rng.randint(0, 2))]
        if rng.random() < 0.1:
            shape = [rng.choice([9_000, 20_000])]
        dtype = rng.choice(DTYPES)
        tensor = (torch.randn(rows, *shape) * 3).to(dtype)
        if tensor.ndim > 2 and rng.random() < 0.5:
            tensor = tensor.transpose(1, 2)
        if dtype is torch.complex64 and rng.random() < 0.5:
            tensor = tensor.conj()
        return tensor
    if kind == "plain":
        return rng.choice(PLAIN)
    entries = [random_value(rng, rows, depth + 1) for _ in range(rng.randint(0, 4))]
    if kind == "dict":
        return {f"k{i}": entry for i, entry in enumerate(entries)}
    return tuple(entries) if kind == "tuple" else entries


def as_message(value, rng):
    tensors, template = take_tensors(value, "here")
    return tensors, [rng.random() < 0.5 for _ in tensors], template


def assert_same(a, b):
    """Like ==, but types count and NaN equals NaN."""
    assert type(a) is type(b) or isinstance(a, torch.Tensor), (a, b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a.resolve_conj(), b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, tuple | list):
        assert len(a) == len(b)
        for first, second in zip(a, b, strict=True):
            assert_same(first, second)
    else:
        assert repr(a) == repr(b)


@pytest.mark.parametrize("posts_ahead", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_any_value_after_any_other(seed, posts_ahead):
    """Random values, sometimes repeated, in random orders, with keys that alternate."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    wire = Wire([3], posts_ahead=posts_ahead, ahead=rng.randint(0, 3))
    last = {}
    for _ in range(60):
        key, count = rng.randint(0, 2), 4
        values = []
        for microbatch in range(count):
            if (key, microbatch) not in last or rng.random() < 0.4:
                last[key, microbatch] = random_value(rng, 3)
            values.append(last[key, microbatch])
        messages = [[as_message(value, rng)] for value in values]
        order = rng.sample(range(count), count)
        found = wire.step(messages, order, rng.sample(range(count), count), key, rng)
        for microbatch, value in enumerate(values):
            received, (_, flags, _) = found[microbatch], messages[microbatch][0]
            assert_same(value, put_tensors(received.template, received.tensors))
            assert [kind.has_gradient for kind in received.contents.kinds] == flags


@pytest.mark.parametrize("posts_ahead", [True, False])
@pytest.mark.parametrize("width", [4, 9_000])
def test_several_senders_fill_one_tensor(posts_ahead, width):
    wire = Wire([2, 1, 3], posts_ahead=posts_ahead)
    for step in range(6):
        shape = (6, width + (step == 3)), (6, 2)
        whole = [torch.randn(*shape[0]), torch.randint(9, shape[1])]
        pieces = [part.split([2, 1, 3]) for part in whole]
        # A replica without gradient does not take it from the others.
        messages = [
            [
                ([pieces[0][i], pieces[1][i]], [i == 1, False], ["plain", step // 2])
                for i in range(3)
            ]
        ]
        received = wire.step(messages, [0])[0]
        assert torch.equal(received.tensors[0], whole[0])
        assert torch.equal(received.tensors[1], whole[1])
        assert [kind.has_gradient for kind in received.contents.kinds] == [True, False]
        assert received.template == ["plain", step // 2]


@pytest.mark.parametrize("posts_ahead", [True, False])
@pytest.mark.parametrize("width", [4, 9_000])
def test_missing_gradients_of_a_replica_are_zeros(posts_ahead, width):
    """Each of two replicas may have a gradient for either of two tensors, in any step."""
    rng = random.Random(1)
    wire = Wire([2, 3], posts_ahead=posts_ahead, kind=Kind.BACKWARD)
    for _ in range(40):
        given = [[i for i in range(2) if rng.random() < 0.6] for _ in range(2)]
        tensors = [[torch.randn(rows, width) for _ in mine] for rows, mine in zip((2, 3), given)]  # noqa: B905
        messages = [
            [(mine, [False] * len(mine), idx) for mine, idx in zip(tensors, given, strict=True)]
        ]
        received = wire.step(messages, [0])[0]
        assert received.template == sorted({*given[0], *given[1]})
        for index, tensor in zip(received.template, received.tensors, strict=True):
            for rows, mine, idx in (
                (tensor[:2], tensors[0], given[0]),
                (tensor[2:], tensors[1], given[1]),
            ):
                expected = mine[idx.index(index)] if index in idx else torch.zeros_like(rows)
                assert torch.equal(rows, expected)


def test_what_does_not_change_is_one_small_message():
    wire = Wire([4], posts_ahead=True)
    message = [([torch.randn(4, 8), torch.arange(4)], [True, False], ["plain", 0.5])]
    wire.step([message], [0])
    before = wire.mailbox.num_sent
    wire.step([message], [0])
    assert wire.mailbox.num_sent == before + 1
    # A changed number still is.
    wire.step([[(message[0][0], [True, False], ["plain", 0.25])]], [0])
    assert wire.mailbox.num_sent == before + 2


def test_shapes_that_always_change_are_not_forecast():
    """After the first surprise no filler is sent."""
    wire = Wire([4], posts_ahead=True)
    sent = []
    for step in range(5):
        before = wire.mailbox.num_sent
        wire.step([[([torch.randn(4, 9_000 + step)], [True], ["tensor", 0])]], [0])
        sent.append(wire.mailbox.num_sent - before)
    assert sent == [2, 3, 2, 2, 2]


def test_both_ends_forget_the_same_key():
    wire = Wire([2], posts_ahead=True)
    for key in [*range(MOST_KEYS + 5), 0, 7, 3, *range(MOST_KEYS)]:
        wire.step([[([torch.full((2, 1), float(key))], [False], ["tensor", 0])]], [0], key=key)
    assert len(wire.forecasts[0]._of_key) == MOST_KEYS


@pytest.mark.parametrize("length", [1, 100, 5000])
def test_headers_carry_texts_of_any_length(length):
    contents = describe([torch.zeros(2, 3)], [True], ["plain", "ü" * length], 2, 0)
    header, text = encode_header(contents)
    is_as_forecast, num_bytes, found = read_header(bytes(header.tolist()))
    assert not is_as_forecast
    if text is None:
        assert found == contents
    else:
        assert found is None
        assert len(text) == num_bytes > 200
    assert parse_template(contents.template) == ["plain", "ü" * length]


def test_equal_numbers_of_other_types_are_other_contents():
    texts = [describe([], [], ["plain", value], 2, 0).template for value in (1, 1.0, True, 0, 0.0)]
    assert len(set(texts)) == len(texts)
    nan = describe([], [], ["plain", math.nan], 2, 0)
    assert nan == describe([], [], ["plain", -math.nan + 0], 2, 0)


def test_sparse_tensors_are_refused():
    with pytest.raises(RuntimeMismatchError, match=r"stage 3: .*to_dense\(\)"):
        describe([torch.eye(4).to_sparse()], [False], ["tensor", 0], 4, 3)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (([torch.zeros(2, 5)], [torch.zeros(2, 7)]), r"shape \[5\] float32 and rank 8 rows of"),
        (
            ([torch.zeros(2)], [torch.zeros(2).int()]),
            r"shape \[\] float32 and rank 8 rows of shape \[\] int32",
        ),
    ],
)
def test_replicas_that_send_other_shapes_are_refused(values, problem):
    contents = [describe(v, [False], ["tensor", 0], 2, 0) for v in values]
    with pytest.raises(RuntimeMismatchError, match=f"microbatch 1: rank 4 sends rows of {problem}"):
        require_agreement(contents, [4, 8], 1)


def test_replicas_that_send_other_numbers_are_refused():
    contents = [describe([], [], ["tuple", [["plain", v]]], 2, 0) for v in (0.5, 0.25)]
    with pytest.raises(
        RuntimeMismatchError,
        match=r"rank 4 sends the plain values 0.5 and rank 8 the plain values 0.25 for their rows;"
        " a value that depends on the data has to be a tensor with rows",
    ):
        require_agreement(contents, [4, 8], 1)


class StreamWork(Work):
    """A send of the device: waiting for it would stop the computing stream."""

    def wait(self):
        raise AssertionError("the computing stream waits for a send")


def test_polled_sends_never_wait_on_a_stream():
    sends = PolledSends()
    works = [StreamWork() for _ in range(3)]
    headers = [Work() for _ in range(3)]
    for microbatch in range(3):
        sends.keep(
            microbatch,
            [torch.zeros(1)],
            Works(headers=[headers[microbatch]], tensors=[works[microbatch]]),
        )
    assert len(sends._open) == 3
    sends.confirm_arrival(0)
    sends.finish()
    assert all(header.is_done for header in headers)
    assert len(sends._open) == 3, "the device still sends, so the tensors are kept"
    works[0].is_done = works[1].is_done = True
    sends.finish()
    assert [entry.microbatch for entry in sends._open] == [2]


def test_polled_sends_hold_the_host_when_memory_is_short():
    sends = PolledSends()
    sends.most_open = 1

    class Slow(StreamWork):
        asked = 0

        def is_completed(self):
            self.asked += 1
            return self.asked > 3

    works = [Slow(), Slow()]
    for microbatch, work in enumerate(works):
        sends.keep(microbatch, [torch.zeros(1)], Works(tensors=[work]))
    assert works[0].asked == 4
    assert len(sends._open) == 1
