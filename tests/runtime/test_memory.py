"""What a rank holds at once stays near what the plan predicts."""

import ctypes
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from pipeplan.cost import BYTES_IN_GB, CostModel  # noqa: E402
from pipeplan.measure import profile as profile_model  # noqa: E402
from pipeplan.runtime import Pipeline  # noqa: E402
from runtime.samples import Block, cut_plan, mlp_loss  # noqa: E402
from runtime.workers import run_ranks  # noqa: E402

MMAP_THRESHOLD, SMALLEST_BYTES = -3, 32_768  # M_MMAP_THRESHOLD of mallopt
NUM_LAYERS, MICROBATCHES = 8, 6
ALLOWANCE = 1.2


class MallocInfo(ctypes.Structure):
    """What `mallinfo2` returns; `hblkhd` are the bytes in mapped allocations."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class LiveBytes(TorchDispatchMode):
    """The most bytes that this process holds at once in large allocations, seen after every op.

    The C library is told to map each of them by itself, and counts what is mapped. (Watching
    tensors from Python misses those that only autograd or a message under way still holds.)
    """

    def __init__(self):
        super().__init__()
        self._library = ctypes.CDLL("libc.so.6")
        self._library.mallinfo2.restype = MallocInfo
        self._start = self._mapped_bytes()
        self.most = 0

    def _mapped_bytes(self):
        return self._library.mallinfo2().hblkhd

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.most = max(self.most, self._mapped_bytes() - self._start)
        return output


def make_blocks():
    torch.manual_seed(0)
    return nn.Sequential(*(Block(64) for _ in range(NUM_LAYERS))), torch.randn(16, 32, 64)


def make_mlp(width=128):
    """Layers that keep hardly more than what crosses a cut."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(NUM_LAYERS))
    return nn.Sequential(*layers), torch.randn(256, width)


def measure(rank, make, plans):
    """For each plan, bytes held by this rank and bytes predicted."""
    found = []
    ctypes.CDLL("libc.so.6").mallopt(MMAP_THRESHOLD, SMALLEST_BYTES)
    for plan in plans:
        model, sample = make()
        data = torch.cat([sample] * MICROBATCHES)
        with Pipeline(plan, model, mlp_loss, torch.optim.AdamW) as pipeline:
            pipeline.step(data, data)
            state_bytes = sum(
                tensor.nbytes
                for parameter in pipeline.model.parameters()
                for tensor in (parameter, *pipeline.optimizer.state[parameter].values())
            )
            state_bytes += sum(bucket.flat.nbytes for bucket in pipeline._replica.reducer._buckets)
            with LiveBytes() as live:
                pipeline.step(data, data)
            stage = plan.stages[pipeline.stage]
            most = plan.schedule.most_in_flight(pipeline.stage)
            cost = CostModel(plan.model, plan.cluster)
            predicted_gb = cost.memory_gb(stage, most)[pipeline.replica]
            found.append((state_bytes + live.most, predicted_gb * BYTES_IN_GB))
    return found


def check(make, schedules_and_recompute, cuts=(0, 2, 4, 6), replicas=(1, 1, 1, 1)):
    names = [str(i) for i in range(NUM_LAYERS)]

    def profile_in_rank(rank):
        """In a rank, with the same single thread."""
        model, sample = make()
        return profile_model(model, sample, loss_fn=mlp_loss, targets=sample)

    profile = run_ranks(1, profile_in_rank)[0]
    plans = []
    for schedule, recompute in schedules_and_recompute:
        options = {"schedule": schedule, "recompute": recompute}
        rows = profile.microbatch_size
        plan = cut_plan(names, cuts, replicas, MICROBATCHES, rows, **options)
        plans.append(replace(plan, model=profile))
    for rank, found in enumerate(run_ranks(4, measure, make, plans)):
        for plan, (held_bytes, predicted_bytes) in zip(plans, found, strict=True):
            ratio = held_bytes / predicted_bytes
            assert ratio <= ALLOWANCE, f"rank {rank}: {ratio:.3f} of the prediction, {plan.stages}"


def test_memory_of_transformer_blocks():
    check(make_blocks, [("1f1b", False), ("pe", True)])


def test_memory_of_replicated_stages():
    check(make_blocks, [("1f1b", False)], cuts=(0, 2, 6), replicas=(1, 2, 1))


def test_memory_of_small_layers():
    check(make_mlp, [("1f1b", False)])


@pytest.mark.full
def test_memory_of_more_schedules():
    both = [(name, again) for name in ("gpipe", "1f1b", "pe") for again in (False, True)]
    check(make_blocks, both)
    check(make_blocks, both, cuts=(0, 2, 6), replicas=(1, 2, 1))
    check(make_mlp, [("gpipe", False), ("1f1b", True), ("pe", False)])
