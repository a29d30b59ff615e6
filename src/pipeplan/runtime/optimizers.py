"""Makes each rank's optimizer, with the same groups of parameters on all ranks.

Groups are decided by name on the whole model. So each rank has all groups, in the same order; some
hold no parameter on this rank. A learning-rate scheduler then computes the same on every rank.
"""

import inspect
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeplan.documents.text import excerpt
from pipeplan.errors import CheckpointError, RuntimeMismatchError
from pipeplan.runtime.checkpoints.plain_data import encode
from pipeplan.runtime.optimizer_trials import OptimizerTrials
from pipeplan.runtime.parameters import (
    all_parameters,
    find_loss_module,
    first_names,
    require_own_parameters,
)

__all__ = [
    "OptimizerFn",
    "Options",
    "ParamGroupsFn",
    "ParameterGroups",
    "find_options",
    "make_optimizer",
    "make_separate_optimizer",
    "make_trials",
    "plan_groups",
    "require_no_mixing",
]

OptimizerFn = Callable[[Any], torch.optim.Optimizer]
"""From parameters, or from groups of them, to an optimizer."""
ParamGroupsFn = Callable[[str, nn.Parameter], Mapping[str, Any]]
"""From a parameter and its name to the options of its group, such as {"weight_decay": 0.0}."""
Options = dict[str, dict[str, Any] | None]
"""By the name of a parameter, the options of its group."""


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
    if isinstance(optimizer_fn, torch.optim.Optimizer):
        kind = type(optimizer_fn).__name__
        raise RuntimeMismatchError(
            "optimizer_fn: is an optimizer already; give what makes one of the parameters that it"
            f" gets, such as lambda parameters: {kind}(parameters, lr=1e-3)"
        )
    optimizer = optimizer_fn(params)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RuntimeMismatchError(
            f"optimizer_fn: returned a {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )
    return optimizer


def make_separate_optimizer(
    optimizer_fn: OptimizerFn,
    parameters: Mapping[str, nn.Parameter],
    groups: ParameterGroups | None,
    expected: Options | None,
    trials: OptimizerTrials | None,
) -> torch.optim.Optimizer:
    """The same, if stages can have such an optimizer each for itself.

    `expected` is what `find_options` gave for the whole model. There are no `trials` where all
    ranks update the same parameters.

    Raises:
        RuntimeMismatchError: it needs a closure, or treats a parameter by what other parameters
            there are. A stage has only its own.
    """
    # Made last: a function that keeps its optimizer in a variable keeps this one.
    optimizer = make_optimizer(optimizer_fn, parameters, groups)
    kind = type(optimizer).__name__
    required = [
        name
        for name, argument in inspect.signature(optimizer.step).parameters.items()
        if argument.default is argument.empty
        and argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
    ]
    if required:
        raise RuntimeMismatchError(
            f"optimizer_fn: {kind}.step needs {required[0]!r}, which computes the loss anew; a"
            " pipeline runs each step once: take an optimizer that steps without it"
        )
    if expected is not None:
        _require_options(_options_of(optimizer, parameters), expected)
    require_no_mixing(trials, optimizer)
    return optimizer


def make_trials(optimizer_fn: OptimizerFn, groups: ParameterGroups | None) -> OptimizerTrials:
    """Small optimizers of this kind; make them before the real one."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        given: list[Any] = list(parameters)
        if groups is not None:
            empty: list[dict[str, Any]] = [{**each, "params": []} for each in groups.options]
            given = [{**empty[0], "params": parameters}, *empty[1:]]
        optimizer = _made(optimizer_fn, given)
        require_own_parameters(optimizer, parameters)
        return optimizer

    return OptimizerTrials(make)


def require_no_mixing(trials: OptimizerTrials | None, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that, as it is now, updates parameters by what others have."""
    if trials is not None and trials.find_mixing(optimizer):
        raise RuntimeMismatchError(
            f"optimizer_fn: {type(optimizer).__name__} updates a parameter by what other parameters"
            " have, such as a norm over all of them or their number, but each stage has only its"
            " own; clip by clip_norm, or take an optimizer that updates each parameter by itself"
        )


def find_options(
    model: nn.Module, loss_fn: Any, optimizer_fn: OptimizerFn, groups: ParameterGroups | None
) -> Options | None:
    """What the optimizer of the whole model does with each parameter, by its first name.

    None if it cannot be made.
    """
    loss_module = find_loss_module(model, loss_fn)
    first = first_names(model, loss_module)
    named = {
        name: parameter
        for name, parameter in all_parameters(model, loss_module)
        if first[name] == name and parameter.requires_grad
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _options_of(make_optimizer(optimizer_fn, named, groups), named)
    except Exception:
        return None  # if it is wrong, so is that of the stage


def _options_of(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> Options:
    """The options of each parameter's group; None for one that the optimizer leaves out."""
    found: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        found |= {id(parameter): options for parameter in group["params"]}
    return {name: found.get(id(parameter)) for name, parameter in parameters.items()}


def _require_options(found: Options, expected: Options) -> None:
    """Refuse a function that decides by the position of parameters, or by their number."""
    for name, options in found.items():
        text = _tell_difference(options, expected.get(name))
        if text is not None:
            raise RuntimeMismatchError(
                f"optimizer_fn: treats parameter {excerpt(name)} otherwise than if it gets all"
                f" parameters of the model: {text}; it gets this rank's parameters alone, so it"
                " must not decide by their position or number: use param_groups_fn, which decides"
                " by name"
            )


def _tell_difference(here: dict[str, Any] | None, there: dict[str, Any] | None) -> str | None:
    if here is None or there is None:
        if here is there:
            return None
        return f"leaves it out {'on this rank' if here is None else 'there'} only"
    for key, value in here.items():
        if repr(value) != repr(there.get(key)):
            return f"gives it {key}={value!r} on this rank and {there.get(key)!r} there"
    return None
