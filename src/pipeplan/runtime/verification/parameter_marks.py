"""Marks of a model's parameters, which show whether a forward has changed one of them."""

from collections.abc import Sequence

from torch import nn

from pipeplan.documents.text import printable
from pipeplan.splitting.torch_private import count_changes

__all__ = ["changed_since", "changed_text", "marks_of"]

Marks = dict[str, tuple[int, float, float]]


def marks_of(model: nn.Module) -> Marks:
    """How often each parameter was changed in place, and two numbers that its values give."""
    return {
        name: (count_changes(p), float(p.detach().sum()), float(p.detach().norm()))
        for name, p in model.named_parameters()
        if not p.is_meta and not p.is_complex()
    }


def changed_since(marks: Marks, model: nn.Module) -> list[str]:
    """The parameters that have other marks now."""
    now = marks_of(model)
    return [name for name, mark in marks.items() if repr(now[name]) != repr(mark)]  # NaN is NaN


def changed_text(names: Sequence[str]) -> str:
    """What is wrong with a forward that changes these parameters."""
    return (
        f"parameter {printable(names[0])!r}: the forward changes it (max_norm, an average of other"
        " weights, clamp_); replicas, recomputation and microbatches under way would each see other"
        " values: make it a buffer, or change it between steps"
    )
