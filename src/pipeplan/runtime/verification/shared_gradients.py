"""Gradients of parameters that several stages hold: their sum over stages is the whole model's.

Stages compare by themselves. So each gives a few numbers that are linear in its gradient.
"""

import contextlib
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from pipeplan.runtime.placement import name_stages

__all__ = ["Projections", "find_in_sums", "find_shared", "project", "separated_loss"]

Projections = dict[str, list[float]]
"""For each parameter that several stages hold: numbers that are linear in its gradient."""


class HasGradients(Protocol):
    """What a stage reports."""

    @property
    def loss(self) -> float:
        """The whole model's loss on its rank."""

    @property
    def whole(self) -> Projections:
        """Of the whole model."""

    @property
    def cut(self) -> Projections:
        """Of the stage."""


def find_shared(
    parameters: Mapping[str, nn.Parameter],
    separated: set[int],
    held_by: Mapping[str, set[int]],
    first_name_of: Mapping[str, str],
    own_stages: frozenset[int],
) -> dict[str, str]:
    """Parameters whose gradient in the whole model is that of several stages; by name, its key.

    The gradients of all stages with the same key add up to it. Where a parameter was separated from
    its uses on other ranks, these are the stages of this rank.
    """
    found = {}
    for name, parameter in parameters.items():
        own = held_by[name] & own_stages
        if len(held_by[name]) > 1 and id(parameter) not in separated:
            found[name] = first_name_of[name]
        elif len(own) > 1:
            found[name] = f"{first_name_of[name]} ({name_stages(sorted(own))})"
    return found


@contextlib.contextmanager
def separated_loss(loss_fn: Any, model: nn.Module, held: Collection[int]) -> Iterator[set[int]]:
    """Inside, a loss of another rank has copies of parameters that this rank holds, too (by id).

    So their gradients tell the uses of this rank from that of the loss. Yields the ids of these.
    """
    taken: list[tuple[nn.Module, str, nn.Parameter]] = []
    is_elsewhere = isinstance(loss_fn, nn.Module) and all(m is not loss_fn for m in model.modules())
    for module in loss_fn.modules() if is_elsewhere else ():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in held:
                taken.append((module, name, parameter))
    copies = {
        id(each): nn.Parameter(each.detach().clone(), each.requires_grad) for *_, each in taken
    }
    try:
        for module, name, parameter in taken:
            setattr(module, name, copies[id(parameter)])
        yield set(copies)
    finally:
        for module, name, parameter in taken:
            setattr(module, name, parameter)


def project(gradients: Mapping[str, torch.Tensor | None], keys: Mapping[str, str]) -> Projections:
    """Two numbers that are linear in the gradient, and the gradient's size."""
    found: Projections = {}
    for name, first in keys.items():
        gradient = gradients.get(name)
        if gradient is None:
            found[first] = [0.0, 0.0, 0.0]
            continue
        values = gradient.detach().double().flatten().cpu()
        generator = torch.Generator().manual_seed(zlib.crc32(first.encode()))
        vectors = torch.randn(2, values.numel(), generator=generator, dtype=torch.float64)
        found[first] = [*(vectors @ values).tolist(), float(values.norm())]
    return found


def find_in_sums(reports: Sequence[HasGradients], rounding: Callable[[float], float]) -> str | None:
    """Compare gradients of parameters that several stages hold: the sum over stages is the whole's.

    Ranks that have loaded their stage from a checkpoint differ in the rest of the model. Then
    nothing can be said.
    """
    losses = [report.loss for report in reports]
    if max(losses) - min(losses) > rounding(max(map(abs, losses))):
        return None
    names = sorted({name for report in reports for name in report.whole})
    for name in names:
        wholes = [report.whole[name] for report in reports if name in report.whole]
        cuts = [report.cut[name] for report in reports if name in report.cut]
        size = max([whole[2] for whole in wholes] + [sum(cut[2] for cut in cuts)])
        for number in (0, 1):
            total = sum(cut[number] for cut in cuts)
            if abs(total - wholes[0][number]) > 10 * rounding(size):
                return (
                    f"parameter {name!r}: its gradients of all stages together are not that of the"
                    " whole model; something uses it in a way that a cut loses"
                )
    return None
