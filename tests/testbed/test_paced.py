"""The emulated device computes while its card sends."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from pipeplan.pipeline import Kind  # noqa: E402
from pipeplan.runtime.exchange.transports import GlooTransport  # noqa: E402
from pipeplan.testbed import paced  # noqa: E402
from pipeplan.testbed.paced import DeviceClock, NotingTransport, PacedReducer  # noqa: E402

LIMIT_S = 30.0


class Sent:
    """A send of gloo that is under way until somebody says that it has gone."""

    def __init__(self):
        self.gone = threading.Event()

    def wait(self):
        assert self.gone.wait(LIMIT_S)


@pytest.fixture
def transport(monkeypatch):
    """A transport whose gloo copies nothing before `begin` is set; `calls` are gloo's own."""
    made = NotingTransport(DeviceClock(1), (0.0, 0.0, 0.0), 1)
    made.begin, made.calls, made.sent, made.fails = threading.Event(), [], [], False

    def send(self, tensor, rank, tag, channel, kind):
        assert made.begin.wait(LIMIT_S)
        if made.fails:
            raise RuntimeError("the connection is closed")
        made.calls.append((rank, tag))
        made.sent.append(Sent())
        return made.sent[-1]

    monkeypatch.setattr(GlooTransport, "send", send)
    return made


def test_a_send_does_not_hold_the_device_and_keeps_its_order(transport):
    works = [transport.send(torch.zeros(1), 1, tag, 0, Kind.FORWARD) for tag in range(20)]
    assert not transport.calls  # gloo copies for as long as it likes
    transport.begin.set()
    deadline_s = time.monotonic() + LIMIT_S
    while len(transport.sent) < len(works):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    waits = threading.Thread(target=works[-1].wait)
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()  # handed to gloo, but not sent
    transport.sent[-1].gone.set()
    waits.join(LIMIT_S)
    assert not waits.is_alive()
    assert transport.calls == [(1, tag) for tag in range(20)]


def test_an_error_of_a_send_is_raised_by_its_wait(transport):
    transport.fails = True
    work = transport.send(torch.zeros(1), 2, 0, 0, Kind.BACKWARD)
    transport.begin.set()
    with pytest.raises(RuntimeError, match="the connection is closed"):
        work.wait()


class Summing:
    """A reducer of three all-reduces that end with stage 4; notes when they start."""

    def __init__(self):
        self.started_s, self.sizes = [], {4: [100, 200, 100]}
        self.starts_inside = True

    def begin_backward(self, **told):
        self.told = told

    def sizes_left(self, stage):
        return self.sizes[stage]

    def start_one(self):
        self.started_s.append(time.perf_counter())


def test_parts_of_gradients_start_inside_the_last_backward_but_for_the_last_of_them():
    summing = Summing()
    reducer = PacedReducer(summing, 0.0)
    assert not summing.starts_inside  # real gradients are there much too early
    start_s = time.perf_counter()
    reducer.begin_backward(is_last=False, stage=4, rest=None)
    reducer.start_parts(start_s, 0.08)
    assert summing.started_s == []
    reducer.begin_backward(is_last=True, stage=4, rest=None)
    assert summing.told == {"is_last": True, "stage": 4, "rest": None}
    reducer.start_parts(start_s, 0.08)
    first_s, second_s = summing.started_s
    assert start_s + 0.02 <= first_s < second_s
    assert start_s + 0.06 <= second_s


def test_all_reduces_run_one_at_a_time(monkeypatch):
    under_way, most = [], []

    class Sum:
        def __init__(self):
            under_way.append(self)
            most.append(len(under_way))

        def wait(self):
            time.sleep(0.001)
            if self in under_way:
                under_way.remove(self)

    monkeypatch.setattr(paced, "start_sum", lambda tensor, group: Sum())
    summing = Summing()
    PacedReducer(summing, 0.001)
    works = [summing.start_sum(torch.zeros(1), None) for _ in range(5)]
    for work in works:
        work.wait()
    assert most == [1] * 5
    assert not under_way
