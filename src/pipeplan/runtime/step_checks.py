"""What one rank checks by itself before a step."""

from typing import Any

import torch

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.loss_terms import LossTerms
from pipeplan.runtime.optimizer_trials import OptimizerTrials
from pipeplan.runtime.optimizers import require_no_mixing
from pipeplan.runtime.replica_setup import Replica
from pipeplan.splitting.torch_private import count_hooks, count_step_hooks, watch_steps

__all__ = ["SameModel", "require_inputs", "require_no_autocast"]


def require_inputs(
    rank: int, replica: Replica | None, batch: Any, targets: Any, loss: LossTerms
) -> None:
    """Refuse None where the batch or the targets are needed."""
    for part in replica.parts if replica is not None else ():
        module = part.module
        if part.stage == 0 and batch is None:
            raise RuntimeMismatchError("batch: the first stage was given None; it needs the batch")
        if module.needs_inputs and batch is None:
            raise RuntimeMismatchError(
                f"batch: rank {rank} was given None, but its layers ({module.layers_text}) read the"
                " model's inputs; give every rank the batch"
            )
        if module.is_last and loss.weight_fn is not None and targets is None:
            raise RuntimeMismatchError(
                f"targets: rank {rank} was given None; the last stage weighs them"
            )


def require_no_autocast(device: torch.device) -> None:
    """Refuse a step inside of torch.autocast, which keeps casts of weights until it ends."""
    if torch.is_autocast_enabled(device.type):
        raise RuntimeMismatchError(
            "step: runs inside of torch.autocast, which would keep casts of weights beyond the"
            " optimizer's step; call it outside, and give amp_dtype to the Pipeline"
        )


class SameModel:
    """Refuses to train if the model is not what it was at the start, or nothing has gradients."""

    def __init__(
        self,
        replica: Replica | None,
        optimizer: torch.optim.Optimizer,
        trials: OptimizerTrials | None = None,
    ) -> None:
        self._optimizer, self._num_updated = optimizer, _count_parameters(optimizer)
        self._num_steppers, self._trials = count_step_hooks(optimizer), trials
        self._modules = [part.module for part in replica.parts] if replica is not None else []
        self._named = dict(self._modules[0].model.named_parameters()) if self._modules else {}
        self._frozen = {name: p for name, p in self._named.items() if not p.requires_grad}
        self._num_hooks = self._count_hooks()
        self._num_steps = self._num_own_steps = 0
        """How often the optimizer has stepped, and how often in the pipeline's steps."""
        watch_steps(optimizer, self._count_step)

    def _count_step(self, *_: Any) -> None:
        self._num_steps += 1

    def end_step(self) -> None:
        """The pipeline's step is over: from now on nobody steps the optimizer."""
        self._num_own_steps = self._num_steps

    def require(self, number: int = 0) -> None:
        """Refuse what has changed; `number` batches came before.

        Raises:
            RuntimeMismatchError: it would be trained otherwise than its user thinks.
        """
        if torch.is_inference_mode_enabled():
            raise RuntimeMismatchError(
                "step: runs under torch.inference_mode, where nothing is trained; call it outside"
            )
        if self._num_steps != self._num_own_steps:
            raise RuntimeMismatchError(
                "optimizer: its step was called outside of the pipeline, whose step does that"
                " already, so the same gradients would count twice; leave out the call"
            )
        if _count_parameters(self._optimizer) != self._num_updated:
            raise RuntimeMismatchError(
                "optimizer: has got other parameters since the pipeline was made, which nobody sums"
                " over replicas or clears; make them part of the model or of a loss module"
            )
        if count_step_hooks(self._optimizer) > self._num_steppers:
            raise RuntimeMismatchError(
                "optimizer: got a hook in front of its step after the pipeline was made; it sees"
                " the gradients of this rank alone: register it in optimizer_fn, where it is"
                " checked, or clip by clip_norm"
            )
        if number and number & (number - 1) == 0:
            require_no_mixing(self._trials, self._optimizer)
        for module in self._modules:
            module.require_same_layers()
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise RuntimeMismatchError(
                    f"parameter {name}: was frozen when the pipeline was made, so no optimizer and"
                    " no replica knows of it; make a new Pipeline to train it"
                )
        num_hooks = self._count_hooks()
        if num_hooks != self._num_hooks:
            pairs = zip(self._named, num_hooks, self._num_hooks, strict=True)
            name = next(name for name, now, then in pairs if now != then)
            raise RuntimeMismatchError(
                f"parameter {name}: got a hook after the pipeline was made; a hook sees the"
                " gradient of one microbatch on one replica: register it on the model before, where"
                " it is checked, or change gradients in the optimizer"
            )

    def _count_hooks(self) -> list[int]:
        return list(map(count_hooks, self._named.values()))


def _count_parameters(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
