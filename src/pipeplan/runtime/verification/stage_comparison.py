"""Compares one stage with the whole model, on a few rows of the first batch.

The first replica of each stage does this by itself, with the whole model that its rank has built.
It feeds its stage with what enters these layers in the whole model. So stages need no messages, and
all of them compare at the same time. If each stage gives what the whole model gives for it, then so
do all of them together.

Compared are: what leaves the stage, the loss, the gradients of parameters and of what enters, the
buffers afterwards, and which random operations were called. This is done in training and in
evaluation. Parameters whose elements are all equal (zeros in a last layer, gates at zero) are
changed a little while it lasts: they could hide a difference.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pipeplan.documents.text import printable
from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.code_state import KeptState
from pipeplan.runtime.extra_losses import collect_losses
from pipeplan.runtime.module_state import ModuleState
from pipeplan.runtime.parameters import LOSS_NAME
from pipeplan.runtime.placement import name_stages
from pipeplan.runtime.verification.chain_code import look_at_chain
from pipeplan.runtime.verification.differences import (
    REMEMBERS,
    Difference,
    are_close,
    find_difference,
    first_line,
    raised,
)
from pipeplan.runtime.verification.digests import WholeRun, find_other_run
from pipeplan.runtime.verification.loss_rows import LossOfRows
from pipeplan.runtime.verification.nudges import nudged
from pipeplan.runtime.verification.parameter_marks import changed_since, changed_text, marks_of
from pipeplan.runtime.verification.row_division import Divided, look_at_division
from pipeplan.runtime.verification.row_influence import RowReport, look_at_rows
from pipeplan.runtime.verification.runs import evaluate_whole, run_stage, run_whole, try_whole
from pipeplan.runtime.verification.same_randomness import SameRandomness
from pipeplan.runtime.verification.shared_gradients import (
    Projections,
    find_in_sums,
    find_shared,
    project,
    separated_loss,
)
from pipeplan.runtime.verification.stage_calls import (
    Result,
    Sample,
    StageCalls,
    fingerprint_whole,
)
from pipeplan.runtime.verification.variable_changes import find_shared_variable, read_leaves
from pipeplan.splitting.nesting import map_tensors
from pipeplan.splitting.rehearsals import Outlines
from pipeplan.splitting.stage_modules import StageModule

__all__ = ["Report", "compare_stage", "failed", "first_difference"]


class WholeModelError(RuntimeMismatchError):
    """The whole model raises. If its stages do too, theirs is the error to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the comparison of one stage has found."""

    difference: Difference | None
    loss: float
    """The whole model's loss on this rank."""
    whole: Projections
    cut: Projections
    run: WholeRun | None = None
    """What the whole model gave on this rank."""
    whole_error: str | None = None
    """Why the whole model could not run at all."""
    loss_rows: LossOfRows | None = None
    """By which the last stage looks at targets of later batches."""
    note: str | None = None
    """What users should know of rows that influence each other."""
    doubt_of_rows: str | None = None
    """Why its rows cannot be divided, unless they influence each other anyway."""
    remembers: tuple[str, ...] = ()
    """Buffers and numbers that a forward of the whole model changes."""
    keeps_state: bool = False
    """Whether it changes globals, or objects that layers hold: other ranks cannot get these."""
    outlines: Outlines | None = None
    """What the layers of a chain return, if its own forward is to be rehearsed."""


def compare_stage(
    stage: StageCalls,
    samples: Sequence[Sample],
    held_by: Mapping[str, set[int]],
    *,
    recomputes: bool = False,
    has_replicas: bool = False,
    joint: Sample | None = None,
    spread: tuple[Any, int] | None = None,
    reordered: Sequence[Sample] = (),
) -> Report:
    """Compare a stage that was cut with `keep_whole`; afterwards everything is as before.

    `joint` are the rows of all samples together, to see whether the loss is a mean over rows.
    `spread` are targets of other rows of the batch, and how many; by default those of `joint`.
    `reordered` are the rows of `joint` in other orders, if what the stage sends is divided by rows.
    """
    module, weights = stage.module, fingerprint_whole(stage)
    own_state = ModuleState(module.model.modules(), parameters=True)
    marks = marks_of(module.model)
    with module.whole():
        state = stage.state()  # to look at all of it takes long
    before = try_whole(stage, samples[0], state)
    changed = changed_since(marks, module.model)
    own_state.put_back()
    with nudged(_all_tensors(stage)), _separated(stage, held_by) as shared:
        rows, divided = RowReport(), Divided()
        outlines: Outlines | None = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # training itself will warn
                wholes = _run_whole_model(stage, samples, state)
                difference, cut = _run_and_compare(stage, samples, wholes, shared)
                if difference is None:
                    difference, outlines = look_at_chain(stage, samples[0], wholes)
                if joint is not None and difference is None:
                    rows = look_at_rows(stage, samples, wholes, joint, spread)
                    difference = _in_forward(rows.problem) if rows.problem else None
                difference = difference or _find_common(stage, wholes[True])
                if reordered and difference is None:
                    divided = look_at_division(stage, samples, wholes[False], reordered)
                    difference = _in_forward(divided.problem) if divided.problem else None
        finally:
            own_state.put_back()
    if changed and (difference is not None or recomputes or has_replicas):
        difference = _in_forward(changed_text(changed))
    elif before is not None and _differ(before, try_whole(stage, samples[0], state)):
        difference = _in_forward(REMEMBERS)
    elif difference is None and recomputes and cut.uses_own_generator:
        difference = _in_forward(_own_generator_text(module))
    own_state.put_back()
    return Report(
        difference=difference,
        loss=float(sum(wholes[True].losses)),
        whole=project(wholes[True].gradients, shared),
        cut=project(cut.gradients, shared),
        run=WholeRun(device=stage.device_kind, weights=weights, numbers=wholes[True].numbers),
        loss_rows=rows.loss_rows,
        note=rows.note,
        doubt_of_rows=divided.doubt,
        remembers=tuple(wholes[True].remembers),
        keeps_state=wholes[True].keeps_state,
        outlines=outlines,
    )


@contextlib.contextmanager
def _separated(stage: StageCalls, held_by: Mapping[str, set[int]]) -> Iterator[dict[str, str]]:
    """Inside, uses of this stage's parameters elsewhere count apart; yields those that cannot."""
    model = stage.module.model
    own = {id(parameter) for parameter in model.parameters()}
    with separated_loss(stage.loss.loss_fn, model, own) as of_loss:
        others = stage.module.rest.separate(own) | of_loss
        yield find_shared(stage.parameters, others, held_by, stage.first_name_of, stage.own_stages)


def _own_generator_text(module: StageModule) -> str:
    return (
        f"layers {module.layers_text}: draw random numbers from a generator of their own, which"
        " recomputation cannot repeat; use torch's default generator, or plan without recompute"
    )


def _find_common(stage: StageCalls, whole: Result) -> Difference | None:
    """Refuse what a forward changes outside of layers, if a rank runs it once for each stage."""
    if len(stage.own_stages) < 2:
        return None
    for name in whole.remembers:
        if stage.module.held.is_common(name) and not name.startswith(f"{LOSS_NAME}."):
            return _in_forward(
                f"model: {printable(name)!r} changes in each forward, outside of the layers, and a"
                f" rank with several stages ({name_stages(sorted(stage.own_stages))}) runs that for"
                " each of them; keep it in a layer, or plan with one stage a device"
            )
    return None


def _all_tensors(stage: StageCalls) -> list[torch.Tensor]:
    """Those of the whole model and of the loss, whatever this rank holds."""
    loss_fn = stage.loss.loss_fn
    of_loss = loss_fn.parameters() if isinstance(loss_fn, nn.Module) else ()
    return [*stage.module.model.parameters(), *stage.module.rest.tensors, *of_loss]


def _differ(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor] | None) -> bool:
    return second is None or len(first) != len(second) or not all(map(are_close, first, second))


def _run_whole_model(
    stage: StageCalls, samples: Sequence[Sample], state: KeptState
) -> dict[bool, Result]:
    """The whole model's results in training and in evaluation; it has its `state` afterwards."""
    variables, loss = stage.variables(), stage.loss.loss_fn
    with stage.module.whole() as model:
        try:
            results = {}
            for trains in (True, False):
                before = read_leaves(variables)
                results[trains] = run_whole(stage, samples, trains=trains)
                results[trains].remembers = state.of_modules.changed_numbers(
                    {LOSS_NAME: loss, "": model} if isinstance(loss, nn.Module) else {"": model}
                )
                results[trains].keeps_state = state.of_modules.have_objects_changed() or bool(
                    state.of_code.changed()
                )
                results[trains].leaves_before = before
                results[trains].leaves = read_leaves(variables)
                _require_still(state.of_modules.moved(model))  # those of programs may be logs
                state.put_back()
            _require_separate_tensors(stage, samples, results[False], state)
            state.put_back()
            _spoil(stage, samples[0])
        except RuntimeMismatchError:
            raise
        except Exception as error:
            raise WholeModelError(
                f"model: the whole model raises on {samples[0].num_rows} rows of the batch"
                f"{'' if trains else ' in evaluation, under torch.no_grad'}, but its stages do not:"
                f" {first_line(error)}"
            ) from error
        finally:
            state.put_back()
            for parameter in model.parameters():
                parameter.grad = None
        if stage.parameters and not results[True].has_gradient:
            raise RuntimeMismatchError(
                "loss_fn: its loss has no gradient, so nothing would be trained; it must not"
                " detach, and must not be computed under torch.no_grad"
            )
    return results


def _require_still(moved: Sequence[str]) -> None:
    """Refuse iterators that forwards move: neither a comparison nor recomputation can go back."""
    if moved:
        raise RuntimeMismatchError(
            f"{printable(moved[0])}, which forwards move on; it cannot be put back when rows are"
            " compared or computed again: keep numbers in attributes or buffers of the layer"
        )


def _require_separate_tensors(
    stage: StageCalls, samples: Sequence[Sample], copied: Result, state: KeptState
) -> None:
    """Refuse tensors that cross a cut and share memory with something that is changed in place.

    `copied` has copies of all tensors that cross the cuts of the stage, as a message makes them.
    """
    kind = stage.amp_dtype or torch.float32
    draws = bool(copied.draws)
    values = [evaluate_whole(stage, sample, draws=draws)[0] for sample in samples]
    for value, share, loss in zip(values, stage.shares(samples), copied.losses, strict=True):
        expected = torch.tensor(value * share, dtype=torch.float64)
        if not share or are_close(expected, loss.double().cpu(), dtype=kind):
            continue
        state.put_back()
        if [evaluate_whole(stage, each, draws=draws)[0] for each in samples] != values:
            return  # it gives something else in every run; that is another problem
        raise RuntimeMismatchError(
            f"layers {stage.module.layers_text}: a tensor that enters or leaves them shares its"
            " memory with another one (two views of one tensor, or something that a layer keeps),"
            " and one of them is changed in place; a message has copies, so return clone()s"
        )


def _spoil(stage: StageCalls, sample: Sample) -> None:
    """Run the whole model on other inputs; what becomes of it does not matter."""
    args, kwargs = map_tensors(list(sample.copied().call), _other_values)
    with contextlib.suppress(Exception):
        with SameRandomness(), collect_losses() as extra:
            with stage.autocast():
                output = stage.module.model(*args, **kwargs)
            loss = stage.loss.of(output, sample.copied().targets, 1.0, stage.autocast())
        sum([*extra], start=loss).backward()  # type: ignore[no-untyped-call]


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        generator = torch.Generator().manual_seed(1)
        return torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
    return torch.zeros_like(tensor)


def _run_and_compare(
    stage: StageCalls,
    samples: Sequence[Sample],
    wholes: dict[bool, Result],
    shared: Mapping[str, str],
) -> tuple[Difference | None, Result]:
    """The first difference in training or evaluation, and the stage's results in training."""
    state, variables = stage.state(), stage.variables()
    before = read_leaves(variables)
    trained = Result()
    for trains, whole in wholes.items():
        if whole.again:
            return find_difference(stage, whole, whole, shared=list(shared)), trained
        missing = _find_missing(stage, whole)
        if missing is not None:
            return _in_forward(missing), trained
        try:
            cut = run_stage(stage, samples, whole, trains=trains)
            cut.leaves = read_leaves(variables)
        except RuntimeMismatchError as error:
            return _in_forward(str(error)), trained
        except Exception as error:
            return raised(stage.module, whole, error), trained
        finally:
            state.put_back()
        difference = find_difference(stage, whole, cut, shared=list(shared) if trains else [])
        problem = find_shared_variable(before, whole, cut) if difference is None else None
        difference = _in_forward(problem) if problem else difference
        if difference is not None:
            if not trains:
                difference = replace(difference, text=f"{difference.text} (in evaluation)")
            return difference, trained
        if trains:
            trained = cut
    return None, trained


def _find_missing(stage: StageCalls, whole: Result) -> str | None:
    """Name a layer beside a cut that the whole model does not call."""
    module = stage.module
    ends = [
        (None in whole.entering, module.atoms[0] - 1),
        (None in whole.leaving, module.atoms[-1]),
    ]
    for (is_missing, atom), is_end in zip(ends, (module.is_first, module.is_last), strict=True):
        if is_missing and not is_end:
            name = module.layout.atoms[max(atom, 1) if module.layout.list_name else atom]
            return (
                f"model: does not call the layer {printable(name)!r} for some rows, so a stage"
                " cannot begin or end there; a layer that is left out has to decide so inside its"
                " own forward"
            )
    return None


def failed(error: RuntimeMismatchError) -> Report:
    """The report of a stage that could not be compared at all."""
    if isinstance(error, WholeModelError):
        return Report(difference=None, loss=0.0, whole={}, cut={}, whole_error=str(error))
    return Report(difference=_in_forward(str(error)), loss=0.0, whole={}, cut={})


def _in_forward(text: str) -> Difference:
    return Difference(text=text, is_in_forward=True)


def first_difference(
    reports: Sequence[Report],
    rounding: Callable[[float], float],
    ranks: Sequence[int] | None = None,
) -> str | None:
    """The difference of all stages that explains most; None if there is none.

    `ranks` are those that have compared each stage.
    """
    found = [report.difference for report in reports if report.difference is not None]
    found.sort(key=lambda difference: not difference.is_in_forward)
    if found:
        return found[0].text
    if not any(report.note for report in reports):
        doubts = [report.doubt_of_rows for report in reports if report.doubt_of_rows]
        if doubts:
            return doubts[0]
    pairs = zip(ranks or range(len(reports)), reports, strict=True)
    runs = {rank: report.run for rank, report in pairs if report.run is not None}
    other = find_other_run(runs, rounding(1.0)) if runs else None
    return other or find_in_sums(reports, rounding)
