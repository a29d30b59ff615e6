"""Sets up one rank's replica: the layers, parameters and channels of its stages."""

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
from pipeplan.runtime.gradient_notes import MOST_RANKS, GradientNotes
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
    make_groups,
    materialise,
    require_initialised,
    share_initial_values,
)
from pipeplan.runtime.placement import Placement
from pipeplan.runtime.random_state import BlockSeeds
from pipeplan.runtime.stage_orders import last_weight_block, splits_backward
from pipeplan.splitting.held_model import HeldModel
from pipeplan.splitting.holding import holders
from pipeplan.splitting.layout import lay_out
from pipeplan.splitting.stage_modules import StageModule, cut_all

__all__ = ["NUM_SUMS", "Part", "Replica", "ReplicaSettings", "set_up_replica"]

NUM_SUMS = 6
"""At most so many numbers are summed over all ranks in a step, besides metrics."""


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
class Part:
    """What a rank needs to run one of its stages."""

    stage: int
    replica: int
    """Which of the stage's replicas this rank is."""
    module: StageModule
    runner: StageRunner
    exchange: Exchange
    named: dict[str, nn.Parameter]
    """The parameters of the stage that are trained, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What a rank needs to run its stages."""

    parts: tuple[Part, ...]
    """Its stages, rising; mostly it has one."""
    held: HeldModel
    """The modules of all its stages."""
    reducer: GradientReducer
    notes: GradientNotes | None
    """What rides behind the gradients; None where these do not reach all ranks."""
    named: dict[str, nn.Parameter]
    """The parameters that are trained, by name."""
    held_by: dict[str, set[int]]
    """For every parameter of the model, the stages that hold it."""
    parameters: list[nn.Parameter]
    norm_parameters: list[nn.Parameter]
    """Parameters that this rank adds to the norm of gradients; over all ranks, each counts once."""
    group: Any
    """The replicas of the stages; None if there is only one."""
    ranks: tuple[int, ...]
    """The same, as ranks. The first one's values count."""

    @property
    def needs_inputs(self) -> bool:
        """Whether a stage of it reads the model's inputs."""
        return any(part.module.needs_inputs for part in self.parts)


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
    if plan.microbatches > 1 or any(stage.num_replicas > 1 for stage in plan.stages):
        require_linear_hooks(model)
    layout = lay_out(
        model, _layer_names(plan, settings.layers), [stage.layers.start for stage in plan.stages]
    )
    require_initialised(model)
    stages = [stage.layers for stage in plan.stages]
    require_separate_memory(model, layout, stages)
    held_by = holders(model, layout, stages)
    loss_module = find_loss_module(model, settings.loss.loss_fn)
    add_loss_holders(held_by, model, loss_module, plan.num_stages - 1)
    groups = make_groups(held_by, placement.ranks)
    places = placement.places(dist.get_rank())
    if not places:
        return None
    first, replica = places[0]
    modules = cut_all(
        model,
        layout,
        [plan.stages[stage].layers for stage, _ in places],
        keep_whole=settings.verifies and not replica,
    )
    if loss_module is not None and modules[-1].is_last:
        modules[-1].attach(LOSS_NAME, loss_module)
    held = modules[0].held
    materialise(model, transport.device, settings.init_fn)
    held.place_stand_ins(transport.device)
    named = _trained(model)
    own_stages = {stage for stage, _ in places}
    reductions = find_reductions(named, held_by, first_name_of, groups, own_stages, *_sums(plan))
    group, ranks = groups[frozenset({first})], placement.ranks[first]
    share_initial_values(model, group, ranks, reductions)
    # In the norm, the first replica of the first stage that holds a parameter counts it.
    notes = _make_notes(placement, len(settings.loss.metrics))
    counted = [p for name, p in named.items() if not replica and min(held_by[name]) in own_stages]
    return Replica(
        parts=tuple(
            _make_part(plan, module, place, transport, settings)
            for module, place in zip(modules, places, strict=True)
        ),
        held=held,
        reducer=GradientReducer(named, reductions, settings.bucket_bytes, notes),
        notes=notes if notes is not None and notes.can_ride else None,
        named=named,
        held_by=held_by,
        parameters=list(named.values()),
        norm_parameters=counted,
        group=group,
        ranks=ranks,
    )


def _make_notes(placement: Placement, num_metrics: int) -> GradientNotes | None:
    """Numbers behind the gradients, if all ranks are replicas of all stages."""
    num_ranks = dist.get_world_size()
    are_all = all(len(ranks) == num_ranks for ranks in placement.ranks)
    if not are_all or not 1 < num_ranks <= MOST_RANKS:
        return None
    return GradientNotes(dist.get_rank(), num_ranks, NUM_SUMS + num_metrics)


def _sums(plan: Plan) -> tuple[list[int], list[int]]:
    """For each stage, with which block its gradients are done, and in how many parts they go."""
    ends = [last_weight_block(plan, stage) for stage in range(plan.num_stages)]
    return ends, [stage.gradient_buckets for stage in plan.stages]


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


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


def _make_part(
    plan: Plan,
    module: StageModule,
    place: tuple[int, int],
    transport: Transport,
    settings: ReplicaSettings,
) -> Part:
    stage, replica = place
    runner = StageRunner(
        module,
        transport.device,
        seeds=BlockSeeds(seed=settings.seed, stage=stage, replica=replica),
        recompute=plan.stages[stage].recompute,
        amp_dtype=settings.amp_dtype,
        loss=settings.loss if stage == plan.num_stages - 1 else None,
        splits=splits_backward(plan, stage),
    )
    parameter_bytes = sum(parameter.nbytes for parameter in module.model.parameters())
    with module.alone():
        named = _trained(module.model)
    return Part(
        stage=stage,
        replica=replica,
        module=module,
        runner=runner,
        exchange=Exchange(plan, place, transport, settings.receive_ahead, parameter_bytes),
        named=named,
    )
