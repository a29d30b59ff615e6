"""What the comparison of a stage knows: its samples, its calls, and what a run of them gave."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipeplan.pipeline import Kind
from pipeplan.runtime.code_state import CodeState, KeptState
from pipeplan.runtime.code_variables import Variable, find_kept
from pipeplan.runtime.execution import StageRunner
from pipeplan.runtime.fingerprints import fingerprint
from pipeplan.runtime.loss_terms import LossTerms
from pipeplan.runtime.module_state import ModuleState
from pipeplan.runtime.verification.digests import Numbers
from pipeplan.runtime.verification.layer_records import LayerCall, Noted
from pipeplan.runtime.verification.same_randomness import Draw
from pipeplan.splitting.nesting import map_tensors
from pipeplan.splitting.stage_modules import StageModule
from pipeplan.splitting.stand_ins import StandIn

__all__ = ["Result", "Sample", "StageCalls", "fingerprint_whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One microbatch of a few rows."""

    call: tuple[tuple[Any, ...], dict[str, Any]]
    targets: Any
    num_rows: int
    order: tuple[int, ...] = ()
    """Which rows these are, by their places in the rows of all samples, if they are others."""

    def copied(self) -> "Sample":
        """The same rows in memory of their own: models may change their inputs."""
        call, targets = map_tensors([self.call, self.targets], lambda tensor: tensor.clone())
        return Sample(call=tuple(call), targets=targets, num_rows=self.num_rows)


@dataclass(slots=True, kw_only=True)
class Result:
    """What a run of some microbatches gave."""

    losses: list[torch.Tensor] = field(default_factory=list)
    calls: list[dict[int, LayerCall]] = field(default_factory=list)
    """By microbatch and atom."""
    entering: list[Noted | None] = field(default_factory=list)
    """What enters the stage, by microbatch; None for the first stage."""
    leaving: list[Noted | None] = field(default_factory=list)
    """What leaves the stage, by microbatch; None for the last stage."""
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """Of the parameters that the stage holds."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Buffers of the stage afterwards."""
    attributes: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """Tensors that the stage's parameters have as attributes afterwards: (parameter, attribute)."""
    draws: list[Draw] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    uses_own_generator: bool = False
    remembers: list[str] = field(default_factory=list)
    """Buffers and numbers that have changed."""
    keeps_state: bool = False
    """Whether globals, or objects that layers hold, have changed."""
    numbers: Numbers = field(default_factory=dict)
    """Of the whole model in training: its output, losses and all gradients."""
    leaves_before: dict[str, Any] = field(default_factory=dict)
    leaves: dict[str, Any] = field(default_factory=dict)
    """What variables of the stage's code hold afterwards, by path."""
    has_gradient: bool = False
    """Whether the loss depends on a parameter that is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCalls:
    """What both runs need to know of a stage."""

    module: StageModule
    runner: StageRunner
    loss: LossTerms
    parameters: dict[str, nn.Parameter]
    device: torch.device
    amp_dtype: torch.dtype | None
    decayed: frozenset[str] = frozenset()
    """Parameters that the optimizer shrinks by weight decay, even if their gradient is zero."""
    kinds: frozenset[Kind] = frozenset({Kind.FORWARD, Kind.BACKWARD})
    """The kinds of the stage's blocks."""
    first_name_of: Mapping[str, str] = field(default_factory=dict)
    """The first name that the whole model has for each parameter."""
    own_stages: frozenset[int] = frozenset()
    """All stages of the rank, if it has several."""

    @property
    def device_kind(self) -> str:
        """Results of equal kinds agree nearly to the last bit."""
        is_cuda = self.device.type == "cuda"
        return torch.cuda.get_device_name(self.device) if is_cuda else self.device.type

    def splits(self, index: int) -> bool:
        """Whether the backward of a sample runs in two halves; where the plan has both, in turn."""
        both = {Kind.BACKWARD, Kind.INPUT_GRADIENT} <= self.kinds
        return Kind.INPUT_GRADIENT in self.kinds and not (both and index % 2)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """As the runtime autocasts."""
        if self.amp_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.amp_dtype)

    def modules(self) -> list[nn.Module]:
        """The modules of the model as it is now, and those of the loss."""
        found = list(self.module.model.modules())
        if isinstance(self.loss.loss_fn, nn.Module):
            known = set(map(id, found))
            found += [m for m in self.loss.loss_fn.modules() if id(m) not in known]
        return found

    def variables(self) -> tuple[Variable, ...]:
        """Those that the code reads which this stage runs."""
        modules = [m for m in self.module.own_modules() if not isinstance(m, StandIn)]
        return find_kept(modules, [self.loss.loss_fn] if self.module.is_last else [])

    def state(self) -> KeptState:
        """What the model and the loss remember now, in their modules and in their code."""
        modules = self.modules()
        return KeptState(ModuleState(modules), CodeState.of(modules, [self.loss.loss_fn]))

    def shares(self, samples: Sequence[Sample]) -> list[float]:
        """By how much the loss of each microbatch counts."""
        weights = [self.loss.weight(sample.targets, sample.num_rows) for sample in samples]
        total = sum(weights)
        return [weight / total if total else 0.0 for weight in weights]


def fingerprint_whole(stage: StageCalls) -> int:
    """Of the values of the whole model and the loss."""
    with stage.module.whole() as model:
        found = [model.state_dict()]
        if isinstance(stage.loss.loss_fn, nn.Module):
            found.append(stage.loss.loss_fn.state_dict())
        tensors = [t for each in found for t in each.values() if isinstance(t, torch.Tensor)]
        return fingerprint(tuple(tensors), 0)
