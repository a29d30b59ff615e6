"""Makes a first profile of a model: times each layer alone, on the device of the model.

One forward of the whole model records the inputs of each layer. The modules before and behind a
layer list are timed as stages of their own.

Activations are what autograd keeps for the backward. For the last layer with its loss, they are the
most bytes alive at once in its forward and backward. With a large vocabulary, the gradients of
logits and of their logarithms are several times larger than what autograd keeps. They make up most
of the last stage's memory.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from pipeplan.measure.footprint import AliveBytes, KeptBytes
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.splitting.layout import Layout, LayoutKind, lay_out
from pipeplan.splitting.nesting import map_tensors, tensors_in
from pipeplan.splitting.stage_modules import StageModule, cut

__all__ = ["profile"]

MS_IN_S = 1e3


@dataclass(slots=True)
class _AtomCosts:
    """The costs of one atom."""

    forward_ms: float
    backward_ms: float
    output_bytes: float
    gradient_bytes: float
    parameter_bytes: float
    activation_bytes: float
    output: Any


def profile(
    model: nn.Module,
    batch: Any,
    *,
    layers: Sequence[str] | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    targets: Any = None,
    name: str = "",
    repeats: int = 3,
) -> ModelProfile:
    """The model profile of `model` for microbatches like `batch`.

    Args:
        model: a model on its device. It is not changed. With a layer list, it is copied twice.
        batch: one microbatch: a tensor, a tuple by position or a dict by name.
        layers: the names of the layers, if they cannot be found automatically.
        loss_fn: belongs to the last layer; gets its output and `targets`.
        targets: for the loss.
        name: the profile's name; by default the model's class.
        repeats: the number of runs; their median counts.
    """
    layout = lay_out(model, layers, range(len(layers)) if layers is not None else ())
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
    else:
        args = batch if isinstance(batch, tuple) else (batch,)
    last_loss = None if loss_fn is None else lambda output: loss_fn(output, targets)
    atoms = []
    for is_last, call in _timed_calls(model, layout, args, kwargs):
        atoms.append(_measure(call, last_loss if is_last else None, repeats))
        call.remember(atoms[-1].output)
    rows = next(tensor.shape[0] for tensor in tensors_in((args, kwargs)) if tensor.ndim)
    return ModelProfile(
        name=name or type(model).__name__,
        microbatch_size=rows,
        input_bytes=float(sum(tensor.nbytes for tensor in tensors_in((args, kwargs)))),
        layers=tuple(
            _merge(layer_name, [atoms[atom] for atom in layout.atoms_of[layer]])
            for layer, layer_name in enumerate(layout.names)
        ),
    )


@dataclass(slots=True)
class _TimedCall:
    """A call to time, with its inputs and the parameters that it uses."""

    run: Callable[[Any], Any]
    inputs: Any
    parameters: list[nn.Parameter]
    remember: Callable[[Any], None]
    """Takes the output, which is the input of the next atom."""


def _timed_calls(
    model: nn.Module, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[bool, _TimedCall]]:
    """The atoms of a model, each with its inputs from the whole model."""
    carried: list[Any] = [None]

    def remember(output: Any) -> None:
        carried[0] = output

    is_list = layout.kind is LayoutKind.LAYER_LIST
    seen = _record_calls(model, layout, args, kwargs) if is_list else {}
    for atom, name in enumerate(layout.atoms):
        is_last = atom == len(layout.atoms) - 1
        if name in seen:
            module = model.get_submodule(name)

            def call_module(entered: Any, module: nn.Module = module) -> Any:
                return module(*entered[0], **entered[1])

            parameters = list(module.parameters())
            yield is_last, _TimedCall(call_module, seen[name], parameters, remember)
            continue
        stage, parameters = _single_stage(model, layout, atom)

        def call_stage(entered: Any, stage: StageModule = stage) -> Any:
            return stage(entered, args, kwargs)

        yield is_last, _TimedCall(call_stage, carried[0], parameters, remember)


def _record_calls(
    model: nn.Module, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of each layer of a list, by its name."""
    seen: dict[str, Any] = {}

    def make_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            seen[name] = map_tensors((args, kwargs), lambda tensor: tensor.detach())

        return hook

    handles = [
        model.get_submodule(name).register_forward_pre_hook(make_hook(name), with_kwargs=True)
        for name in layout.atoms[1:-1]
    ]
    config = getattr(model, "config", None)
    used_cache = getattr(config, "use_cache", False)
    if config is not None and used_cache:
        config.use_cache = False  # a cache would hold the keys of an earlier call
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        if config is not None and used_cache:
            config.use_cache = used_cache
        for handle in handles:
            handle.remove()
    return seen


def _single_stage(
    model: nn.Module, layout: Layout, atom: int
) -> tuple[StageModule, list[nn.Parameter]]:
    """One atom as a stage of its own; with a layer list, cut out of a copy of the model."""
    single = Layout(
        kind=layout.kind,
        names=layout.atoms,
        atoms=layout.atoms,
        atoms_of=tuple(range(i, i + 1) for i in range(len(layout.atoms))),
        list_name=layout.list_name,
    )
    if layout.kind is LayoutKind.LAYER_LIST:
        stage = cut(copy.deepcopy(model), single, range(atom, atom + 1))
        return stage, list(stage.model.parameters())
    stage = cut(model, single, range(atom, atom + 1), drop=False)
    return stage, list(model.get_submodule(layout.atoms[atom]).parameters())


def _measure(
    call: _TimedCall, loss: Callable[[Any], torch.Tensor] | None, repeats: int
) -> _AtomCosts:
    parameters = call.parameters
    with KeptBytes(parameters) as kept:
        output, roots = _run(call, _entered(call), loss)
    _backward(roots)
    activation_bytes = kept.total
    if loss is not None:
        entered = _entered(call)
        with AliveBytes(parameters) as alive:
            _backward(_run(call, entered, loss)[1])
        entered_bytes = sum(tensor.nbytes for tensor in tensors_in(entered))
        activation_bytes = max(activation_bytes, entered_bytes + alive.most)
    del roots
    forward_ms, backward_ms = [], []
    for _ in range(repeats):
        entered = _entered(call)
        start_s = _now_s(parameters)
        roots = _run(call, entered, loss)[1]
        middle_s = _now_s(parameters)
        _backward(roots)
        end_s = _now_s(parameters)
        del roots
        forward_ms.append((middle_s - start_s) * MS_IN_S)
        backward_ms.append((end_s - middle_s) * MS_IN_S)
    for parameter in parameters:
        parameter.grad = None
    leaving = tensors_in(output)
    return _AtomCosts(
        forward_ms=median(forward_ms),
        backward_ms=median(backward_ms),
        output_bytes=float(sum(tensor.nbytes for tensor in leaving)),
        gradient_bytes=float(sum(tensor.nbytes for tensor in leaving if tensor.requires_grad)),
        parameter_bytes=float(sum(parameter.nbytes for parameter in parameters)),
        activation_bytes=float(activation_bytes),
        output=map_tensors(output, lambda tensor: tensor.detach())
        if isinstance(output, torch.Tensor | tuple | list | dict)
        else output,
    )


def _entered(call: _TimedCall) -> Any:
    """The inputs of the call; the first floating-point tensor needs a gradient."""
    entered = map_tensors(call.inputs, lambda tensor: tensor.detach())
    for tensor in [t for t in tensors_in(entered) if t.is_floating_point()][:1]:
        tensor.requires_grad_()
    return entered


def _run(
    call: _TimedCall, entered: Any, loss: Callable[[Any], torch.Tensor] | None
) -> tuple[Any, list[torch.Tensor]]:
    """The output, and the tensors with which the backward begins."""
    output = call.run(entered)
    return output, [loss(output)] if loss else _roots(output)


def _backward(roots: list[torch.Tensor]) -> None:
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _roots(output: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(output) if tensor.requires_grad]


def _now_s(parameters: list[nn.Parameter]) -> float:
    if parameters and parameters[0].is_cuda:
        torch.cuda.synchronize(parameters[0].device)
    return time.perf_counter()


def _merge(name: str, atoms: list[_AtomCosts]) -> LayerProfile:
    """A layer of several atoms: their sum, with the output of the last."""
    return LayerProfile(
        name=name,
        forward_ms=sum(atom.forward_ms for atom in atoms),
        backward_ms=sum(atom.backward_ms for atom in atoms),
        output_bytes=atoms[-1].output_bytes,
        gradient_bytes=atoms[-1].gradient_bytes,
        parameter_bytes=sum(atom.parameter_bytes for atom in atoms),
        activation_bytes=sum(atom.activation_bytes for atom in atoms),
    )
