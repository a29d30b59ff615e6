"""Makes the profile of a model: times each layer alone, where the model is, or estimates it.

Rounds go over all layers and the whole model in turn, so that a machine that becomes slower for a
while is slower for all of them. The median of rounds counts. The layers' sum beside the whole model
says how far to trust the profile.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeplan.documents.text import printable
from pipeplan.errors import InputError, PipeplanError
from pipeplan.measure.atoms import Call, parameters_of
from pipeplan.measure.bench import Bench
from pipeplan.measure.clocks import Clock, clock_of
from pipeplan.measure.merging import merge_layers
from pipeplan.measure.results import ModelMeasurement
from pipeplan.measure.roofline import RooflineClock, find_accelerator
from pipeplan.measure.sessions import Progress, Session
from pipeplan.measure.unchanged import in_training, left_unchanged
from pipeplan.profile import ModelProfile
from pipeplan.runtime.batches import as_call, mark_rows, num_rows, select_rows
from pipeplan.splitting.layout import lay_out
from pipeplan.splitting.nesting import map_tensors, tensors_in
from pipeplan.splitting.torch_private import (
    FakeCopyMode,
    FakeTensorMode,
    is_about_values,
    without_fake_log,
)
from pipeplan.user_code import describe_error

__all__ = ["Progress", "measure_model", "profile"]

FEWEST_RUNS, MOST_RUNS = 5, 40
"""By default rounds go on until they have taken a few seconds, within these numbers."""


def profile(model: Any, batch: Any, **options: Any) -> ModelProfile:
    """The model profile of `model` for microbatches like `batch`; see `measure_model`."""
    return measure_model(model, batch, **options).profile


def measure_model(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    layers: Sequence[str] | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    targets: Any = None,
    name: str = "",
    microbatch_size: int | None = None,
    at: Sequence[int] = (),
    repeats: int | None = None,
    amp_dtype: torch.dtype | None = None,
    estimate: str | None = None,
    tell: Progress | None = None,
) -> ModelMeasurement:
    """Measure a model on its device, or estimate it for another; the model stays as it is.

    Args:
        model: a model on its device, or a function that builds one. For an estimate, the function
            is called on fake tensors, so that a model of any size takes no memory.
        batch: one microbatch: a tensor, a tuple by position or a dict by name; or a function that
            makes it.
        layers: the names of the layers, if they cannot be found automatically.
        loss_fn: belongs to the last layer; gets its output and `targets`.
        targets: for the loss; or a function that makes them.
        name: the profile's name; by default the model's class.
        microbatch_size: the rows of a microbatch, by default those of `batch`; its rows are
            repeated or left out.
        at: further microbatch sizes to measure times at.
        repeats: the number of runs, whose median counts; by default as many as take a few seconds.
        amp_dtype: autocast to this type, as the runtime does.
        estimate: a device such as `a100`, or `TFLOPs,GB/s`: compute times instead of measuring.
        tell: is told how far the work is.

    Raises:
        PipeplanError: no layers are found, or the model cannot run this batch.
    """
    with _world(estimate) as world:
        module = world.build(model)
        call_of = _Batches(world.take(batch), world.take(targets), loss_fn)
        layout = lay_out(module, layers, range(len(layers)) if layers is not None else ())
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        clock = world.clock or clock_of(device)
        rows = call_of.rows if microbatch_size is None else microbatch_size
        sizes = [rows, *(size for size in dict.fromkeys(at) if size != rows)]
        if min(sizes) < 1:
            raise InputError(f"microbatch size: {min(sizes)} is below 1")
        with left_unchanged(module), in_training(module):
            parameters = parameters_of(module, layout)
            runs = []
            for index, size in enumerate(sizes):
                call, loss = call_of.sized(size, device)
                bench = Bench(clock, device, loss, amp_dtype)
                session = Session(module, layout, call, bench, parameters)
                with _explained(_cannot_take(size) if index else CANNOT_TAKE):
                    session.run(
                        _num_runs(repeats, is_estimate=bool(estimate)),
                        in_halves=not index,
                        tell=_part(tell, index, len(sizes)),
                    )
                runs.append(session)
        return merge_layers(
            runs,
            sizes,
            layout,
            name=name or type(module).__name__,
            input_bytes=call_of.bytes_of(rows),
            parameters=parameters,
            device=world.device_name or str(device),
            is_estimate=bool(estimate),
        )


# ------------------------------------------------------------------------------- real or fake


@dataclass(frozen=True, slots=True)
class _World:
    """Where models and batches are made: as they are, or on fake tensors."""

    mode: FakeTensorMode | None = None
    clock: Clock | None = None
    device_name: str = ""

    def build(self, model: Any) -> nn.Module:
        """The model, built if it is a function; a copy without values for an estimate."""
        if not isinstance(model, nn.Module):
            with _explained("model: cannot be built"):
                model = model()
        elif self.mode is not None:
            with FakeCopyMode(self.mode):
                model = copy.deepcopy(model)
        if not isinstance(model, nn.Module):
            raise InputError(f"model: is a {type(model).__name__}, not an nn.Module")
        return model

    def take(self, value: Any) -> Any:
        """A batch or targets, made if it is a function; without values for an estimate."""
        if callable(value) and not isinstance(value, torch.Tensor | Mapping | tuple):
            with _explained("batch: cannot be made"):
                value = value()
        if self.mode is None:
            return value
        return map_tensors(value, self.mode.from_tensor)


@contextlib.contextmanager
def _world(estimate: str | None) -> Iterator[_World]:
    if estimate is None:
        yield _World()
        return
    accelerator = find_accelerator(estimate)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with without_fake_log(), mode, RooflineClock(accelerator) as clock:
        yield _World(mode, clock, accelerator.name)


CANNOT_TAKE = "batch: the model cannot take it"


def _cannot_take(rows: int) -> str:
    """The same for a further size, which may be one that nobody asked for."""
    several = "row" if rows == 1 else "rows"
    return (
        f"at: the model cannot be timed at {rows} {several}; give other sizes (at=[{rows + 1}]), or"
        " none (at=[])"
    )


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Errors of a user's code in one line; a full memory with its remedy."""
    try:
        yield
    except PipeplanError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "alloc" in str(error):
            raise InputError(
                "model: is too large for the memory of this device"
                f" ({printable(describe_error(error))}); make microbatches smaller, or estimate it"
                " without running (--estimate a100)"
            ) from error
        if is_about_values(error):
            raise InputError(
                "estimate: the model needs the value of a tensor, which an estimate does not have"
                f" ({printable(describe_error(error))}); measure it, or leave such branches out"
            ) from error
        raise InputError(f"{what}: {printable(describe_error(error))}") from error


class _Batches:
    """The example batch with its targets, at any number of rows."""

    def __init__(self, batch: Any, targets: Any, loss_fn: Callable[..., Any] | None) -> None:
        self.rows = num_rows(batch, "batch")
        self._batch = mark_rows(batch, self.rows, "batch")
        self._targets = None if targets is None else mark_rows(targets, self.rows, "targets")
        self._loss_fn = loss_fn

    def _select(self, marked: Any, size: int, device: torch.device | None = None) -> Any:
        rows = [row % self.rows for row in range(size)]
        return select_rows(marked, rows, device)

    def sized(self, size: int, device: torch.device) -> tuple[Call, Callable[[Any], Any] | None]:
        """The model's call and the loss for so many rows, on the device."""
        call = Call(*as_call(self._select(self._batch, size, device)))
        loss_fn = self._loss_fn
        if loss_fn is None:
            return call, None
        targets = None if self._targets is None else self._select(self._targets, size, device)
        return call, lambda output: loss_fn(output, targets)

    def bytes_of(self, size: int) -> float:
        """The bytes of the model's inputs for so many rows."""
        return float(sum(t.nbytes for t in tensors_in(self._select(self._batch, size))))


def _num_runs(repeats: int | None, *, is_estimate: bool) -> range:
    """The fewest and the most rounds, as a range."""
    if is_estimate:
        return range(1, 1)
    if repeats is None:
        return range(FEWEST_RUNS, MOST_RUNS)
    if repeats < 1:
        raise InputError(f"repeats: {repeats} is below 1")
    return range(repeats, repeats)


def _part(tell: Progress | None, index: int, num_parts: int) -> Progress | None:
    """Progress of one of several parts, as progress of all."""
    if tell is None:
        return None
    return lambda done, total: tell(index * total + done, num_parts * total)
