"""Variables that the code of model and loss reads are alike on all ranks, and hold no batch."""

import functools
import io
import time
import types
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from pipeplan.runtime import Pipeline, RuntimeMismatchError  # noqa: E402
from pipeplan.runtime.code_agreement import CodeAgreement  # noqa: E402
from pipeplan.runtime.code_variables import find_variables  # noqa: E402
from pipeplan.runtime.rank_values import is_time  # noqa: E402
from runtime.samples import cut_plan, make_mlp, mlp_loss  # noqa: E402
from runtime.workers import Ranks, run_ranks  # noqa: E402

NAMES = list("01234")
FACTOR, TABLE, UNREAD = 1.0, {"a": 1.0, "b": [2.0]}, 3.0
RANK, WRITER, NAME = 0, None, "run"
HELD = {}
settings = types.ModuleType("settings")
settings.alpha, settings.beta = 0.5, 0.25


class Config:
    scale = 2.0

    def __init__(self):
        self.rate, self.other = 0.1, 7

    def half(self):
        return self.rate / 2


CONFIG = Config()


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.UNREAD = 1.0

    def forward(self, x):
        parts = [entry * FACTOR for entry in (x, x)]  # inside of a comprehension
        return sum(parts) * self.weight * self.UNREAD * settings.alpha + helper()


def helper():
    return TABLE["b"][0] * CONFIG.half() * Config.scale


class Loss:
    def __init__(self):
        self.margin = 0.1

    def __call__(self, output, targets):
        return (output - targets).square().mean() + self.margin


def names_of(*functions, modules=()):
    return {variable.name for variable in find_variables(modules, functions)}


def test_variables_are_found_where_code_reads_them():
    found = names_of(modules=[Reads()])
    assert {"FACTOR", "TABLE", "CONFIG", "settings.alpha", "Config.scale"} <= found
    assert not {"UNREAD", "settings.beta"} & found, "an attribute of that name is no global"
    weight = torch.ones(2)

    def closing(output, targets):
        return (output * weight).mean()

    assert names_of(closing) == {"weight"}
    assert names_of(Loss()) == {"Loss.margin"}
    assert names_of(functools.partial(closing, targets=None)) == {"weight"}
    assert names_of(Loss().__call__) == {"Loss.margin"}
    assert not names_of(nn.functional.mse_loss, print)


@pytest.fixture
def agreement():
    made = CodeAgreement(Reads(), [reading_loss], 0)
    made.end_step()
    return made


def reading_loss(output, targets):
    return (output - targets).square().mean() * HELD.get("weight", 1.0)


def change_factor(value):
    global FACTOR
    FACTOR = value


class Configured(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x):
        return self._scaled(x)

    def _scaled(self, x):
        return x * self.config.tau


def test_a_configuration_that_layers_hold_is_watched():
    config = types.SimpleNamespace(tau=1.0, other=2)
    agreement = CodeAgreement(nn.Sequential(Configured(config), Configured(config)), [], 0)
    config.other = 3
    assert agreement.changes(None, None) == 0
    config.tau = 0.5
    assert agreement.changes(None, None)
    agreement.end_step()
    assert agreement.changes(None, None) == 0
    assert agreement.changes(None, None, training=False), "and so is the mode"


CHANGES = {
    "a global": (lambda: change_factor(0.5), lambda: change_factor(1.0)),
    "an entry": (lambda: TABLE["b"].append(1.0), lambda: TABLE["b"].pop()),
    "an attribute": (lambda: setattr(CONFIG, "rate", 0.2), lambda: setattr(CONFIG, "rate", 0.1)),
    "a class": (lambda: setattr(Config, "scale", 3.0), lambda: setattr(Config, "scale", 2.0)),
    "a module": (lambda: setattr(settings, "alpha", 1), lambda: setattr(settings, "alpha", 0.5)),
    "to nothing": (
        lambda: setattr(settings, "alpha", None),
        lambda: setattr(settings, "alpha", 0.5),
    ),
    "a new entry": (lambda: HELD.update(weight=2.0), HELD.clear),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_of_the_program_is_seen_and_one_of_the_model_is_not(agreement, kind):
    change, undo = CHANGES[kind]
    batch = torch.zeros(4, 3)
    assert agreement.changes(batch, batch) == 0
    change()
    try:
        found = agreement.changes(batch, batch)
        assert found
        assert found == agreement.changes(batch, batch)
        agreement.end_step()  # as if the model had changed it inside of the step
        assert agreement.changes(batch, batch) == 0
    finally:
        undo()
    assert agreement.changes(batch, batch) not in (0, found)


def test_scales_and_rates_are_no_times(monkeypatch):
    assert is_time(time.time() - 0.5)
    assert not is_time(time.time() + 2000.5001)
    for now_s in (10.0, 700.0, 1e6):  # however long host and process run
        for clock in ("monotonic", "perf_counter", "process_time"):
            monkeypatch.setattr(time, clock, lambda now_s=now_s: now_s)
        for value in (0.51234, 3.14159, 41.23456, 650.12345):
            assert not is_time(value)


def test_what_nobody_reads_may_change(agreement):
    global UNREAD
    UNREAD, CONFIG.other, settings.beta = 4.0, 8, 0.125
    assert agreement.changes(torch.zeros(4, 3), None) == 0


@pytest.mark.parametrize(
    ("held", "is_first"),
    [
        (lambda batch: batch, True),
        (lambda batch: batch[:, 0], True),
        (lambda batch: batch.numpy(), True),
        (lambda batch: batch * 2, False),
        (lambda batch: np.zeros(len(batch)), False),
    ],
)
def test_a_variable_that_holds_the_batch_is_refused(held, is_first):
    agreement, batch = CodeAgreement(Reads(), [reading_loss], 0), torch.randn(4, 3)
    if not is_first:
        agreement.changes(batch, None)
        agreement.end_step()
    HELD["weight"] = held(batch)
    try:
        with pytest.raises(RuntimeMismatchError, match=r"HELD\['weight'\]: .* holds 4 rows"):
            agreement.changes(None, batch)
    finally:
        HELD.clear()


def test_constants_may_have_as_many_rows_as_the_batch():
    HELD["weight"] = torch.ones(4)
    try:
        agreement, batch = CodeAgreement(Reads(), [reading_loss], 0), torch.randn(4, 3)
        for _ in range(3):
            assert agreement.changes(batch, batch) == 0
            agreement.end_step()
    finally:
        HELD.clear()


# ------------------------------------------------------------------ with ranks


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def make_batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 12, generator=generator), torch.randn(8, 4, generator=generator)


def make_pipeline(loss_fn=mlp_loss, model=None, **options):
    torch.manual_seed(0)
    plan = cut_plan(NAMES, [0, 2], [1, 1], 2, 4)
    return Pipeline(plan, model or make_mlp(), loss_fn, sgd, **options)


def scaled_loss(output, targets):
    return mlp_loss(output, targets) * FACTOR


def logging_loss(output, targets):
    if RANK == 0 and WRITER is not None:
        WRITER.write(NAME)
    return mlp_loss(output, targets)


def mixed(rank):
    """Variables and attributes that differ at the start."""
    global RANK, WRITER, NAME
    said = []
    change_factor(1.0 + rank)
    with pytest.raises(RuntimeMismatchError) as caught:
        make_pipeline(scaled_loss)
    said.append(str(caught.value))
    dist.barrier()
    change_factor(1.0)
    teacher = nn.Linear(4, 4)
    with torch.no_grad():
        teacher.weight.fill_(rank)

    def taught(output, targets):
        return mlp_loss(output, teacher(targets))

    with pytest.raises(RuntimeMismatchError) as caught:
        make_pipeline(taught)
    said.append(str(caught.value))
    dist.barrier()
    model = make_mlp()
    model[1].negative_slope = 0.1 * rank
    with pytest.raises(RuntimeMismatchError) as caught:
        make_pipeline(model=model)
    said.append(str(caught.value))
    dist.barrier()
    other = nn.functional.l1_loss if rank else mlp_loss
    with pytest.raises(RuntimeMismatchError) as caught:
        make_pipeline(other)
    said.append(str(caught.value))
    dist.barrier()
    RANK, WRITER, NAME = rank, None if rank else io.StringIO(), f"run-{rank}"
    model = make_mlp()
    model[2] = torch.compile(model[2], backend="eager")  # its attributes have addresses
    with make_pipeline(model=model) as pipeline:
        warnings.filterwarnings("ignore", "The .grad attribute")  # torch's compiler looks for it
        pipeline.step(*make_batch(0))
        with pytest.raises(AttributeError):
            pipeline.optimizer = sgd(pipeline.model.parameters())
    with make_pipeline(logging_loss) as pipeline:
        pipeline.step(*make_batch(0))
    return said


def test_ranks_that_read_other_values_are_refused(capfd):
    for first, second, third, fourth in run_ranks(2, mixed):
        assert fourth.startswith("loss_fn: is 'l1_loss (")
        assert first.startswith("FACTOR: code of the model or the loss reads this, which is 2.0 on")
        assert second.startswith("teacher.weight: code of")
        assert third.startswith("1.negative_slope: code of")


def anneal_alone(rank):
    with make_pipeline(scaled_loss) as pipeline:
        for number in range(4):
            if number < 2 or rank == 0:
                change_factor(1.0 / (1 + number))
            pipeline.step(*make_batch(number))


def loss_of_first_rows(output, targets):
    return mlp_loss(output, HELD["aim"][: len(output)])


def freeze_alone(rank):
    plan = cut_plan(NAMES, [0], [2], 2, 4)
    with Pipeline(plan, make_mlp(), mlp_loss, sgd, verify="off") as pipeline:
        for number in range(2):
            pipeline.step(*make_batch(number))
            next(pipeline.model.parameters()).requires_grad_(rank == 0)


def read_the_batch(rank):
    # Without the weight, it is refused as no mean over rows.
    with make_pipeline(loss_of_first_rows, loss_weight_fn=len) as pipeline:
        for number in range(3):
            batch, targets = make_batch(number)
            HELD["aim"] = targets.double().float()  # not the same memory
            pipeline.step(batch, targets)


def divided_by_rank(output, targets):
    """Computes something else on each rank, by no variable at all."""
    return mlp_loss(output, targets) / (1 + dist.get_rank())


def compute_by_rank(rank):
    with make_pipeline(divided_by_rank) as pipeline:
        pipeline.step(*make_batch(0))


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (compute_by_rank, "with the same weights and rows; its code or its loss's reads"),
        (anneal_alone, "rank 1 has other values than rank 0: set them alike on every rank"),
        (freeze_alone, "is frozen on some ranks that hold it, but not on all"),
        (read_the_batch, "HELD['aim']: code of the model or the loss reads this variable"),
    ],
)
def test_what_a_program_changes_wrongly_is_refused(program, problem):
    with Ranks(2, program) as ranks:
        codes = ranks.wait()
        assert 0 not in codes
        assert None not in codes
        assert problem in "".join(ranks.error(rank) for rank in range(2))
