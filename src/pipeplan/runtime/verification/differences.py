"""Finds the first difference between the whole model's results and a stage's.

Both run the same operations on the same numbers, so they agree nearly to the last bit. A number may
differ by `eps ** 0.75` of the largest number beside it: 6e-6 for float32, 2e-12 for float64, 3e-2
for bfloat16.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pipeplan.documents.text import printable
from pipeplan.runtime.verification.layer_records import Noted
from pipeplan.runtime.verification.runs import owned_positions
from pipeplan.runtime.verification.stage_calls import Result, StageCalls
from pipeplan.splitting.layout import LayoutKind
from pipeplan.splitting.placeholders import CARRIED_PAST, has_placeholder
from pipeplan.splitting.stage_modules import StageModule

__all__ = ["Difference", "are_close", "find_difference", "first_line", "is_of_memory", "raised"]

READS_LAYERS = (
    "a loss or a forward that reads other layers (losses kept on layers, model in a closure) sees"
    " only this stage's; call pipeplan.runtime.add_loss in those layers instead"
)
NOT_THERE = (
    "a stage has only its own layers, so what others keep (losses, activations, globals, closures)"
    " is not there; pass it on from layer to layer, or let those layers call"
    " pipeplan.runtime.add_loss"
)
REMEMBERS = (
    "model: gives another result for the same rows when it runs again; it remembers something"
    " outside of its modules (a global, a class attribute, a closure, a cache), or draws from a"
    " source of its own (numpy.random.default_rng, the clock); keep it in attributes or buffers of"
    " a layer, and draw from the generators of torch, Python or numpy"
)
OTHER_OUTPUT = (
    "its input is the same, so it reads something that is not its own: what other layers keep, a"
    " global, a closure, or a source of randomness that cannot be seeded; keep what it needs in its"
    " attributes or buffers, or pass it on from layer to layer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One line that names a difference."""

    text: str
    is_in_forward: bool
    """A difference in a forward explains those in gradients, on other stages too."""


def find_difference(
    stage: StageCalls, whole: Result, cut: Result, *, shared: Sequence[str]
) -> Difference | None:
    """The first difference; None if there is none.

    `shared` are parameters that other stages hold as well. Their gradients are sums, which are
    compared elsewhere.
    """
    module = stage.module
    if whole.again:
        text = (
            f"model: calls the layer {whole.again[0]!r} more than once, or out of order; a stage"
            " calls each of its layers once, in the order of the plan"
        )
        return Difference(text=text, is_in_forward=True)
    found = None
    for index in range(len(whole.calls)):
        found = found or _find_in_forward(module, whole, cut, index, stage.amp_dtype)
    if found:
        return Difference(text=found, is_in_forward=True)
    found = _find_in_draws(module, whole, cut)
    for expected, entering in zip(whole.entering, cut.entering, strict=False):
        found = found or _find_in_entering(module, expected, entering, stage)
    found = found or _find_in_gradients(stage, whole, cut, shared)
    found = found or _find_in_attributes(stage, whole, cut, shared)
    found = found or _find_in_buffers(stage, whole, cut)
    return Difference(text=found, is_in_forward=False) if found else None


def raised(module: StageModule, whole: Result, error: Exception) -> Difference:
    """What to say of a stage that raises, although the whole model does not."""
    reason = "; ".join(getattr(error, "__notes__", [])) or _foreign_class(whole) or NOT_THERE
    text = (
        f"layers {module.layers_text}: raise when they run as a stage, but not in the whole model:"
        f" {first_line(error)}; {reason}"
    )
    return Difference(text=text, is_in_forward=True)


def first_line(error: Exception) -> str:
    """The class of an error, and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return printable(f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": "))


def is_of_memory(error: Exception) -> bool:
    """Whether a rank had too little memory; then nothing is known of the model."""
    text = str(error).lower()
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or "can't allocate memory" in text
        or "out of memory" in text
    )


def _foreign_class(whole: Result) -> str:
    """Says so if tensors that enter a stage are of a class that a message does not bring."""
    for noted in whole.entering:
        for tensor in noted.tensors if noted is not None else ():
            if type(tensor) not in (torch.Tensor, nn.Parameter):
                return (
                    f"in the whole model a {printable(type(tensor).__name__)} enters them, but"
                    " messages bring plain tensors: cut elsewhere, or let layers return plain"
                    " tensors (as_subclass(torch.Tensor)) and make its class again behind the cut"
                )
    return ""


def are_close(
    first: torch.Tensor,
    second: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    floor: float = 0.0,
) -> bool:
    """Whether two tensors agree up to rounding; NaN equals NaN.

    `dtype` is that of the computation, if it is lower. `floor` is a size below which a difference
    is only rounding.
    """
    if first.shape != second.shape or first.dtype != second.dtype or has_placeholder(second):
        return False
    if not (first.is_floating_point() or first.is_complex()):
        return torch.equal(first, second)
    if torch.equal(first, second):
        return True
    lowest = max(torch.finfo(kind).eps for kind in (first.dtype, dtype or first.dtype))
    finite = first[first.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    allowed = lowest**0.75 * max(largest, floor)
    return torch.allclose(first, second, rtol=0.0, atol=allowed, equal_nan=True)


def _are_alike(first: Noted, second: Noted, dtype: torch.dtype | None) -> bool:
    return len(first.tensors) == len(second.tensors) and all(
        are_close(a, b, dtype=dtype) for a, b in zip(first.tensors, second.tensors, strict=True)
    )


def _find_in_forward(
    module: StageModule, whole: Result, cut: Result, index: int, dtype: torch.dtype | None
) -> str | None:
    """Compare what leaves the stage, or its loss."""
    expected, found = whole.leaving[index], cut.leaving[index]
    if module.is_last:
        loss, cut_loss = whole.losses[index], cut.losses[index]
        kind = max(loss.dtype, dtype or loss.dtype, key=lambda kind: torch.finfo(kind).eps)
        if are_close(loss.double(), cut_loss.double(), dtype=kind):
            return None
        place = _first_layer(module, whole, cut, index, dtype)
        if place:
            return place
        if cut_loss.isnan() and module.layout.kind is LayoutKind.LAYER_LIST:
            return (
                f"layers {module.layers_text}: their loss is NaN; {CARRIED_PAST}; a loss that"
                " layers return is added by pipeplan.runtime.add_loss"
            )
        return (
            f"loss_fn: gives {float(cut_loss):.6g} behind the layers {module.layers_text} alone"
            f" and {float(loss):.6g} with the whole model;"
            f" {READS_LAYERS}"
        )
    if expected is None:
        return (
            f"model: does not call the layer {module.layout.atoms[module.atoms[-1]]!r} in training"
            " or evaluation; a stage cannot end there"
        )
    if found is None or not _are_alike(expected, found, dtype):
        place = _first_layer(module, whole, cut, index, dtype)
        text = f"layers {module.layers_text}: what leaves them is not the whole model's"
        return place or f"{text}; {_reason(module)}"
    # More gradients than in the whole model do no harm: with recomputation nobody knows yet.
    pairs = zip(expected.needs_gradient, found.needs_gradient, strict=True)
    if any(needs and not has for needs, has in pairs) and cut.gradients:
        return (
            f"layers {module.layers_text}: what leaves them has a gradient in the whole model"
            f" {expected.needs_gradient}, but not in the stage {found.needs_gradient}; a"
            " re-entrant checkpoint or torch.no_grad around a layer may be the cause"
        )
    return None


def _first_layer(
    module: StageModule, wholes: Result, cuts: Result, index: int, dtype: torch.dtype | None
) -> str:
    """Which layer's input or output is the first to differ; empty if none does."""
    whole, cut = wholes.calls[index], cuts.calls[index]
    for atom in module.atoms:
        if atom not in whole:
            continue
        name = printable(module.layout.atoms[atom])
        if atom not in cut:
            return (
                f"layer {name!r}: the whole model calls it, its stage does not; {_reason(module)}"
            )
        given = list(zip(whole[atom].inputs, cut[atom].inputs, strict=False))
        for (argument, expected), (_, found) in given:
            if not are_close(expected, found, dtype=dtype):
                nan = " (it is NaN)" if found.isnan().any() and not expected.isnan().any() else ""
                return (
                    f"layer {name!r}: its {argument} is not that of the whole model{nan}, so"
                    f" something between the layers is lost or has changed; {_reason(module)}"
                )
        outputs = whole[atom].output, cut[atom].output
        if outputs[0] and outputs[1] and not _are_alike(outputs[0], outputs[1], dtype):
            reason = _foreign_class(wholes) or OTHER_OUTPUT
            return f"layer {name!r}: its output is not that of the whole model; {reason}"
    return ""


def _reason(module: StageModule) -> str:
    if module.layout.kind is LayoutKind.NAMED:
        return (
            "layers named one by one are a chain, each called with what the one before returns; if"
            " the model does more between them, make that a module (nn.ReLU) and a layer"
        )
    if module.layout.kind is LayoutKind.SEQUENTIAL:
        return (
            "the children of an nn.Sequential are a chain, each called with what the one before"
            " returns; if a forward of its own does more between them, make that a module"
            " (nn.ReLU) among the children"
        )
    return CARRIED_PAST


def _find_in_draws(module: StageModule, whole: Result, cut: Result) -> str | None:
    """Compare random operations: the stage calls those that lie in its part of the model."""
    owned = owned_positions(module)
    expected = [text for position, text in whole.draws if position in owned]
    # The loss belongs to the stage's last position. Before its first layer, a stage repeats what
    # the model does in front of its list, for other stages' values.
    found = [text for position, text in cut.draws if position in owned]
    if expected == found:
        return None
    for number, text in enumerate(expected):
        if number >= len(found) or found[number] != text:
            return (
                f"layers {module.layers_text}: the whole model draws random numbers by {text},"
                " the stage does not; a dropout between layers is lost by this cut: put it into a"
                " layer"
            )
    return (
        f"layers {module.layers_text}: the stage draws random numbers by {found[len(expected)]},"
        " the whole model does not"
    )


def _find_in_entering(
    module: StageModule, whole: Noted | None, cut: Noted | None, stage: StageCalls
) -> str | None:
    """Compare the gradients of what enters the stage."""
    if whole is None or cut is None:
        return None
    for expected, found, tensor in zip(whole.gradients, cut.gradients, whole.tensors, strict=True):
        first = torch.zeros_like(tensor) if expected is None else expected
        second = torch.zeros_like(tensor) if found is None else found
        if not are_close(first, second, dtype=stage.amp_dtype):
            return (
                f"layers {module.layers_text}: the gradient of what enters them is not that of the"
                " whole model; a re-entrant checkpoint around layers may be the cause"
                f" (use_reentrant=False), or {CARRIED_PAST}"
            )
    return None


def _find_in_gradients(
    stage: StageCalls, whole: Result, cut: Result, shared: Sequence[str]
) -> str | None:
    sizes = [float(g.abs().max()) for g in whole.gradients.values() if g is not None and g.numel()]
    # A gradient that is zero by mathematics is noise of rounding: it may differ.
    floor = 1e-3 * max(sizes, default=0.0)
    for name, expected in whole.gradients.items():
        found = cut.gradients[name]
        if name in shared or (expected is None and found is None):
            continue
        if expected is None or found is None:
            rest = found if expected is None else expected
            if rest is not None and not rest.any() and name not in stage.decayed:
                continue  # without weight decay, zeros are as good as no gradient
            kind = "a gradient in the stage only" if expected is None else "no gradient"
        elif are_close(expected, found, dtype=stage.amp_dtype, floor=floor):
            continue
        else:
            kind = "another gradient than in the whole model"
        return (
            f"parameter {printable(name)!r}: has {kind}; something behind the stage uses it or its"
            " layers' values (a loss that closes over the model, an auxiliary loss kept on a layer,"
            " a weight used twice), or a checkpoint or hook acts outside of its layers;"
            " pipeplan.runtime.add_loss adds losses of layers"
        )
    return None


def _find_in_attributes(
    stage: StageCalls, whole: Result, cut: Result, shared: Sequence[str]
) -> str | None:
    """Compare what backwards leave on parameters by themselves (`weight.main_grad`)."""
    for name, attribute in dict.fromkeys((*whole.attributes, *cut.attributes)):
        expected = whole.attributes.get((name, attribute))
        found = cut.attributes.get((name, attribute))
        if name in shared or (
            expected is not None
            and found is not None
            and are_close(expected, found, dtype=stage.amp_dtype)
        ):
            continue
        return (
            f"parameter {printable(name)!r}: its attribute {printable(attribute)!r} is not what the"
            " whole model leaves there; in a backward in two halves, saved weights are not the"
            " parameters themselves: let the backward return the gradient, or plan with"
            " --no-split-backward"
        )
    return None


def _find_in_buffers(stage: StageCalls, whole: Result, cut: Result) -> str | None:
    for name, found in cut.buffers.items():
        expected = whole.buffers.get(name)
        if expected is not None and not are_close(expected, found, dtype=stage.amp_dtype):
            return (
                f"buffer {printable(name)!r}: changes otherwise than in the whole model; layers of"
                " other stages may change it too, or values of other stages enter it; give it to"
                " one layer"
            )
    return None
