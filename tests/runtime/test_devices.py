"""What can be known about GPUs without one: which GPU, in which order, and who waits for what."""

import contextlib
import copy
import threading
from pathlib import Path
from unittest.mock import MagicMock

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pipeplan.pipeline import Block, Kind  # noqa: E402
from pipeplan.runtime import Pipeline, streams, training  # noqa: E402
from pipeplan.runtime.device_timing import DeviceTiming  # noqa: E402
from pipeplan.runtime.exchange.transports import NcclTransport  # noqa: E402
from pipeplan.runtime.streams import Mark, Streams, choose_cuda_device  # noqa: E402
from pipeplan.runtime.supervision import launching  # noqa: E402
from pipeplan.runtime.supervision.status_board import State  # noqa: E402
from runtime.samples import TinyLanguageModel, cut_plan, token_loss  # noqa: E402
from runtime.workers import run_ranks, share_from_first  # noqa: E402


class FakeCuda:
    """Stands for torch.cuda; notes the calls."""

    def __init__(self, count=4, current=0):
        self.count, self.current, self.calls = count, current, []

    def device_count(self):
        return self.count

    def is_available(self):
        return self.count > 0

    def current_device(self):
        return self.current

    def set_device(self, device):
        self.calls.append(("set_device", str(device)))


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    for name in ("device_count", "is_available", "current_device", "set_device"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return fake


@pytest.mark.parametrize(("local_rank", "index"), [("0", 0), ("3", 3), ("5", 1)])
def test_the_gpu_is_that_of_the_local_rank(cuda, monkeypatch, local_rank, index):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert choose_cuda_device() == torch.device("cuda", index)


def test_without_torchrun_the_program_has_chosen(cuda):
    cuda.current = 2
    assert choose_cuda_device() == torch.device("cuda", 2)
    cuda.count = 0
    assert choose_cuda_device() is None


def test_ranks_join_with_their_gpu_set_first(cuda, monkeypatch):
    """Before the first collective; the group knows the device, so that it connects at once."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(dist, "PrefixStore", MagicMock())
    for name in ("_meet", "_watch_start", "keep_for_pipeline"):
        monkeypatch.setattr(launching, name, MagicMock())

    def init(backend, *, device_id=None, **_):
        cuda.calls.append(("init", backend, str(device_id)))

    monkeypatch.setattr(dist, "init_process_group", init)
    launching.join_ranks()
    assert cuda.calls == [("set_device", "cuda:3"), ("init", "nccl", "cuda:3")]


# ------------------------------------------------------------------ timing


class FakeMark(Mark):
    def __init__(self, log, now_s):
        self.log, self.now_s = log, now_s

    def wait(self):
        self.log.append(self.now_s)

    def seconds_since(self, earlier):
        return self.now_s - earlier.now_s


class FakeStreams(Streams):
    """A device whose stream passes a mark every second."""

    def __init__(self):
        self.device = torch.device("cpu")
        self.log, self.inside = [], threading.local()
        self.num_marks = 0

    @contextlib.contextmanager
    def receiving(self):
        self.inside.depth = getattr(self.inside, "depth", 0) + 1
        yield
        self.inside.depth -= 1

    def hand_over(self, tensor):
        assert isinstance(tensor, torch.Tensor)
        self.log.append("hand over")

    def mark(self):
        self.num_marks += 1
        return FakeMark(self.log, float(self.num_marks))

    def synchronize(self):
        self.log.append("synchronize")


def test_traces_and_watchdog_follow_the_device():
    fake = FakeStreams()
    timing = DeviceTiming(fake)
    blocks = [Block(Kind.FORWARD, 0, 0), Block(Kind.BACKWARD, 0, 0)]
    for block in blocks:
        timing.note(block, timing.mark())
    timing.follow(lambda state, doing: fake.log.append((state, doing)))
    forward, backward = blocks
    assert fake.log == [
        *((State.WAITING, forward), 2.0, (State.COMPUTING, forward), 3.0),
        *((State.WAITING, backward), 4.0, (State.COMPUTING, backward), 5.0),
    ]
    start_s = timing._start_s
    spans = [
        (e.name, e.category, round(e.start_s - start_s, 6), round(e.end_s - start_s, 6))
        for times in timing.times()
        for e in times.events(tells_stage=False)
    ]
    assert spans == [
        *(("F0", "wait", 0.0, 1.0), ("F0", "forward", 1.0, 2.0)),
        *(("B0", "wait", 2.0, 3.0), ("B0", "backward", 3.0, 4.0)),
    ]


# ------------------------------------------------------------------ the transport of GPUs, on CPUs


class DeviceWork:
    """A send that nobody may wait for; a thread waits in the place of the device."""

    def __init__(self, work):
        self._thread = threading.Thread(target=work.wait, daemon=True)
        self._thread.start()

    def is_completed(self):
        return not self._thread.is_alive()

    def wait(self):
        if threading.current_thread() is threading.main_thread() and not SETTING_UP[0]:
            raise AssertionError("the computing stream waits for a send")
        self._thread.join()


SETTING_UP = [True]


class SimulatedTransport(NcclTransport):
    """NCCL's rules over gloo: messages in order, receives on another stream, sends not waited for.

    Every channel has a group of its own, and all tensors have the tag 0, so order alone decides.
    """

    def send(self, tensor, rank, tag, channel, kind):
        assert not getattr(self.streams.inside, "depth", 0), "a send has to follow the computation"
        return DeviceWork(super().send(tensor, rank, tag, channel, kind))

    def receive(self, tensor, rank, tag, channel, kind):
        self.streams.log.append("receive")
        return super().receive(tensor, rank, tag, channel, kind)


def train_simulated(rank, plans):
    found = []

    def make(local_index, stage_ranks):
        SETTING_UP[0] = True
        transport = SimulatedTransport(FakeStreams(), stage_ranks)
        SETTING_UP[0] = False
        assert transport.streams.log[-1] == "synchronize", "communicators are made at the start"
        return transport

    training.make_transport = make
    for plan in plans:
        torch.manual_seed(0)
        model = TinyLanguageModel(tied=True).double()
        reference = copy.deepcopy(model)
        data = []
        for rows, length in ((12, 5), (12, 5), (7, 9), (12, 2), (3, 4), (12, 5)):
            tokens = torch.randint(17, (rows, length + 1))
            data.append((tokens[:, :-1], tokens[:, 1:]))
        with Pipeline(plan, model, token_loss, sgd) as pipeline:
            losses = []
            for batch, targets in data:
                losses.append(pipeline.step(batch, targets))
                losses.append(pipeline.evaluate(batch[:5], targets[:5]))
            log = pipeline._transport.streams.log
            num_received = log.count("receive") - log[: log.index("synchronize")].count("receive")
            assert log.count("hand over") == num_received
        alone = share_from_first(lambda: train_alone(reference, data))  # noqa: B023
        assert losses == pytest.approx(alone, rel=1e-9)
        found.append(losses)
    return found


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def train_alone(model, data):
    optimizer, losses = sgd(model.parameters()), []
    for batch, targets in data:
        optimizer.zero_grad()
        loss = token_loss(model(batch), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            losses.append(token_loss(model(batch[:5]), targets[:5]).item())
    return losses


def test_the_transport_of_gpus_trains_alike():
    names = ["before", "blocks.0", "blocks.1", "blocks.2", "behind"]
    plans = [
        cut_plan(names, [0, 1, 3], [1, 2, 1], 4, 3),
        cut_plan(names, [0, 2], [2, 2], 3, 4, schedule="pe"),
        cut_plan(names, [0, 1, 2, 3], [1, 1, 1, 1], 4, 3, schedule="gpipe", recompute=True),
    ]
    run_ranks(4, train_simulated, plans, timeout_s=100)


def test_no_other_module_calls_cuda():
    """Streams and events are behind one seam; seeding and autocast are no streams."""
    root = Path(streams.__file__).parent
    words = ("cuda.Stream", "cuda.Event", "cuda.set_device", "cuda.synchronize", "record_stream")
    for path in root.rglob("*.py"):
        if path.name != "streams.py":
            text = path.read_text()
            assert not [word for word in words if word in text], path
