"""All ranks of a pipeline are made with the same plan and the same settings.

A rank that clips alone, or plans for itself, would train another model than the others. So texts of
these settings are compared when the pipeline is made. Later the options of the optimizer's groups
are compared in every step: a scheduler that steps on one rank only gives its stage a rate of its
own.
"""

import types
import zlib
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist

from pipeplan.documents.text import excerpt
from pipeplan.errors import RuntimeMismatchError
from pipeplan.pipeline import KINDS, Plan
from pipeplan.runtime.replica_setup import ReplicaSettings

__all__ = ["hash_options", "require_same_settings"]


def require_same_settings(
    plan: Plan, settings: ReplicaSettings, more: Mapping[str, Any], functions: Mapping[str, Any]
) -> None:
    """Refuse settings that differ between ranks; all ranks have to call it.

    Functions are only compared in whether they are given.

    Raises:
        RuntimeMismatchError: on every rank, it names the setting.
    """
    own = {
        "plan": _hash_plan(plan),
        "metrics": list(settings.loss.metrics),
        "amp_dtype": settings.amp_dtype,
        "bucket_bytes": settings.bucket_bytes,
        "verify": "first-step" if settings.verifies else "off",
        "loss_fn": _text_of(settings.loss.loss_fn),
        **{f"metrics[{name!r}]": _text_of(each) for name, each in settings.loss.metrics.items()},
        **more,
        **{name: None if each is None else "given" for name, each in functions.items()},
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: str(value) for name, value in own.items()})
    for name, first in everyone[0].items():
        for rank, other in enumerate(everyone):
            if other[name] != first:
                raise RuntimeMismatchError(
                    f"{name}: is {excerpt(other[name])} on rank {rank}, but {excerpt(first)} on"
                    " rank 0; make the pipeline in the same way on every rank"
                )


def _text_of(function: Any) -> str:
    """A text that tells functions apart, by their names and their code."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        return getattr(function, "__qualname__", type(function).__qualname__)
    code = function.__code__
    constants = [each for each in code.co_consts if isinstance(each, int | float | str | bytes)]
    text = repr((code.co_code, code.co_names, constants)).encode(errors="replace")
    return f"{function.__qualname__} ({zlib.crc32(text):08x})"


def _hash_plan(plan: Plan) -> str:
    """A text that is equal for plans that run alike."""
    order = tuple(
        (block.stage, KINDS.index(block.kind), block.microbatch)  # numbers, whose hash is the same
        for row in plan.schedule
        for block in row
    )
    parts = [
        repr([astuple(stage) for stage in plan.stages]),
        repr([layer.name for layer in plan.model.layers]),
        repr([device.name for device in plan.cluster.devices]),
        f"{plan.microbatches} {plan.model.microbatch_size} {hash(order)}",
    ]
    return f"{zlib.crc32(chr(0).join(parts).encode()):08x}"


def hash_options(optimizer: torch.optim.Optimizer) -> int:
    """A number that is equal for equal options of all groups, such as their learning rates."""
    options = [
        (name, _plain(value))
        for group in optimizer.param_groups
        for name, value in group.items()
        if name not in NO_OPTIONS
    ]
    return zlib.crc32(repr(options).encode())


NO_OPTIONS = ("params", "initial_lr", "param_names")


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # A number on a GPU would have to be waited for.
    return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
