"""The parts in which gradients are summed: which parameters go together into one all-reduce."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Bucket", "Reduction", "make_buckets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Parameters whose gradients are summed over a group of ranks."""

    parameters: Sequence[nn.Parameter]
    group: Any
    stages: frozenset[int] = frozenset({0})
    """The stages of this rank that add to these gradients."""
    num_parts: int = 1
    """In how many parts of about equal size the plan sums them; 1 leaves that to the runtime."""


@dataclass(slots=True)
class Bucket:
    """Gradients that are reduced together; they are views of one flat tensor."""

    parameters: list[nn.Parameter]
    group: Any
    flat: torch.Tensor
    views: list[torch.Tensor]
    sample_place: torch.Tensor
    """Behind the gradients, the sum of `sample` over ranks."""
    counts: torch.Tensor
    """Behind that, on how many ranks each parameter got a gradient."""
    rest: torch.Tensor
    """What is left behind these, for other numbers."""
    stages: frozenset[int]
    num_backwards: int = 0
    """Backwards of its stages that have begun in this step."""
    is_final: bool = False
    """Whether the backward that runs is the last one that adds to it."""
    num_missing: int = 0
    """Gradients that the last backward has still to compute."""
    used: set[int] = field(default_factory=set)
    """Indices of parameters that got a gradient on this rank."""
    num_arrivals: list[int] = field(default_factory=list)
    """How often the gradient of each parameter has arrived in this step."""
    work: Any = None
    sample: float | None = None
    """The size of a few values of one parameter on this rank, in this step."""
    num_ranks: int = 0
    """Of its group; 0 until somebody asks."""


def make_buckets(reduction: Reduction, bucket_bytes: float, num_more: int = 0) -> list[Bucket]:
    """The parts of one reduction, those whose gradients are computed first in front.

    The last one has so many elements more.

    A plan's parts are of about equal size: a parameter belongs to the part in which its middle is.
    Without them, a part has at most so many bytes, or one parameter.
    """
    cut = _cut_evenly if reduction.num_parts > 1 else _cut_by_size
    limit = reduction.num_parts if reduction.num_parts > 1 else bucket_bytes
    parameters = list(reversed(list(reduction.parameters)))
    parts: list[list[nn.Parameter]] = []
    before = None
    for parameter, part in zip(parameters, cut(parameters, limit), strict=True):
        kind = (part, parameter.dtype, parameter.device)
        if kind != before:
            parts.append([])
        parts[-1].append(parameter)
        before = kind
    last = len(parts) - 1
    return [_bucket(part, reduction, num_more * (n == last)) for n, part in enumerate(parts)]


def _cut_evenly(parameters: Sequence[nn.Parameter], num_parts: float) -> list[int]:
    """The number of each parameter's part."""
    total, end, found = sum(parameter.nbytes for parameter in parameters), 0, []
    for parameter in parameters:
        middle = end + parameter.nbytes / 2
        found.append(int(num_parts * middle / total) if total else 0)
        end += parameter.nbytes
    return found


def _cut_by_size(parameters: Sequence[nn.Parameter], bucket_bytes: float) -> list[int]:
    """The same for parts of at most so many bytes."""
    found: list[int] = []
    part, size_bytes, before = 0, 0.0, None
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        if found and (size_bytes + parameter.nbytes > bucket_bytes or kind != before):
            part, size_bytes = part + 1, 0.0
        found.append(part)
        size_bytes += parameter.nbytes
        before = kind
    return found


def _bucket(parameters: list[nn.Parameter], reduction: Reduction, num_more: int) -> Bucket:
    total = sum(parameter.numel() for parameter in parameters)
    end = total + 1 + len(parameters)
    flat = torch.zeros(end + num_more, dtype=parameters[0].dtype, device=parameters[0].device)
    views, start = [], 0
    for parameter in parameters:
        views.append(_view_like(flat[start : start + parameter.numel()], parameter))
        start += parameter.numel()
    return Bucket(
        parameters=parameters,
        group=reduction.group,
        flat=flat,
        views=views,
        sample_place=flat[total],
        counts=flat[total + 1 : end],
        rest=flat[end:],
        stages=reduction.stages,
    )


def _view_like(flat: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """A view with the parameter's shape; and with its layout, as autograd wants it, if possible."""
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view_as(parameter)
