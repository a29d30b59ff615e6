"""A model whose layers compute nothing, but whose outputs, gradients and parameters have the sizes
that the profile says.

The last layer of each stage does it all; the layers before it pass their input on. It has one
parameter for each part in which gradients are summed. Outputs are slices of one buffer: they cost
nothing. A gradient of a parameter is made once a step, by the first backward: more would only cost
memory traffic that the profile's times contain already.

An output whose gradient is smaller travels as two tensors, one of them without a gradient.
"""

import itertools
from typing import Any

import torch
from torch import nn

from pipeplan.pipeline import Plan, Stage

__all__ = ["IdleOptimizer", "mean_loss", "stand_in_model"]

FLOAT_BYTES = 4


class _Sizes(torch.autograd.Function):
    """Tensors of given sizes, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, carried: torch.Tensor, buffers: list[torch.Tensor], *weights: torch.Tensor
    ) -> Any:
        """Slices of the buffers, with as many rows as the input; the first has a gradient."""
        ctx.weights, ctx.shape = weights, carried.shape
        ctx.needs_carried = carried.requires_grad
        outputs = tuple(buffer[: len(carried)] for buffer in buffers)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """A gradient of the input's size, and once a step one of each parameter's."""
        carried = torch.empty(ctx.shape) if ctx.needs_carried else None
        weights = [
            torch.zeros(1).expand_as(weight) if weight.grad is None else None
            for weight in ctx.weights
        ]
        return (carried, None, *weights)


class _LastLayer(nn.Module):
    """The last layer of a stage."""

    def __init__(self, num_parameters: int, num_parts: int, columns: list[int], rows: int) -> None:
        super().__init__()
        ends = [round(num_parameters * part / num_parts) for part in range(num_parts + 1)]
        self.weights = nn.ParameterList(
            torch.empty(max(1, end - start)) for start, end in itertools.pairwise(ends)
        )
        self._buffers_of_output = [torch.zeros(rows, width) for width in columns]

    def forward(self, carried: Any) -> Any:
        """Tensors of the output's sizes."""
        first = carried[0] if isinstance(carried, tuple) else carried
        outputs = _Sizes.apply(first, self._buffers_of_output, *self.weights)  # type: ignore[no-untyped-call]
        return outputs if len(outputs) > 1 else outputs[0]


def stand_in_model(plan: Plan) -> nn.Sequential:
    """The model of a plan, as sizes; its layers are called 0, 1, 2, ..."""
    modules: list[nn.Module] = [nn.Identity() for _ in plan.model.layers]
    for number, stage in enumerate(plan.stages):
        num_bytes = sum(plan.model.layers[layer].parameter_bytes for layer in stage.layers)
        is_last = number == plan.num_stages - 1
        columns = [1] if is_last else _columns(plan, stage)
        num_parameters = round(num_bytes / FLOAT_BYTES)
        rows = plan.model.microbatch_size
        modules[stage.layers[-1]] = _LastLayer(
            num_parameters, stage.gradient_buckets, columns, rows
        )
    return nn.Sequential(*modules)


def _columns(plan: Plan, stage: Stage) -> list[int]:
    """The columns of the output: those with a gradient, and those without, if there are any."""
    layer = plan.model.layers[stage.layers[-1]]
    row_bytes = FLOAT_BYTES * plan.model.microbatch_size
    with_gradient = max(1, round(layer.gradient_bytes / row_bytes))
    without = round(layer.output_bytes / row_bytes) - with_gradient
    return [with_gradient, without] if without > 0 else [with_gradient]


def mean_loss(output: torch.Tensor, targets: Any) -> torch.Tensor:
    """Some loss."""
    return output.mean()


class IdleOptimizer(torch.optim.Optimizer):
    """Updates nothing: the cost model counts no time for it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""
