"""Makes each rank's optimizer, with the same groups of parameters on all ranks.

Groups are decided by name on the whole model. So each rank has all groups, in the same order; some
hold no parameter on this rank. A learning-rate scheduler then computes the same on every rank.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeplan.documents.text import excerpt
from pipeplan.errors import CheckpointError, RuntimeMismatchError
from pipeplan.runtime.checkpoints.plain_data import encode
from pipeplan.runtime.parameters import (
    all_parameters,
    find_loss_module,
    first_names,
    require_own_parameters,
)

__all__ = ["OptimizerFn", "ParamGroupsFn", "ParameterGroups", "make_optimizer", "plan_groups"]

OptimizerFn = Callable[[Any], torch.optim.Optimizer]
"""From parameters, or from groups of them, to an optimizer."""
ParamGroupsFn = Callable[[str, nn.Parameter], Mapping[str, Any]]
"""From a parameter and its name to the options of its group, such as {"weight_decay": 0.0}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroups:
    """The groups of the whole model's parameters."""

    options: tuple[dict[str, Any], ...]
    """The options of each group."""
    group_of: Mapping[str, int]
    """The group of each parameter, by its first name."""


def plan_groups(
    model: nn.Module, loss_fn: Any, groups_fn: ParamGroupsFn | None
) -> ParameterGroups | None:
    """Put parameters with equal options into one group; groups are in the order of parameters.

    The loss function's own parameters, if it is a module, come last. None without `groups_fn`.
    """
    if groups_fn is None:
        return None
    options: dict[str, dict[str, Any]] = {}
    group_of: dict[str, int] = {}
    first_name_of = first_names(model, find_loss_module(model, loss_fn))
    for name, parameter in all_parameters(model, find_loss_module(model, loss_fn)):
        if parameter.requires_grad and first_name_of[name] == name:
            found = _options(groups_fn(name, parameter), name)
            key = _key(found, name)
            options.setdefault(key, found)
            group_of[name] = list(options).index(key)
    return ParameterGroups(options=tuple(options.values()), group_of=group_of)


def _options(found: Any, name: str) -> dict[str, Any]:
    if not isinstance(found, Mapping) or "params" in found:
        raise RuntimeMismatchError(
            f"param_groups_fn: gave {excerpt(found)} for {excerpt(name)}; it has to give the"
            " options of the parameter's group, such as {'weight_decay': 0.0}"
        )
    return dict(found)


def _key(options: Mapping[str, Any], name: str) -> str:
    """A text that equal options share."""

    def refuse(where: str, _: torch.Tensor) -> str:
        raise CheckpointError(f"{where}: is a tensor; give plain numbers")

    try:
        return json.dumps(encode(dict(sorted(options.items())), excerpt(name), refuse))
    except CheckpointError as problem:
        raise RuntimeMismatchError(f"param_groups_fn: {problem}") from None


def make_optimizer(
    optimizer_fn: OptimizerFn,
    parameters: Mapping[str, nn.Parameter],
    groups: ParameterGroups | None,
) -> torch.optim.Optimizer:
    """This rank's optimizer of `parameters`, which are by their first names.

    A rank without parameters gets an optimizer, too: of a parameter without elements.
    """
    if groups is None:
        params = list(parameters.values()) or [nn.Parameter(torch.empty(0, 0))]
        optimizer = _made(optimizer_fn, params)
        require_own_parameters(optimizer, params)
        return optimizer
    members: list[list[nn.Parameter]] = [[] for _ in groups.options]
    for name, parameter in parameters.items():
        members[groups.group_of[name]].append(parameter)
    optimizer = _made(
        optimizer_fn,
        [
            {**options, "params": params}
            for options, params in zip(groups.options, members, strict=True)
        ],
    )
    require_own_parameters(optimizer, list(parameters.values()))
    return optimizer


def _made(optimizer_fn: OptimizerFn, params: list[Any]) -> torch.optim.Optimizer:
    optimizer = optimizer_fn(params)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RuntimeMismatchError(
            f"optimizer_fn: returned a {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )
    return optimizer
