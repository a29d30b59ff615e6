"""Runs sample rows through the whole model and through one of its stages, and notes the results.

::

    whole model   F0 B0 F1 B1                       ordinary training, microbatch by microbatch
    spoiling      F B with other inputs             whatever Python remembers of them is wrong now
    stage         F0 F1 B0 B1, or I and W           by the runtime's own code; its inputs are what
                                                    enters these layers in the whole model

The stage must not find anything that the whole model left behind in Python: globals, caches,
attributes of layers, closures. Modules get their state back. Other things cannot be put back, so
the spoiling run replaces them by values of other inputs.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pipeplan.documents.text import printable
from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.code_state import KeptState
from pipeplan.runtime.extra_losses import collect_losses
from pipeplan.runtime.parameters import LOSS_NAME
from pipeplan.runtime.verification.arrivals import as_message
from pipeplan.runtime.verification.digests import Numbers, add_up, digest, gradient_of
from pipeplan.runtime.verification.layer_records import LayerRecorder, Noted, note
from pipeplan.runtime.verification.same_randomness import SameRandomness, seed_python
from pipeplan.runtime.verification.stage_calls import Result, Sample, StageCalls
from pipeplan.splitting.layout import LayoutKind
from pipeplan.splitting.nesting import put_tensors, tensors_in
from pipeplan.splitting.stage_modules import StageModule
from pipeplan.splitting.torch_private import count_changes

__all__ = [
    "evaluate_whole",
    "gradients_of_whole",
    "numbers_of_whole",
    "owned_positions",
    "run_stage",
    "run_whole",
    "try_whole",
]


def run_whole(stage: StageCalls, samples: Sequence[Sample], *, trains: bool) -> Result:
    """The whole model's results; the model has to be whole."""
    model, result, randomness = stage.module.model, Result(), SameRandomness()
    _clear(stage.modules())
    atoms = stage.module.atoms
    recorder = LayerRecorder(stage.module.layout, randomness, (atoms.start, atoms.stop))
    recorder.attach(model)
    num_rows = sum(sample.num_rows for sample in samples)
    try:
        with _mode(stage.modules(), trains=trains):
            shares = stage.shares(samples)
            for index, (sample, share) in enumerate(zip(samples, shares, strict=True)):
                recorder.begin()
                stage.runner.seed_block(0, index)
                with randomness:
                    total, loss = _whole_loss(
                        stage, sample.copied(), share, num_rows, recorder, result.numbers
                    )
                recorder.end()
                result.losses.append(loss.detach().clone())
                result.calls.append(recorder.calls)
                result.entering.append(_crossing(stage.module, recorder, atoms.start))
                result.leaving.append(_crossing(stage.module, recorder, atoms.stop))
                if not index:
                    _require_no_gradients(model)
                if trains and total.requires_grad:
                    with _in_backward(randomness, needed=randomness.repeats):
                        total.backward()  # type: ignore[no-untyped-call]
                    result.has_gradient = True
    finally:
        recorder.detach()
    result.draws, result.again = randomness.draws, recorder.again
    if trains:
        _note_gradients(stage, result.numbers)
    _note_tensors(stage, result)
    return result


def numbers_of_whole(stage: StageCalls, sample: Sample) -> Numbers:
    """What the whole model computes in training: output, losses and gradients, as a few numbers."""
    numbers: Numbers = {}
    randomness = SameRandomness()
    _clear(stage.modules())
    seed_python("start")
    with _mode(stage.modules(), trains=True), randomness:
        total, _ = _whole_loss(stage, sample.copied(), 1.0, sample.num_rows, numbers=numbers)
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
    _note_gradients(stage, numbers)
    _clear(stage.modules())
    return numbers


def _note_gradients(stage: StageCalls, numbers: Numbers) -> None:
    """Note the gradients of all parameters of the whole model and of the loss."""
    named = dict(stage.module.model.named_parameters())
    if isinstance(stage.loss.loss_fn, nn.Module):
        known = set(map(id, named.values()))
        of_loss = stage.loss.loss_fn.named_parameters(LOSS_NAME)
        named |= {name: parameter for name, parameter in of_loss if id(parameter) not in known}
    for name, parameter in named.items():
        what = gradient_of(stage.first_name_of.get(name, name))
        found = None if parameter.grad is None else digest(parameter.grad)
        numbers[what] = add_up(numbers.get(what), found)


def evaluate_whole(stage: StageCalls, sample: Sample, *, draws: bool = True) -> tuple[float, Any]:
    """The whole model's loss and output in evaluation; the model has to be whole.

    If a run of the same sample has shown that it `draws` nothing, this one is faster.
    """
    args, kwargs = sample.copied().call
    randomness = SameRandomness() if draws else contextlib.nullcontext()
    with _mode(stage.modules(), trains=False), randomness:
        with stage.autocast():
            output = stage.module.model(*args, **kwargs)
        loss = stage.loss.of(output, sample.copied().targets, 1.0, stage.autocast())
        return float(loss), output


def gradients_of_whole(
    stage: StageCalls, samples: Sequence[Sample]
) -> dict[str, torch.Tensor | None]:
    """The gradients of the whole model's parameters; it has to be whole, and to draw nothing."""
    model, shares = stage.module.model, stage.shares(samples)
    num_rows = sum(sample.num_rows for sample in samples)
    _clear(stage.modules())
    with torch.enable_grad():
        for sample, share in zip(samples, shares, strict=True):
            total, _ = _whole_loss(stage, sample.copied(), share, num_rows)
            if total.requires_grad:
                total.backward()  # type: ignore[no-untyped-call]
    # Copies: with replicas, gradients of all runs lie in the same memory.
    found = {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    _clear(stage.modules())
    return found


def _whole_loss(
    stage: StageCalls,
    sample: Sample,
    share: float,
    num_rows: int,
    recorder: LayerRecorder | None = None,
    numbers: Numbers | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss with its share of the batch, and the loss itself."""
    args, kwargs = sample.call
    with collect_losses() as extra:
        with stage.autocast():
            output = stage.module.model(*args, **kwargs)
        if recorder is not None:
            recorder.move("loss")
        loss = stage.loss.of(output, sample.targets, share, stage.autocast())
    if numbers is not None:
        _note_results(output, loss, extra, numbers)
    total = loss * share if share else loss * 1.0
    row_share = sample.num_rows / num_rows
    for more in extra:
        total = total + more * row_share
    return total, loss * share


def _note_results(
    output: Any, loss: torch.Tensor, extra: Sequence[torch.Tensor], numbers: Numbers
) -> None:
    """Add a forward's results to those of the samples before."""
    found = {"its loss": [loss], "what add_loss adds": extra, "its output": tensors_in(output)}
    for what, tensors in found.items():
        for tensor in tensors:
            numbers[what] = add_up(numbers.get(what), digest(tensor))


def _crossing(module: StageModule, recorder: LayerRecorder, atom: int) -> Noted | None:
    """What crosses the cut in front of an atom; None at the ends of the model."""
    if atom in (0, len(module.layout.atoms)):
        return None
    if module.layout.kind is LayoutKind.LAYER_LIST and atom == 1:
        call = recorder.calls.get(1)
        return call.first_input if call else None
    call = recorder.calls.get(atom - 1)
    return call.output if call else None


def try_whole(stage: StageCalls, sample: Sample, state: KeptState) -> list[torch.Tensor] | None:
    """What the whole model gives for a sample, and its loss; None if it raises.

    Two such runs give the same unless Python remembers something of what came between them. It
    has its `state` afterwards.
    """
    args, kwargs = sample.copied().call
    with stage.module.whole() as model:
        seed_python("start")
        try:
            with torch.no_grad(), SameRandomness(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with stage.autocast():
                    output = model(*args, **kwargs)
                loss = stage.loss.of(output, sample.copied().targets, 1.0, stage.autocast())
            return [tensor.clone() for tensor in (*tensors_in(output), loss)]
        except Exception:
            return None
        finally:
            state.put_back()


def run_stage(
    stage: StageCalls, samples: Sequence[Sample], whole: Result, *, trains: bool
) -> Result:
    """The stage's results, with what enters it in the whole model."""
    with stage.module.alone():
        return _run_alone(stage, samples, whole, trains=trains)


def _run_alone(
    stage: StageCalls, samples: Sequence[Sample], whole: Result, *, trains: bool
) -> Result:
    module, result = stage.module, Result()
    randomness = SameRandomness(owned_positions(module))
    _clear(list(module.model.modules()))
    recorder = LayerRecorder(module.layout, randomness)
    recorder.attach(module.model)
    evaluating = contextlib.nullcontext() if trains else stage.runner.evaluating()
    try:
        with evaluating, randomness:
            carried = [
                _forward(stage, samples, index, whole.entering[index], recorder, result)
                for index in range(len(samples))
            ]
        if trains:
            with _in_backward(randomness, needed=bool(randomness.draws)):  # recomputation draws
                for index in range(len(samples)):
                    _backward(stage, index, whole.leaving[index], carried[index], result)
                _run_weights(stage, range(len(samples)), result)
    finally:
        recorder.detach()
    result.draws, result.uses_own_generator = randomness.draws, randomness.uses_own_generator
    _note_tensors(stage, result)
    return result


def _in_backward(
    randomness: SameRandomness, *, needed: bool
) -> contextlib.AbstractContextManager[Any]:
    """A backward may draw again what a forward has drawn; if not, it runs faster by itself."""
    return randomness if needed else contextlib.nullcontext()


def owned_positions(module: StageModule) -> frozenset[str]:
    """The places of the model that lie in a stage: its layers, and what comes before each."""
    owned = {f"in {atom}" for atom in module.atoms}
    owned |= {f"after {atom - 1}" for atom in module.atoms}
    if module.is_first:
        owned.add("start")
    if module.is_last:
        owned |= {f"after {module.atoms[-1]}", "loss"}
    return frozenset(owned)


def _forward(
    stage: StageCalls,
    samples: Sequence[Sample],
    index: int,
    entering: Noted | None,
    recorder: LayerRecorder,
    result: Result,
) -> list[torch.Tensor]:
    """Run one forward; returns the tensors that entered."""
    sample, runner = samples[index].copied(), stage.runner
    tensors, template = as_message(stage.module, entering)
    call = sample.call if stage.module.needs_inputs else ((), {})
    row_share = sample.num_rows / sum(each.num_rows for each in samples)
    watched = tensors_in(call)
    num_changes = [count_changes(tensor) for tensor in watched]
    recorder.begin()
    draws, did_clone = recorder.randomness.draws, runner.clones_inputs
    num_before = len(draws)
    if stage.module.is_last:
        share = stage.shares(samples)[index]
        stats = runner.forward_last(
            0, index, tensors, template, call, sample.targets, share, 1.0, row_share=row_share
        )
        result.losses.append(stats[0])
        result.leaving.append(None)
    else:
        output, shape = runner.forward(0, index, tensors, template, call, row_share=row_share)
        noted = note(put_tensors(shape, output))
        noted.live = []
        noted.needs_gradient = runner.have_gradient(output)
        result.leaving.append(noted)
    recorder.end()
    if runner.clones_inputs and not did_clone:  # it has run twice to find that out
        del draws[num_before : (num_before + len(draws)) // 2]
    if [count_changes(tensor) for tensor in watched] != num_changes:
        runner.clone_inputs()  # microbatches are parts of one batch, which stays as it is
    result.calls.append(recorder.calls)
    return tensors


def _backward(
    stage: StageCalls,
    index: int,
    leaving: Noted | None,
    carried: list[torch.Tensor],
    result: Result,
) -> None:
    """Run one backward, with the gradients of what leaves in the whole model."""
    grad_outputs: list[torch.Tensor | None] = []
    if leaving is not None:
        grad_outputs = [None if each is None else each.clone() for each in leaving.gradients]
    run = stage.runner.backward_input if stage.splits(index) else stage.runner.backward
    gradients = run(index, grad_outputs)
    entering = note([tensor.detach() for tensor in carried])
    entering.gradients = gradients
    result.entering.append(entering)


def _run_weights(stage: StageCalls, indices: Iterable[int], result: Result) -> None:
    """Run the second halves of backwards. What they run again has been noted before."""
    for calls in result.calls:
        for call in calls.values():
            for noted in (call.first_input, call.output):
                if noted is not None:
                    noted.is_complete = True
    for index in indices:
        if stage.splits(index):
            stage.runner.backward_weight(index)


def _note_tensors(stage: StageCalls, result: Result) -> None:
    """Note the gradients of the stage's parameters, their attributes, and the stage's buffers."""
    for name, parameter in stage.parameters.items():
        for attribute, value in vars(parameter).items():
            if isinstance(value, torch.Tensor):
                result.attributes[name, attribute] = value.detach().clone()
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise RuntimeMismatchError(
                f"parameter {printable(name)!r}: has a sparse gradient, which ranks do not sum; use"
                " sparse=False"
            )
        result.gradients[name] = None if gradient is None else gradient.detach().clone()
    named = dict(stage.module.model.named_buffers())
    if stage.module.is_last and isinstance(stage.loss.loss_fn, nn.Module):  # not in the whole model
        named |= stage.loss.loss_fn.named_buffers(LOSS_NAME)
    result.buffers = {name: buffer.detach().clone() for name, buffer in named.items()}
    _clear(stage.modules())
    for parameter in stage.parameters.values():
        parameter.grad = None


def _require_no_gradients(model: nn.Module) -> None:
    """Refuse a forward that has run a backward: it would count each microbatch as a batch."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise RuntimeMismatchError(
                f"parameter {printable(name)!r}: has a gradient already behind the forward, which"
                " runs a backward of its own; let the layer call pipeplan.runtime.add_loss instead"
            )


def _clear(modules: Sequence[nn.Module]) -> None:
    """Forget the gradients of these modules, but not of those inside of them."""
    for module in modules:
        for parameter in module.parameters(recurse=False):
            parameter.grad = None


@contextlib.contextmanager
def _mode(modules: Sequence[nn.Module], *, trains: bool) -> Iterator[None]:
    """Training in the modes that the modules have, or evaluation without gradients."""
    if trains:
        with torch.enable_grad():
            yield
        return
    modes = [(module, module.training) for module in modules]
    for module in modules:
        if module.training:  # otherwise a module that holds it has done that
            module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
