"""All ranks of a pipeline are made with the same plan and the same settings.

A rank that clips alone, or plans for itself, would train another model than the others. So texts of
these settings are compared when the pipeline is made. Later the options of the optimizer's groups
are compared in every step: a scheduler that steps on one rank only gives its stage a rate of its
own.
"""

import zlib
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.documents.text import excerpt, printable
from pipeplan.errors import RuntimeMismatchError
from pipeplan.pipeline import KINDS, Plan
from pipeplan.runtime.function_watch import text_of_function
from pipeplan.runtime.model_checks import require_whole
from pipeplan.runtime.replica_setup import ReplicaSettings

__all__ = ["gather_if_unlike", "hash_options", "require_same_settings"]


def require_same_settings(
    plan: Plan,
    model: nn.Module,
    settings: ReplicaSettings,
    more: Mapping[str, Any],
    functions: Mapping[str, Any],
) -> None:
    """Refuse settings and parameters that differ between ranks; all ranks have to call it.

    Functions are only compared in whether they are given.

    Raises:
        RuntimeMismatchError: on every rank, it names the setting or the parameter.
    """
    own = {
        "plan": _hash_plan(plan),
        "metrics": list(settings.loss.metrics),
        "amp_dtype": settings.amp_dtype,
        "bucket_bytes": settings.bucket_bytes,
        "verify": "first-step" if settings.verifies else "off",
        "loss_fn": text_of_function(settings.loss.loss_fn),
        **{f"metrics[{name!r}]": text_of_function(f) for name, f in settings.loss.metrics.items()},
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
    _require_same_parameters(model, settings.loss.loss_fn)


def _require_same_parameters(model: nn.Module, loss_fn: Any) -> None:
    """Refuse parameters that have other shapes or are frozen on some ranks only.

    Ranks would make other groups for them, and wait for each other for ever. All ranks have to call
    it.

    Raises:
        RuntimeMismatchError: on every rank, it names the parameter.
    """
    require_whole(model)
    named = list(model.named_parameters())
    if isinstance(loss_fn, nn.Module):
        named += loss_fn.named_parameters("loss_fn")
    own = {
        name: f"{tuple(p.shape)} {p.dtype} {'trained' if p.requires_grad else 'frozen'}"
        for name, p in named
    }
    everyone = gather_if_unlike(own)
    for rank, other in enumerate(everyone):
        for name in dict.fromkeys((*everyone[0], *other)):
            mine, theirs = everyone[0].get(name, "not there"), other.get(name, "not there")
            if mine != theirs:
                raise RuntimeMismatchError(
                    f"parameter {printable(name)!r}: is {theirs} on rank {rank}, but {mine} on rank"
                    " 0; build the model alike on every rank"
                )


def gather_if_unlike(own: Any) -> list[Any]:
    """What each rank has, where ranks differ; empty where they agree, for a few bytes each."""
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, zlib.crc32(repr(own).encode(errors="replace")))
    if len(set(digests)) == 1:
        return []
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


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
