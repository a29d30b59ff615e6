"""Joins what several replicas send for one microbatch.

Forward, replicas must agree: one value has one shape and one number. Backward, a replica may have
no gradient for a tensor, where another has one. Its rows then count as zeros.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pipeplan.errors import RuntimeMismatchError
from pipeplan.pipeline import Kind
from pipeplan.runtime.exchange.contents import Contents, TensorKind, parse_template

__all__ = ["Received", "join", "require_agreement"]


class Received(NamedTuple):
    """A message that has arrived."""

    contents: Contents
    tensors: list[torch.Tensor]
    num_rows: int

    @property
    def template(self) -> Any:
        """What joins the tensors into one value."""
        return parse_template(self.contents.template)


def require_agreement(
    all_contents: Sequence[Contents], ranks: Sequence[int], microbatch: int
) -> None:
    """Refuse replicas that send different shapes or plain values for one microbatch."""
    first = all_contents[0]
    for contents, rank in zip(all_contents[1:], ranks[1:], strict=True):
        if contents.has_layout_of(first) and contents.template == first.template:
            continue
        which = f"microbatch {microbatch}: rank {ranks[0]} sends"
        if contents.has_layout_of(first):
            ours, theirs = (_values(each.template) for each in (first, contents))
            remedy = "a value that depends on the data has to be a tensor with rows"
        else:
            ours, theirs = (_shapes(each.kinds) for each in (first, contents))
            remedy = "pad all rows of a batch alike"
        raise RuntimeMismatchError(
            f"{which} {ours} and rank {rank} {theirs} for their rows; {remedy}, or plan without"
            " replicas of their stage"
        )


def _shapes(kinds: Sequence[TensorKind]) -> str:
    texts = (f"{list(kind.shape)} {str(kind.dtype).removeprefix('torch.')}" for kind in kinds)
    return f"rows of shape {', '.join(texts)}"


def _values(template: str) -> str:
    found: list[str] = []
    _collect_plain(parse_template(template), found)
    return f"the plain values {', '.join(found[:8]) or 'none'}"


def _collect_plain(template: Any, found: list[str]) -> None:
    kind, content = template
    if kind == "plain":
        found.append(repr(content))
    elif kind == "dict":
        for entry in content.values():
            _collect_plain(entry, found)
    elif kind in ("tuple", "list", "named"):
        for entry in content[1:] if kind == "named" else content:
            _collect_plain(entry, found)


def join(
    parts: Sequence[Received], kind: Kind, shared: list[torch.Tensor] | None = None
) -> Received:
    """One message with the rows of all parts, in order.

    `shared` are the buffers of which the parts' tensors are slices, if they are.
    """
    if len(parts) == 1:
        return parts[0]
    first = parts[0].contents
    contents = first
    if any(part.contents != first for part in parts):
        if kind is Kind.BACKWARD:
            return _join_gradients(parts)
        contents = Contents(_with_any_gradient(parts), first.template)
    tensors = shared
    if tensors is None:
        columns = zip(*(part.tensors for part in parts), strict=True)
        tensors = [torch.cat(column) for column in columns]
    return Received(contents, tensors, sum(part.num_rows for part in parts))


def _with_any_gradient(parts: Sequence[Received]) -> tuple[TensorKind, ...]:
    """The kinds of tensors; one has a gradient if it has one on any replica."""
    return tuple(
        kinds[0]._replace(has_gradient=any(kind.has_gradient for kind in kinds))
        for kinds in zip(*(part.contents.kinds for part in parts), strict=True)
    )


def _join_gradients(parts: Sequence[Received]) -> Received:
    """Gradients by index; the rows of a part without a gradient are zeros."""
    by_index = [dict(zip(part.template, part.tensors, strict=True)) for part in parts]
    indices = sorted({index for found in by_index for index in found})
    tensors = []
    for index in indices:
        like = next(found[index] for found in by_index if index in found)
        pieces = [
            found[index] if index in found else like.new_zeros((part.num_rows, *like.shape[1:]))
            for found, part in zip(by_index, parts, strict=True)
        ]
        tensors.append(torch.cat(pieces))
    kinds = tuple(TensorKind(t.shape[1:], t.dtype, True, False) for t in tensors)
    return Received(Contents(kinds, str(indices)), tensors, sum(part.num_rows for part in parts))
