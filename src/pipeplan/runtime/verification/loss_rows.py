"""Finds out whether a loss is the mean over rows that the runtime takes it for.

A batch is divided into microbatches, and each counts by its weight. That gives the loss of the
whole batch only if the loss of two rows is the weighted mean of their two losses. It is not so if

- rows are summed up;
- targets weigh differently, such as with `ignore_index`: then `loss_weight_fn` has to say how much;
- rows are compared with each other, as in contrastive losses.

Two rows of outputs are enough to ask. They are combined with targets of rows of the whole batch,
because only some rows may be padded.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.batches import mark_rows, select_rows
from pipeplan.runtime.loss_terms import LossTerms
from pipeplan.runtime.module_state import ModuleState
from pipeplan.runtime.verification.row_records import RowRecords
from pipeplan.runtime.verification.same_randomness import SameRandomness
from pipeplan.splitting.nesting import map_tensors, tensors_in

__all__ = ["LossOfRows", "spread_rows"]

REMEDY = (
    "if targets weigh differently (ignore_index), give loss_weight_fn, such as lambda targets:"
    " (targets != -100).sum(); if each microbatch shall have a loss of its own, give"
    " loss_weight_fn=len"
)
MOST_ROWS = 8
"""Rows of the batch whose targets are looked at."""


def spread_rows(num_rows: int, most: int = MOST_ROWS) -> list[int]:
    """A few rows all over the batch, its first and its last among them."""
    count = min(num_rows, most)
    return [round(i * (num_rows - 1) / max(1, count - 1)) for i in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOfRows:
    """The loss as a function of rows; `outputs` are those of two rows, marked by `mark_rows`."""

    loss: LossTerms
    outputs: Any
    device: torch.device
    amp_dtype: torch.dtype | None
    records: RowRecords = field(default_factory=RowRecords)

    @classmethod
    def of(
        cls,
        loss: LossTerms,
        output: Any,
        num_rows: int,
        device: torch.device,
        amp_dtype: torch.dtype | None,
    ) -> "LossOfRows | None":
        """None if the output cannot be divided into rows: then nothing can be said."""
        try:
            marked = mark_rows(output, num_rows, "output")
        except RuntimeMismatchError:
            return None
        if num_rows < 2:
            return None
        two = map_tensors(select_rows(marked, [0, 1], None), lambda tensor: tensor.clone())
        return cls(
            loss=loss, outputs=mark_rows(two, 2, "output"), device=device, amp_dtype=amp_dtype
        )

    def find_problem(self, targets: Any, num_rows: int, *, is_due: bool = True) -> str | None:
        """Why the loss is no mean over rows; None if it is, or if it cannot be computed so.

        `targets` are those of `num_rows` rows. A few of them are looked at if it is due, and always
        those that hold something new.
        """
        rows = self.records.look(targets, num_rows)[:MOST_ROWS]
        if not rows and not is_due:
            return None
        rows = list(dict.fromkeys([*spread_rows(num_rows), *rows]))
        marked = mark_rows(targets, num_rows, "targets") if targets is not None else None
        return self._ask(lambda: self._find(marked, rows))

    def find_in_microbatch(self, output: Any, targets: Any) -> str | None:
        """The same for all rows of a microbatch at once, divided in two ways.

        Two rows do not show everything: a loss may take the worst half of its rows.
        """
        tensors = tensors_in(output)
        num_rows = len(tensors[0]) if tensors and tensors[0].ndim else 0
        if num_rows < 3 or self.loss.weight_fn is not None:
            return None
        detached = map_tensors(output, lambda tensor: tensor.detach())

        def find() -> str | None:
            marked = mark_rows(targets, num_rows, "targets") if targets is not None else None
            whole = replace(self, outputs=mark_rows(detached, num_rows, "output"))
            return whole._find_in_parts(marked, num_rows)

        return self._ask(find)

    def _find_in_parts(self, targets: Any, num_rows: int) -> str | None:
        everything = list(range(num_rows))
        both = self._value(everything, targets, everything)
        for place in dict.fromkeys((1, num_rows // 2)):
            parts = [everything[:place], everything[place:]]
            values = [self._value(rows, targets, rows) for rows in parts]
            pairs = [(len(r) / num_rows, v) for r, v in zip(parts, values, strict=True)]
            mean = sum(share * value.value for share, value in pairs)
            if not all(map(math.isfinite, (both.value, mean))):
                continue
            if self._are_near(both.value, mean) and self._have_near_gradients(both, pairs):
                continue
            return (
                f"loss_fn: is no mean over rows: {both.value:.6g} for {num_rows} rows together, but"
                f" {mean:.6g} as the mean of {place} and {num_rows - place} of them, or with other"
                f" gradients; {REMEDY}"
            )
        return None

    def _ask(self, find: Callable[[], str | None]) -> str | None:
        """The answer, unless the loss draws random numbers; the loss remembers nothing of it."""
        modules = self.loss.loss_fn.modules() if isinstance(self.loss.loss_fn, nn.Module) else ()
        state, randomness = ModuleState(modules), SameRandomness()
        randomness.is_noting = True
        try:
            with torch.enable_grad(), randomness, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a single row may have no deviation
                found = find()
        except Exception:
            return None  # outputs of some rows do not fit to the targets of others
        finally:
            state.put_back()
        return None if randomness.draws else found

    def _find(self, targets: Any, rows: Sequence[int]) -> str | None:
        first = rows[0]
        for other in rows[1:] or [first]:
            alone = [self._value([0], targets, [first]), self._value([1], targets, [other])]
            weights = [self._weight(targets, [row]) for row in (first, other)]
            both = self._value([0, 1], targets, [first, other])
            if not sum(weights) or not math.isfinite(both.value):
                continue
            shares = [weight / sum(weights) for weight in weights]
            pairs = [(share, part) for share, part in zip(shares, alone, strict=True) if share]
            mean = sum(share * part.value for share, part in pairs)
            text = f"{both.value:.6g} for the rows {first} and {other} together"
            if not self._are_near(both.value, mean):
                if self._are_near(both.value, sum(part.value for part in alone)):
                    return (
                        f"loss_fn: is a sum over rows ({both.value:.6g} for 2 rows,"
                        f" {alone[0].value:.6g} for one of them), but has to be their mean; use"
                        " reduction='mean'"
                    )
                text += f", {alone[0].value:.6g} and {alone[1].value:.6g} for each"
            elif not self._have_near_gradients(both, pairs):
                text += ", as it should, but with another gradient than the mean of both"
            else:
                continue
            if self.loss.weight_fn is not None:
                return None  # the caller has said how microbatches count
            return f"loss_fn: is no mean over rows: {text}; {REMEDY}"
        return None

    def _value(self, which: list[int], targets: Any, rows: list[int]) -> "_Value":
        output = select_rows(self.outputs, which, None)
        output = map_tensors(output, lambda tensor: tensor.detach().clone())
        inputs = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
        for tensor in inputs:
            tensor.requires_grad_()
        chosen = select_rows(targets, rows, self.device) if targets is not None else None
        autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.amp_dtype is not None:
            autocast = torch.autocast(self.device.type, dtype=self.amp_dtype)
        loss = self.loss.of(output, chosen, 1.0, autocast)
        found: Sequence[torch.Tensor | None] = [None] * len(inputs)
        if loss.requires_grad and inputs:
            found = torch.autograd.grad(loss, inputs, allow_unused=True)
        gradients = [
            torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found, strict=True)
        ]
        return _Value(float(loss), gradients)

    def _have_near_gradients(self, both: "_Value", pairs: Sequence[tuple[float, "_Value"]]) -> bool:
        """Whether the rows' gradients together are those of each row, by their shares."""
        if len(pairs) < 2:
            return True
        for index, whole in enumerate(both.gradients):
            parts = torch.cat([part.gradients[index] * share for share, part in pairs])
            if whole.shape != parts.shape or not whole.isfinite().all():
                continue
            largest = (
                max(float(whole.abs().max()), float(parts.abs().max())) if whole.numel() else 0.0
            )
            if (
                float((whole - parts).abs().max() if whole.numel() else 0.0)
                > self._rounding() * largest
            ):
                return False
        return True

    def _weight(self, targets: Any, rows: list[int]) -> float:
        chosen = select_rows(targets, rows, None) if targets is not None else None
        return self.loss.weight(chosen, len(rows))

    def _are_near(self, first: float, second: float) -> bool:
        return math.isclose(first, second, rel_tol=self._rounding(), abs_tol=1e-6)

    def _rounding(self) -> float:
        kinds = {t.dtype for t in tensors_in(self.outputs) if t.is_floating_point()}
        kinds |= {self.amp_dtype or torch.float32}
        return float(max(1e-3, max(torch.finfo(kind).eps for kind in kinds) ** 0.75))


class _Value(NamedTuple):
    """A loss, and its gradient by each tensor of the outputs."""

    value: float
    gradients: list[torch.Tensor]
