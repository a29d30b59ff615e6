"""Makes each rank's optimizer, with the same groups of parameters on all ranks.

Groups are decided by name on the whole model. So each rank has all groups, in the same order; some
hold no parameter on this rank. A learning-rate scheduler then computes the same on every rank.
"""

import copy
import inspect
import json
import warnings
from collections import defaultdict
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

__all__ = [
    "OptimizerFn",
    "ParamGroupsFn",
    "ParameterGroups",
    "make_optimizer",
    "plan_groups",
    "require_separate_updates",
]

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


def require_separate_updates(optimizer: torch.optim.Optimizer, *, num_stages: int) -> None:
    """Refuse an optimizer that stages cannot have each for itself.

    It must not need a closure, and it has to update each parameter by itself. A norm over all of
    its parameters would be another one on each stage. Two small parameters tell: they step
    together, and then each alone.
    """
    required = [
        name
        for name, argument in inspect.signature(optimizer.step).parameters.items()
        if argument.default is argument.empty
        and argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
    ]
    kind = type(optimizer).__name__
    if required:
        raise RuntimeMismatchError(
            f"optimizer_fn: {kind}.step needs {required[0]!r}, which computes the loss anew; a"
            " pipeline runs each step once: take an optimizer that steps without it"
        )
    if num_stages == 1 or not optimizer.param_groups:
        return
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            together, again = (_try_steps(optimizer, (0, 1), seed) for seed in (0, 1))
            alone = [_try_steps(optimizer, (index,), 0)[0] for index in (0, 1)]
        except Exception:
            return  # it does not work with such parameters, so nothing can be said
    is_random = not all(map(torch.equal, together, again))
    if not is_random and not all(map(torch.allclose, together, alone)):
        raise RuntimeMismatchError(
            f"optimizer_fn: {kind} updates a parameter by what other parameters have, such as a"
            " norm over all of them, but each stage has only its own; clip by clip_norm, or take an"
            " optimizer that updates each parameter by itself"
        )


def _try_steps(
    optimizer: torch.optim.Optimizer, which: tuple[int, ...], seed: int
) -> list[torch.Tensor]:
    """Two small parameters, or one of them, after steps of an optimizer with the same settings."""
    torch.manual_seed(seed)
    values = [torch.linspace(-1.0, 2.0, 6).view(2, 3), torch.linspace(3.0, 1.0, 4).view(2, 2)]
    parameters = [nn.Parameter(values[index].clone()) for index in which]
    real = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Wherever the optimizer keeps its parameters, the trial has the small ones.
    memo: dict[int, Any] = dict.fromkeys(map(id, real), parameters[0])
    own = {
        name: copy.deepcopy(value, memo)
        for name, value in vars(optimizer).items()
        if name not in ("param_groups", "state", "step") and not name.endswith("_hooks")
    }
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    trial = object.__new__(type(optimizer))
    trial.__setstate__(
        {
            **own,
            "param_groups": [{**copy.deepcopy(options, memo), "params": parameters}],
            "state": defaultdict(dict),
        }
    )
    for number in range(3):
        for parameter in parameters:
            parameter.grad = (parameter.detach() * (number + 1)).cos() * len(parameter.flatten())
        trial.step()
    return [parameter.detach() for parameter in parameters]
