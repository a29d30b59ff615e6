"""Programs that differ between ranks, at the start or later: refused in one line on every rank.

Nothing here changes a number that the code reads, which would be named at once (see
`test_code_agreement`). What differs shows only in what the ranks compute. All scenes run one after
another on the same ranks, with replicas and without.
"""

import contextlib
import os
import tempfile

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from pipeplan.runtime import Pipeline, RuntimeMismatchError, add_loss  # noqa: E402
from runtime.samples import cut_plan  # noqa: E402
from runtime.workers import run_ranks  # noqa: E402

NAMES = list("0123")
IS_MAIN = None
KIND = "plain"
RECORDS = []
COUNT = 0
SETTING = "PIPEPLAN_TEST_SETTING"


def bend(x):
    return torch.tanh(x)


def bend_more(x):
    return torch.tanh(x) * 1.5


def scaled(x, factor=1.0):
    return x * factor


class Branch(torch.autograd.Function):
    """The identity, whose gradient is halved on the main rank."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5 if IS_MAIN else gradient


class Layer(nn.Module):
    """Reads about everything that a program may change behind the back of its ranks."""

    def __init__(self, size=6):
        super().__init__()
        self.linear, self.act, self.kind = nn.Linear(size, size), torch.tanh, "plain"

    def forward(self, x):
        y = self.act(self.linear(x))
        return y.relu() if self.kind == "relu" else y


class Detaching(Layer):
    def forward(self, x):
        y = self.linear(x)
        return super().forward(x) + (y.detach() if IS_MAIN else y)


class Hooked(Layer):
    def forward(self, x):
        y = super().forward(x)
        if IS_MAIN and y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.1)
        return y


class Halving(Layer):
    def forward(self, x):
        return Branch.apply(super().forward(x))


class Adding(Layer):
    def forward(self, x):
        y = super().forward(x)
        if IS_MAIN:
            add_loss(y.square().mean())
        return y


class Texts(Layer):
    def forward(self, x):
        y = super().forward(x)
        return y.relu() if KIND == "relu" else y


class Listing(Layer):
    def forward(self, x):
        return super().forward(x) * (RECORDS[-1]["scale"] if RECORDS else 1.0)


class Calling(Layer):
    def forward(self, x):
        return bend(self.linear(x))


class Defaulting(Layer):
    def forward(self, x):
        return scaled(super().forward(x))


class Asking(Layer):
    def forward(self, x):
        return super().forward(x) * float(os.environ.get(SETTING, "1"))


class Borrowing(Layer):
    def forward(self, x):
        return nn.functional.hardswish(self.linear(x))


class Reading(Layer):
    """Reads a file."""

    path = os.path.join(tempfile.gettempdir(), f"pipeplan-test-{os.getpid()}")

    def forward(self, x):
        return super().forward(x) * (2.0 if os.path.exists(f"{self.path}-{dist.get_rank()}") else 1)


def make_model(kind):
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in NAMES))


def make_batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def set_flag(rank, pipeline=None):
    global IS_MAIN
    IS_MAIN = rank == 0


def set_kind(rank, pipeline):
    global KIND
    KIND = "relu" if rank == 0 else "other"


def append_record(rank, pipeline):
    if rank == 0:
        RECORDS.append({"scale": 0.5})


def replace_function(rank, pipeline):
    global bend
    if rank == 0:
        bend = bend_more


def change_defaults(rank, pipeline):
    if rank == 0:
        scaled.__defaults__ = (2.0,)


def change_environment(rank, pipeline):
    if rank == 0:
        os.environ[SETTING] = "0.5"


def patch_library(rank, pipeline):
    if rank == 0:
        nn.functional.hardswish = nn.functional.relu


def write_file(rank, pipeline):
    if rank == 0:
        open(f"{Reading.path}-0", "w").close()


def replace_attribute(rank, pipeline):
    """On one replica of the last stage."""
    if rank == dist.get_world_size() - 1:
        pipeline.model[3].act = torch.sigmoid


def set_texts(rank, pipeline):
    """Replicas set other texts."""
    if rank:
        pipeline.model[3].kind = "relu" if rank == 1 else "plain!"


def undo():
    """All is as before."""
    global IS_MAIN, KIND, bend
    IS_MAIN, KIND, bend, scaled.__defaults__ = None, "plain", ORIGINAL, (1.0,)
    RECORDS.clear()
    os.environ.pop(SETTING, None)
    nn.functional.hardswish = HARDSWISH
    with contextlib.suppress(FileNotFoundError):  # both ranks do it
        os.remove(f"{Reading.path}-0")


ORIGINAL, HARDSWISH = bend, nn.functional.hardswish

AT_ONCE = {
    "detach": (Detaching, set_flag),
    "hook": (Hooked, set_flag),
    "backward": (Halving, set_flag),
    "add_loss": (Adding, set_flag),
    "text": (Texts, set_kind),
    "record": (Listing, append_record),
    "function": (Calling, replace_function),
    "defaults": (Defaulting, change_defaults),
    "environment": (Asking, change_environment),
}
"""What is refused in the step behind the change, whenever that is."""
WITH_REPLICAS = {"attribute": (Layer, replace_attribute), "texts of layers": (Layer, set_texts)}
LATER = {"library": (Borrowing, patch_library), "file": (Reading, write_file)}
"""What no variable shows: refused behind the next batch of 1, 2, 4, 8, ..."""


def refuse(plan, kind, change, rank, first):
    """What is said, and in which step; the program changes in front of step `first`."""
    text, step, pipeline = "", 0, None
    try:
        if not first:
            change(rank, None)
        pipeline = Pipeline(plan, make_model(kind), nn.functional.mse_loss, sgd)
        for step in range(9):
            if step == first and step:
                change(rank, pipeline)
            pipeline.step(*make_batch(step))
    except RuntimeMismatchError as error:
        text = str(error)
    undo()
    dist.barrier()
    if pipeline is not None:
        pipeline.close()
    return text, step


def run_scenes(rank, replicas):
    plan = cut_plan(NAMES, [0, 2], replicas, 2, 4)
    said = {}
    for first in (0, 3):
        for name, (kind, change) in AT_ONCE.items():
            said[name, first] = refuse(plan, kind, change, rank, first)
    for name, (kind, change) in LATER.items():
        said[name, 3] = refuse(plan, kind, change, rank, 3)
    if max(replicas) > 1:
        for name, (kind, change) in WITH_REPLICAS.items():
            said[name, 3] = refuse(plan, kind, change, rank, 3)
    return said


@pytest.mark.parametrize("replicas", [[1, 1], [1, 2]])
def test_ranks_that_compute_something_else_are_refused(replicas):
    first, *others = run_ranks(sum(replicas), run_scenes, replicas)
    for name, (text, step) in first.items():
        assert text.startswith(("model: ", "3.act: the program has changed it")), (name, text)
        assert "\n" not in text
        if text.startswith("model: "):
            assert "its code or its loss's reads something that differs" in text
        assert step == (4 if name[0] in LATER else name[1]), (name, step)
    for said in others:
        assert said == first


def freeze(rank, replicas, kind):
    model = make_model(Layer)
    model[0].linear.weight.requires_grad_(rank != 0)
    plan = cut_plan(NAMES, [0, 2], replicas, 2, 4)
    with pytest.raises(RuntimeMismatchError) as caught:
        Pipeline(plan, model, nn.functional.mse_loss, sgd)
    return str(caught.value)


@pytest.mark.parametrize("replicas", [[1, 1], [2, 1]])
def test_a_weight_that_is_frozen_on_one_rank_is_named(replicas):
    for text in run_ranks(sum(replicas), freeze, replicas, Layer):
        assert text.startswith("parameter '0.linear.weight': is (6, 6) torch.float32 trained on")
