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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.batches import mark_rows, select_rows
from pipeplan.runtime.loss_terms import LossTerms
from pipeplan.runtime.module_state import ModuleState
from pipeplan.runtime.verification.same_randomness import SameRandomness
from pipeplan.splitting.nesting import map_tensors, tensors_in

__all__ = ["LossOfRows", "spread_rows"]

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

    def find_problem(self, targets: Any, num_rows: int) -> str | None:
        """Why the loss is no mean over rows; None if it is, or if it cannot be computed so.

        `targets` are those of `num_rows` rows. A few of them are looked at.
        """
        marked = mark_rows(targets, num_rows, "targets") if targets is not None else None
        modules = self.loss.loss_fn.modules() if isinstance(self.loss.loss_fn, nn.Module) else ()
        state, randomness = ModuleState(modules), SameRandomness()
        randomness.is_noting = True
        try:
            with torch.no_grad(), randomness, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a single row may have no deviation
                found = self._find(marked, spread_rows(num_rows))
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
            if not sum(weights):
                continue
            parts = zip(weights, alone, strict=True)
            mean = sum(weight * value for weight, value in parts if weight) / sum(weights)
            if not math.isfinite(both) or self._are_near(both, mean):
                continue
            if self._are_near(both, sum(alone)):
                return (
                    f"loss_fn: is a sum over rows ({both:.6g} for 2 rows, {alone[0]:.6g} for one of"
                    " them), but has to be their mean; use reduction='mean'"
                )
            if self.loss.weight_fn is not None:
                return None  # the caller has said how microbatches count
            return (
                f"loss_fn: is no mean over rows: {both:.6g} for the rows {first} and {other}"
                f" together, {alone[0]:.6g} and {alone[1]:.6g} for each; if targets weigh"
                " differently (ignore_index), give loss_weight_fn, such as lambda targets: (targets"
                " != -100).sum(); if each microbatch shall have a loss of its own, give"
                " loss_weight_fn=len"
            )
        return None

    def _value(self, which: list[int], targets: Any, rows: list[int]) -> float:
        output = select_rows(self.outputs, which, None)
        chosen = select_rows(targets, rows, self.device) if targets is not None else None
        autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.amp_dtype is not None:
            autocast = torch.autocast(self.device.type, dtype=self.amp_dtype)
        return float(self.loss.of(output, chosen, 1.0, autocast))

    def _weight(self, targets: Any, rows: list[int]) -> float:
        chosen = select_rows(targets, rows, None) if targets is not None else None
        return self.loss.weight(chosen, len(rows))

    def _are_near(self, first: float, second: float) -> bool:
        kinds = {t.dtype for t in tensors_in(self.outputs) if t.is_floating_point()}
        kinds |= {self.amp_dtype or torch.float32}
        rounding = max(torch.finfo(kind).eps for kind in kinds)
        return math.isclose(first, second, rel_tol=max(1e-3, rounding**0.75), abs_tol=1e-6)
