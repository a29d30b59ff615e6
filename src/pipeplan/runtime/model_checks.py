"""What a model must not be when a pipeline takes it: used up, or with tensors in shared memory."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipeplan.documents.text import printable
from pipeplan.errors import RuntimeMismatchError
from pipeplan.splitting.holding import stages_with
from pipeplan.splitting.layout import Layout
from pipeplan.splitting.stand_ins import StandIn
from pipeplan.splitting.torch_private import gradient_hooks

__all__ = [
    "require_dense_gradients",
    "require_linear_hooks",
    "require_separate_memory",
    "require_whole",
]


def require_whole(model: nn.Module) -> None:
    """Refuse a model that another pipeline has cut already."""
    _require_silent(model)
    for name, module in model.named_modules():
        if isinstance(module, StandIn):
            raise RuntimeMismatchError(
                f"model: another Pipeline has cut it, and its {printable(name)!r} is gone on this"
                " rank; build the model anew, and load its values from a checkpoint"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise RuntimeMismatchError(
                f"parameter {printable(name)!r}: has no shape yet; run the model once on a few rows"
                " before the pipeline is made, so that lazy modules know their shapes"
            )


def _require_silent(model: nn.Module) -> None:
    """Refuse modules that talk to other ranks by themselves, which would wait for ever."""
    for name, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__name__ in TALKING]
        if kinds:
            where = f"its {printable(name)!r} is" if name else "is"
            raise RuntimeMismatchError(
                f"model: {where} a {kinds[0]}, which talks to all ranks by itself, but ranks run"
                f" other layers than each other; {TALKING[kinds[0]]}"
            )


_WRAPPED = "give the model that it wraps: a plan says how many replicas each stage has"
TALKING = {
    "DistributedDataParallel": _WRAPPED,
    "FullyShardedDataParallel": _WRAPPED,
    "FSDPModule": "give the model before fully_shard; plans may share the optimizer's state out",
    "SyncBatchNorm": "use BatchNorm, which normalises over a replica's rows of one microbatch",
}
"""Modules of torch by their names, since importing them takes long; and what to do."""


def require_dense_gradients(model: nn.Module) -> None:
    """Refuse embeddings with sparse gradients: ranks do not sum those."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise RuntimeMismatchError(
                f"model: its {printable(name)!r} has sparse gradients, which ranks do not sum; make"
                " it with sparse=False"
            )


def require_linear_hooks(model: nn.Module) -> None:
    """Refuse hooks of parameters that do not see the same in parts of a gradient.

    A gradient is the sum over microbatches, replicas and stages. A hook gets one part at a time.
    """
    for name, parameter in model.named_parameters():
        before, behind = gradient_hooks(parameter)
        if behind or not all(_is_linear(hook, parameter) for hook in before):
            raise RuntimeMismatchError(
                f"parameter {printable(name)!r}: has a hook that needs its whole gradient (a clamp,"
                " a norm, a step of its own), but gets that of one microbatch on one replica; clip"
                " by clip_norm, or change gradients in the optimizer"
            )


def _is_linear(hook: Any, parameter: nn.Parameter) -> bool:
    """Whether a hook gives for a sum of gradients the sum of what it gives for each."""
    if parameter.is_meta:
        return True
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
        for _ in range(2)
    ]
    try:
        with torch.no_grad():
            first, second, both = (hook(g.clone()) for g in (*parts, parts[0] + parts[1]))
    except Exception:
        return False
    if first is None and second is None and both is None:
        return True  # it only looks
    rounding = 10 * torch.finfo(parameter.dtype).eps ** 0.75
    return torch.allclose(first + second, both, rtol=rounding, atol=rounding)


def require_separate_memory(model: nn.Module, layout: Layout, stages: Sequence[range]) -> None:
    """Refuse different tensors of different stages that share memory.

    A tied weight is one parameter with several names, and stages keep it equal. Two tensors with
    the same memory (`b.weight = nn.Parameter(a.weight.data)`) would become two weights.
    """
    found = sorted(_spans(model), key=lambda span: (span[0], -span[1]))
    last: tuple[int, str, torch.Tensor] | None = None
    for start, end, name, tensor in found:
        if last is not None and start < last[0] and tensor is not last[2]:
            holders = [stages_with(model, layout, stages, each) for each in (last[1], name)]
            if len(holders[0] | holders[1]) > 1:
                raise RuntimeMismatchError(
                    f"model: {printable(last[1])!r} and {printable(name)!r} are different tensors"
                    " in the same memory, and their stages could not keep them equal; make them"
                    " one nn.Parameter with two names, or clone() one of them"
                )
        if last is None or end > last[0]:
            last = (end, name, tensor)


def _spans(model: nn.Module) -> Iterator[tuple[int, int, str, torch.Tensor]]:
    """The addresses of all tensors that modules hold, with names; each tensor once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        named = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
            *((name, value) for name, value in vars(module).items()),
        ]
        for name, tensor in named:
            if not isinstance(tensor, torch.Tensor) or id(tensor) in seen:
                continue
            if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
                continue
            seen.add(id(tensor))
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in steps)
            start = tensor.data_ptr()
            end = start + (last + 1) * tensor.element_size()
            yield start, end, f"{prefix}.{name}" if prefix else name, tensor
