"""A first profile of a model: each layer timed on its own, where the model is.

Layers see the inputs that they see in the whole model, recorded in one forward. What stands before
and behind a layer list is timed as a stage of its own.

Activations are what autograd keeps for the backward. The last layer's, with its loss, are all that
is alive at once in its forward and backward: over a large vocabulary the gradients of logits and of
their logarithms are several times what is kept, and the last stage's memory is made of them.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.splitting.footprint import AliveBytes, KeptBytes
from pipeplan.splitting.layout import Layout, LayoutKind, lay_out
from pipeplan.splitting.nesting import map_tensors, tensors_in
from pipeplan.splitting.parts import Part, cut

__all__ = ["profile_layers"]

MS_IN_S = 1e3


@dataclass(slots=True)
class _Figures:
    """What one part costs."""

    forward_ms: float
    backward_ms: float
    output_bytes: float
    gradient_bytes: float
    parameter_bytes: float
    activation_bytes: float
    output: Any


def profile_layers(
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
        model: a model on its device; it is not changed, but copied twice if it has a layer list.
        batch: one microbatch: a tensor, a tuple by position or a dict by name.
        layers: names of the layers, where they are not to be found by themselves.
        loss_fn: counted to the last layer, with `targets`.
        targets: for the loss.
        name: the profile's name; by default the model's class.
        repeats: the median of so many runs counts.
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
    for is_last, unit in _units(model, layout, args, kwargs):
        atoms.append(_measure(unit, last_loss if is_last else None, repeats))
        unit.done(atoms[-1].output)
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
class _Unit:
    """Something to time: a call with inputs, and the parameters it uses."""

    run: Callable[[Any], Any]
    entered: Any
    parameters: list[nn.Parameter]
    done: Callable[[Any], None]
    """Gets the output."""


def _units(
    model: nn.Module, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[bool, _Unit]]:
    """The atoms of a model, each with the inputs that it has in the whole model."""
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
            yield is_last, _Unit(call_module, seen[name], parameters, remember)
            continue
        part, parameters = _single_part(model, layout, atom)

        def call_part(entered: Any, part: Part = part) -> Any:
            return part(entered, args, kwargs)

        yield is_last, _Unit(call_part, carried[0], parameters, remember)


def _record_calls(
    model: nn.Module, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """By name, what each layer of a list is called with."""
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
        config.use_cache = False  # a cache would remember the keys of the call before
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        if config is not None and used_cache:
            config.use_cache = used_cache
        for handle in handles:
            handle.remove()
    return seen


def _single_part(model: nn.Module, layout: Layout, atom: int) -> tuple[Part, list[nn.Parameter]]:
    """One atom as a stage of its own; what surrounds a layer list is taken from a copy."""
    single = Layout(
        kind=layout.kind,
        names=layout.atoms,
        atoms=layout.atoms,
        atoms_of=tuple(range(i, i + 1) for i in range(len(layout.atoms))),
        list_name=layout.list_name,
    )
    if layout.kind is LayoutKind.LAYER_LIST:
        part = cut(copy.deepcopy(model), single, range(atom, atom + 1))
        return part, list(part.model.parameters())
    part = cut(model, single, range(atom, atom + 1), drop=False)
    return part, list(model.get_submodule(layout.atoms[atom]).parameters())


def _measure(unit: _Unit, loss: Callable[[Any], torch.Tensor] | None, repeats: int) -> _Figures:
    parameters = unit.parameters
    with KeptBytes(parameters) as kept:
        output, roots = _run(unit, _entered(unit), loss)
    _backward(roots)
    activation_bytes = kept.total
    if loss is not None:
        entered = _entered(unit)
        with AliveBytes(parameters) as alive:
            _backward(_run(unit, entered, loss)[1])
        entered_bytes = sum(tensor.nbytes for tensor in tensors_in(entered))
        activation_bytes = max(activation_bytes, entered_bytes + alive.most)
    del roots
    forward_ms, backward_ms = [], []
    for _ in range(repeats):
        entered = _entered(unit)
        start_s = _now_s(parameters)
        roots = _run(unit, entered, loss)[1]
        middle_s = _now_s(parameters)
        _backward(roots)
        end_s = _now_s(parameters)
        del roots
        forward_ms.append((middle_s - start_s) * MS_IN_S)
        backward_ms.append((end_s - middle_s) * MS_IN_S)
    for parameter in parameters:
        parameter.grad = None
    leaving = tensors_in(output)
    return _Figures(
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


def _entered(unit: _Unit) -> Any:
    """What the unit is called with, the first tensor of it with a gradient."""
    entered = map_tensors(unit.entered, lambda tensor: tensor.detach())
    for tensor in [t for t in tensors_in(entered) if t.is_floating_point()][:1]:
        tensor.requires_grad_()
    return entered


def _run(
    unit: _Unit, entered: Any, loss: Callable[[Any], torch.Tensor] | None
) -> tuple[Any, list[torch.Tensor]]:
    """The output, and what the backward begins with."""
    output = unit.run(entered)
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


def _merge(name: str, parts: list[_Figures]) -> LayerProfile:
    """A layer of several parts: their sum, with the output of the last."""
    return LayerProfile(
        name=name,
        forward_ms=sum(part.forward_ms for part in parts),
        backward_ms=sum(part.backward_ms for part in parts),
        output_bytes=parts[-1].output_bytes,
        gradient_bytes=parts[-1].gradient_bytes,
        parameter_bytes=sum(part.parameter_bytes for part in parts),
        activation_bytes=sum(part.activation_bytes for part in parts),
    )
