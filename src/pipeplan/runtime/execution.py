"""Runs one replica's blocks: a microbatch forward or backward through its stage.

Random numbers: every block seeds the generator by (seed, step, stage, microbatch, replica). So a
run repeats bit by bit, and recomputation draws the same numbers as the forward. Different replicas
and microbatches drop different elements.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeplan.errors import RuntimeMismatchError
from pipeplan.splitting.nesting import map_tensors, put_tensors, take_tensors, tensors_in
from pipeplan.splitting.stage_modules import StageModule

__all__ = ["BlockSeeds", "LossTerms", "StageRunner"]

Function = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeeds:
    """Makes the seeds of a replica's blocks."""

    seed: int
    stage: int
    replica: int

    def of(self, step: int, microbatch: int) -> int:
        """The seed of one block."""
        text = f"{self.seed}/{step}/{self.stage}/{microbatch}/{self.replica}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """How the last stage computes the loss and the metrics from outputs."""

    loss_fn: Function
    metrics: Mapping[str, Function]
    weight_fn: Callable[[Any], Any] | None
    """The weight of targets; without it, each row weighs 1."""

    def weight(self, targets: Any, num_rows: int) -> float:
        """The weight of these targets in the mean."""
        return float(num_rows) if self.weight_fn is None else float(self.weight_fn(targets))


@dataclass(slots=True)
class _Kept:
    """What the backward of a microbatch needs."""

    carried: list[torch.Tensor]
    roots: list[GradientEdge | None]
    """Where the backward of each output begins; empty with recomputation. These are edges of the
    graph, not the outputs: outputs are freed once they are sent. None has no gradient."""
    grad_outputs: list[torch.Tensor | None] | None
    """The gradient of the loss, on the last stage; None elsewhere."""
    call: Any
    seed: int


class StageRunner:
    """Runs the blocks of one replica, without any communication."""

    def __init__(
        self,
        module: StageModule,
        device: torch.device,
        *,
        seeds: BlockSeeds,
        recompute: bool,
        amp_dtype: torch.dtype | None,
        loss: LossTerms | None,
    ) -> None:
        self._module, self._device, self._seeds = module, device, seeds
        self._recompute, self._amp_dtype = recompute, amp_dtype
        self._loss = loss
        self._kept: dict[int, _Kept] = {}
        self._evaluates = False
        self._clones_inputs = self._is_checked = False
        self._statistics = [
            layer
            for layer in module.model.modules()
            if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats
        ]

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate inside: forwards keep nothing, and layers are in evaluation mode."""
        modes = [(module, module.training) for module in self._module.model.modules()]
        self._module.model.eval()
        self._evaluates = True
        try:
            with torch.no_grad():
                yield
        finally:
            self._evaluates = False
            for module, training in modes:
                module.training = training

    def sharing_casts(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, microbatches share the parameters that autocast casts to lower precision.

        Autocast forgets its casts when the outermost autocast context ends. Without a context
        around all microbatches, each would keep its own casts for the backward. Recomputation
        needs none: there only one microbatch has casts at a time, and a cast made without
        gradients must not be reused with gradients.
        """
        if self._amp_dtype is None or self._recompute:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, enabled=False)

    def forward(
        self,
        step: int,
        microbatch: int,
        carried: list[torch.Tensor],
        template: Any,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> tuple[list[torch.Tensor], Any]:
        """The tensors that leave the stage, and the template that joins them."""
        seed = self._seeds.of(step, microbatch)
        call = (template, inputs)
        with torch.set_grad_enabled(not self._evaluates and not self._recompute):
            output = self._run(carried, call, seed)
        tensors, shape = take_tensors(output, f"layers {self._module.layers_text}")
        if self._recompute:
            self._keep(microbatch, _Kept(carried, [], None, call, seed))
        else:
            self._keep(microbatch, _Kept(carried, _roots(tensors), None, None, seed))
        return tensors, shape

    def forward_last(
        self,
        step: int,
        microbatch: int,
        carried: list[torch.Tensor],
        template: Any,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        targets: Any,
        share: float,
        gradient_scale: float,
    ) -> torch.Tensor:
        """The loss and the metrics of these rows, times the rows' share of the batch's weight."""
        seed = self._seeds.of(step, microbatch)
        call = (template, inputs, targets, share)
        with torch.set_grad_enabled(not self._evaluates and not self._recompute):
            loss, stats = self._run_loss(carried, call, seed)
        roots = [] if self._recompute else _roots([loss])
        scale = torch.full_like(loss, share * gradient_scale) if share else torch.ones_like(loss)
        again = call if self._recompute else None
        self._keep(microbatch, _Kept(carried, roots, [scale], again, seed))
        return stats

    def have_gradient(self, tensors: list[torch.Tensor]) -> list[bool]:
        """Which of the tensors that leave the stage may get a gradient.

        With recomputation only the second forward knows. So all that can have one may get one.
        """
        if self._recompute and not self._evaluates:
            return [tensor.is_floating_point() or tensor.is_complex() for tensor in tensors]
        return [tensor.requires_grad for tensor in tensors]

    def backward(
        self, microbatch: int, grad_outputs: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradient of each input of the stage; `grad_outputs` are those of its outputs.

        None is the gradient of a tensor that has no influence on the loss.
        """
        kept = self._kept.pop(microbatch)
        roots = kept.roots
        if self._recompute:
            with self._frozen_statistics():
                roots = self._forward_again(kept)
        starts, values = [], []
        for root, gradient in zip(roots, kept.grad_outputs or grad_outputs, strict=True):
            if root is not None and gradient is not None:
                starts.append(root)
                values.append(gradient)
        if starts:
            torch.autograd.backward(starts, values)
        gradients = []
        for tensor in kept.carried:
            gradients.append(tensor.grad)
            tensor.grad = None
        return gradients

    def _keep(self, microbatch: int, kept: _Kept) -> None:
        if not self._evaluates:
            self._kept[microbatch] = kept

    def _forward_again(self, kept: _Kept) -> list[GradientEdge | None]:
        if kept.grad_outputs is not None:
            return _roots([self._run_loss(kept.carried, kept.call, kept.seed)[0]])
        output = self._run(kept.carried, kept.call, kept.seed)
        return _roots(take_tensors(output, f"layers {self._module.layers_text}")[0])

    def _run(self, carried: list[torch.Tensor], call: Any, seed: int) -> Any:
        """The output of the layers.

        Layers may change their inputs in place. Once that is noticed, they get copies.
        """
        if self._clones_inputs:
            return self._run_on(_cloned(carried), _cloned(call[:2]), seed)
        if self._recompute and not torch.is_grad_enabled():
            return self._run_and_compare(carried, call, seed)
        try:
            return self._run_on(carried, call, seed)
        except RuntimeError as error:
            # The first layer may work in place, which autograd forbids on a leaf.
            if "leaf Variable that requires grad" not in str(error):
                raise
        self._clones_inputs = True
        return self._run(carried, call, seed)

    def _run_and_compare(self, carried: list[torch.Tensor], call: Any, seed: int) -> Any:
        """Run without gradients, and notice inputs that change in place.

        Autograd does not complain here, but recomputation needs the unchanged inputs.
        """
        tensors = [*carried, *tensors_in(call[1])]
        versions = [tensor._version for tensor in tensors]
        copies = None if self._is_checked else [tensor.detach().clone() for tensor in tensors]
        self._is_checked = True
        output = self._run_on(carried, call, seed)
        if [tensor._version for tensor in tensors] == versions:
            return output
        if copies is None:
            raise RuntimeMismatchError(
                f"layers {self._module.layers_text}: changed their inputs in place, but not in"
                " their first microbatch; with recompute they must not"
            )
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
        self._clones_inputs = True
        return self._run(carried, call, seed)

    def _run_on(self, carried: list[torch.Tensor], call: Any, seed: int) -> Any:
        template, (args, kwargs) = call[:2]
        self._seed(seed)
        value = put_tensors(template, carried) if template is not None else None
        with self._autocast():
            return self._module(value, args, kwargs)

    def _run_loss(
        self, carried: list[torch.Tensor], call: Any, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._loss is None:
            raise AssertionError("only the last stage has a loss")
        output = self._run(carried, call, seed)
        _, _, targets, share = call
        numbers: list[Any]
        if share:
            with self._autocast():
                loss = self._loss.loss_fn(output, targets)
            with torch.no_grad():
                numbers = [fn(output, targets) for fn in self._loss.metrics.values()]
        else:
            # Rows without weight have no mean loss. The backward still has to run through them.
            tensors = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
            loss = sum((tensor.sum() * 0.0 for tensor in tensors), torch.zeros(()))
            numbers = [0.0] * len(self._loss.metrics)
        stats = torch.stack(
            [
                torch.as_tensor(number, device=self._device).detach().double()
                for number in (loss, *numbers)
            ]
        )
        return loss, stats * share

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._amp_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._amp_dtype)

    @contextlib.contextmanager
    def _frozen_statistics(self) -> Any:
        """Restore running means afterwards: recomputation must not count a microbatch twice."""
        saved = [
            [(buffer, buffer.clone()) for buffer in module.buffers(recurse=False)]
            for module in self._statistics
        ]
        yield
        for buffers in saved:
            for buffer, value in buffers:
                buffer.data.copy_(value)


def _roots(tensors: list[torch.Tensor]) -> list[GradientEdge | None]:
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors]


def _cloned(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor.clone())
