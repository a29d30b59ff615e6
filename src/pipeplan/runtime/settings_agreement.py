"""All ranks of a pipeline are made with the same plan and the same settings.

A rank that clips alone, or plans for itself, would train another model than the others. So texts of
these settings are compared when the pipeline is made, and so are the model's values: each stage is
trained from those of its own rank, so a model that was loaded on one rank only would be a mixture.
A checkpoint may still replace them, so they are refused in the first step.
What the optimizer does with each parameter is compared, too. Later the options of its groups are
compared in every step: a scheduler that steps on one rank only gives its stage a rate of its own.
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
from pipeplan.runtime.fingerprints import fingerprint
from pipeplan.runtime.function_watch import text_of_function
from pipeplan.runtime.model_checks import require_whole
from pipeplan.runtime.optimizers import Options
from pipeplan.runtime.replica_setup import ReplicaSettings
from pipeplan.runtime.verification.digests import are_alike, digest

__all__ = [
    "OptionWatch",
    "find_other_values",
    "gather_if_unlike",
    "require_same_options",
    "require_same_settings",
]

ROUNDING = 1e-5
"""What values that were computed alike may differ by on other hardware."""


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


def find_other_values(model: nn.Module, loss_fn: Any) -> str | None:
    """Why the model must not be trained as it is: its parameters have other values on some ranks.

    The line is the same on all ranks, and all have to call it. Buffers may be memory that nobody
    has filled yet.
    """
    tensors = {name: each.detach() for name, each in model.named_parameters()}
    if isinstance(loss_fn, nn.Module):
        tensors |= {name: each.detach() for name, each in loss_fn.named_parameters("loss_fn")}
    marks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(marks, fingerprint(tuple(tensors.values()), 0))
    if len(set(marks)) == 1:
        return None
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: digest(each) for name, each in tensors.items()})
    for rank, other in enumerate(everyone):
        for name, numbers in everyone[0].items():
            if not are_alike((numbers, other.get(name)), ROUNDING):
                return (
                    f"model: its {printable(name)!r} has other values on rank {rank} than on rank"
                    " 0, and each rank trains its own layers; call torch.manual_seed with the same"
                    " number on all ranks before you build the model, and load the same file on all"
                    ' of them (verify="off" leaves this comparison out)'
                )
    return None


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


def require_same_options(options: Options | None) -> None:
    """Refuse an optimizer_fn that treats a parameter otherwise on some ranks.

    `options` are those of all parameters of the whole model, None if they are not known. All ranks
    have to call it.

    Raises:
        RuntimeMismatchError: on every rank, it names the parameter.
    """
    own = {
        name: {key: repr(_plain(value)) for key, value in (found or {}).items()}
        for name, found in (options or {}).items()
    }
    everyone = gather_if_unlike(own)
    for rank, other in enumerate(everyone):
        for name in [each for each in everyone[0] if each in other]:  # a rank may know nothing
            mine, theirs = everyone[0][name], other[name]
            for key in dict.fromkeys((*mine, *theirs)):
                pair = [printable(each.get(key, "nothing"))[:60] for each in (theirs, mine)]
                if pair[0] != pair[1]:
                    raise RuntimeMismatchError(
                        f"optimizer_fn: for parameter {printable(name)!r}, {key} is {pair[0]} on"
                        f" rank {rank}, but {pair[1]} on rank 0; make the same optimizer on every"
                        " rank"
                    )


class OptionWatch:
    """Tells whether the optimizers of all ranks have the same options in each step.

    An optimizer_fn may make other groups for the parameters of another stage. Then groups that all
    ranks had at the start are compared, by what they were then.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """All ranks have to make one.

        Raises:
            RuntimeMismatchError: the ranks have optimizers of different classes.
        """
        self._optimizer = optimizer
        texts = [_text_of(group) for group in optimizer.param_groups]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (type(optimizer).__name__, texts))
        first = everyone[0][0]
        for rank, (kind, _) in enumerate(everyone):
            if kind != first:
                raise RuntimeMismatchError(
                    f"optimizer_fn: returns {printable(kind)} on rank {rank}, but"
                    f" {printable(first)} on rank 0; make the same optimizer on every rank"
                )
        self._common: list[tuple[int, str]] | None = None
        """Groups that all ranks have, and what they were; None if all have the same groups."""
        if any(each != texts for _, each in everyone):
            shared = set.intersection(*(set(each) for _, each in everyone))
            self._common = [(i, text) for i, text in enumerate(texts) if text in shared]

    def look(self) -> int:
        """A number that is equal on all ranks as long as their options are."""
        groups = self._optimizer.param_groups
        found: list[Any] = list(map(_text_of, groups))
        if self._common is not None:
            found = sorted({(text, found[index]) for index, text in self._common})
        return zlib.crc32(repr(found).encode(errors="replace"))


NO_OPTIONS = ("params", "initial_lr", "param_names")


def _text_of(options: Mapping[str, Any]) -> str:
    """A text that is equal for equal options of a group."""
    return repr([(name, _plain(o)) for name, o in options.items() if name not in NO_OPTIONS])


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        # An object's address says nothing.
        return value if isinstance(value, PLAIN) or " at 0x" not in repr(value) else type(value)
    # A number on a GPU would have to be waited for.
    return value.item() if value.device.type == "cpu" and value.numel() == 1 else None


PLAIN = (type(None), bool, int, float, str)
