"""What the whole model shows by itself when ranks run it again after the first step.

- It may call its layers more than once, or in another order, since some step. A stage leaves the
  model's forward at its cut, so it does not see that.
- If the model computes its loss itself (`labels`), only the whole model tells whether that is a
  mean over rows. Targets may be ignored in later batches only.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pipeplan.documents.text import printable
from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.gathering import STEPPING, gather
from pipeplan.runtime.verification.loss_rows import LossOfRows
from pipeplan.runtime.verification.runs import evaluate_whole
from pipeplan.runtime.verification.stage_calls import Sample, StageCalls
from pipeplan.splitting.layout import Layout, LayoutKind

__all__ = ["LayerCalls", "find_uneven_loss", "require_no_problem"]


class LayerCalls:
    """Inside, notes in which order a whole model calls its layers."""

    def __init__(self, layout: Layout, model: nn.Module) -> None:
        self.problem: str | None = None
        self._layout, self._model = layout, model
        self._last, self._depth = -1, 0
        self._is_over = False
        """Whether the forward has ended: checkpoints run layers again in the backward."""
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        inner = slice(1, -1) if self._layout.kind is LayoutKind.LAYER_LIST else slice(None)
        atoms_of: dict[int, list[int]] = {}
        modules: dict[int, nn.Module] = {}
        for atom in range(len(self._layout.atoms))[inner]:
            module = self._model.get_submodule(self._layout.atoms[atom])
            modules[id(module)] = module
            atoms_of.setdefault(id(module), []).append(atom)
        self._handles.append(self._model.register_forward_hook(self._end))
        for key, module in modules.items():
            before, behind = self._make_hooks(atoms_of[key])
            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_forward_hook(behind, always_call=True))

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._is_over = True

    def _make_hooks(self, atoms: Sequence[int]) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: Any) -> None:
            self._depth += 1
            if self._depth > 1 or self._is_over:
                return
            atom = next((atom for atom in atoms if atom > self._last), None)
            if atom is not None:
                self._last = atom
            elif self.problem is None:
                self.problem = (
                    f"model: calls the layer {printable(self._layout.atoms[atoms[0]])!r} more than"
                    " once, or out of order, which it did not in the first step; a stage calls each"
                    " of its layers once, in the order of the plan"
                )

        def behind(module: nn.Module, args: Any, output: Any) -> None:
            self._depth -= 1

        return before, behind


def find_uneven_loss(stage: StageCalls, samples: Sequence[Sample]) -> str | None:
    """Refuse a model's own loss that is no mean over rows; the model has to be whole.

    Losses of outputs with rows are looked at by `LossOfRows`.
    """
    *parts, joint = samples
    if stage.loss.weight_fn is not None or len(parts) < 2:
        return None
    try:
        together, output = evaluate_whole(stage, joint)
        if LossOfRows.of(stage.loss, output, joint.num_rows, stage.device, stage.amp_dtype):
            return None
        losses = [evaluate_whole(stage, part)[0] for part in parts]
    except Exception:
        return None  # the batch's rows alone are what counts
    shares = stage.shares(parts)
    mean = sum(loss * share for loss, share in zip(losses, shares, strict=True))
    kinds = {t.dtype for t in stage.parameters.values()} | {stage.amp_dtype or torch.float32}
    rounding = 5 * max(torch.finfo(kind).eps for kind in kinds) ** 0.75
    if math.isclose(together, mean, rel_tol=rounding, abs_tol=1e-6):
        return None
    if not math.isfinite(together) and not math.isfinite(mean):
        return None
    return (
        f"loss_fn: is no mean over rows: the model's own loss is {together:.6g} for"
        f" {joint.num_rows} rows, and {mean:.6g} as the mean of {len(parts)} microbatches; if"
        " targets weigh differently (ignore_index), compute the loss of the model's output and of"
        " targets in loss_fn, and give loss_weight_fn; if each microbatch shall have a loss of its"
        " own, give loss_weight_fn=lambda targets: 1"
    )


def require_no_problem(own: str | None) -> None:
    """Refuse what any rank has found; all ranks have to call it."""
    everyone = gather(own, STEPPING)
    for found in everyone:
        if found is not None:
            raise RuntimeMismatchError(f'{found} (verify="off" leaves this comparison out)')
