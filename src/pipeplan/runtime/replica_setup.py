"""Sets up one rank's replica: its layers, parameters and channels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.errors import RuntimeMismatchError
from pipeplan.pipeline import Plan
from pipeplan.runtime.exchange.neighbours import Exchange
from pipeplan.runtime.exchange.transports import Transport
from pipeplan.runtime.execution import StageRunner
from pipeplan.runtime.gradients import GradientReducer
from pipeplan.runtime.loss_terms import LossTerms
from pipeplan.runtime.model_checks import (
    require_dense_gradients,
    require_linear_hooks,
    require_separate_memory,
    require_whole,
)
from pipeplan.runtime.parameters import (
    LOSS_NAME,
    add_loss_holders,
    find_loss_module,
    find_reductions,
    make_tie_groups,
    materialise,
    require_initialised,
    share_initial_values,
)
from pipeplan.runtime.placement import Placement
from pipeplan.runtime.random_state import BlockSeeds
from pipeplan.splitting.holding import holders
from pipeplan.splitting.layout import lay_out
from pipeplan.splitting.stage_modules import StageModule, cut

__all__ = ["Replica", "ReplicaSettings", "set_up_replica"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """How the caller of `Pipeline` wants its replicas; `Pipeline` explains each."""

    layers: Sequence[str] | None
    init_fn: Callable[[nn.Module], None] | None
    loss: LossTerms
    amp_dtype: torch.dtype | None
    seed: int
    receive_ahead: int | None
    bucket_bytes: float
    verifies: bool
    """Whether stages are compared with the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What a rank needs to run its stage."""

    module: StageModule
    runner: StageRunner
    exchange: Exchange
    reducer: GradientReducer
    named: dict[str, nn.Parameter]
    """The parameters that are trained, by name."""
    held_by: dict[str, set[int]]
    """For every parameter of the model, the stages that hold it."""
    parameters: list[nn.Parameter]
    norm_parameters: list[nn.Parameter]
    """Parameters that this rank adds to the norm of gradients; over all ranks, each counts once."""
    group: Any
    """The replicas of the stage; None if there is only one."""
    ranks: tuple[int, ...]
    """The same, as ranks."""


def set_up_replica(
    plan: Plan,
    model: nn.Module,
    placement: Placement,
    transport: Transport,
    first_name_of: Mapping[str, str],
    settings: ReplicaSettings,
) -> Replica | None:
    """This rank's replica, cut out of the model; None if the plan does not use this rank.

    All ranks have to call it, since all of them make all groups.
    """
    require_whole(model)
    require_dense_gradients(model)
    if plan.microbatches > 1 or plan.num_stages < sum(s.num_replicas for s in plan.stages):
        require_linear_hooks(model)
    groups = [
        dist.new_group(sorted(ranks)) if len(ranks) > 1 else None for ranks in placement.ranks
    ]
    layout = lay_out(
        model, _layer_names(plan, settings.layers), [stage.layers.start for stage in plan.stages]
    )
    require_initialised(model)
    stages = [stage.layers for stage in plan.stages]
    require_separate_memory(model, layout, stages)
    held_by = holders(model, layout, stages)
    loss_module = find_loss_module(model, settings.loss.loss_fn)
    add_loss_holders(held_by, model, loss_module, plan.num_stages - 1)
    tie_groups = make_tie_groups(held_by, placement.ranks)
    place = placement.find(dist.get_rank())
    if place is None:
        return None
    stage, replica = place
    module = cut(
        model,
        layout,
        plan.stages[stage].layers,
        keep_whole=settings.verifies and not replica,
    )
    if loss_module is not None and module.is_last:
        module.attach(LOSS_NAME, loss_module)
    materialise(module.model, transport.device, settings.init_fn)
    named = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
    reductions = find_reductions(named, held_by, first_name_of, groups[stage], tie_groups)
    share_initial_values(module.model, groups[stage], placement.ranks[stage], reductions)
    parameters = list(named.values())
    # In the norm, the first replica of the first stage that holds a parameter counts it.
    counted = [p for name, p in named.items() if not replica and min(held_by[name]) == stage]
    return Replica(
        module=module,
        runner=_make_runner(plan, module, transport.device, place, settings),
        exchange=_make_exchange(plan, module, place, transport, settings),
        reducer=GradientReducer(parameters, reductions, settings.bucket_bytes),
        named=named,
        held_by=held_by,
        parameters=parameters,
        norm_parameters=counted,
        group=groups[stage],
        ranks=placement.ranks[stage],
    )


def _layer_names(plan: Plan, layers: Sequence[str] | None) -> Sequence[str]:
    """The module names of the plan's layers."""
    names = [layer.name for layer in plan.model.layers]
    if layers is None:
        return names
    if len(layers) != len(names):
        raise RuntimeMismatchError(
            f"layers: {len(layers)} names for the plan's {len(names)} layers; give one each"
        )
    return layers


def _make_runner(
    plan: Plan,
    module: StageModule,
    device: torch.device,
    place: tuple[int, int],
    settings: ReplicaSettings,
) -> StageRunner:
    stage, replica = place
    return StageRunner(
        module,
        device,
        seeds=BlockSeeds(seed=settings.seed, stage=stage, replica=replica),
        recompute=plan.stages[stage].recompute,
        amp_dtype=settings.amp_dtype,
        loss=settings.loss if stage == plan.num_stages - 1 else None,
    )


def _make_exchange(
    plan: Plan,
    module: StageModule,
    place: tuple[int, int],
    transport: Transport,
    settings: ReplicaSettings,
) -> Exchange:
    parameter_bytes = sum(parameter.nbytes for parameter in module.model.parameters())
    return Exchange(plan, place, transport, settings.receive_ahead, parameter_bytes)
