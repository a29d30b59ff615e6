"""What one rank checks by itself before a step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.loss_terms import LossTerms
from pipeplan.runtime.replica_setup import Replica

__all__ = ["require_inputs", "require_same_model"]


def require_inputs(
    rank: int, stage: int, replica: Replica | None, batch: Any, targets: Any, loss: LossTerms
) -> None:
    """Refuse None where the batch or the targets are needed."""
    if replica is None:
        return
    module = replica.module
    if stage == 0 and batch is None:
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


def require_same_model(frozen: Mapping[str, nn.Parameter], replica: Replica | None) -> None:
    """Refuse to train if the model is not what it was at the start, or nothing has gradients."""
    if torch.is_inference_mode_enabled():
        raise RuntimeMismatchError(
            "step: runs under torch.inference_mode, where nothing is trained; call it outside"
        )
    if replica is not None:
        replica.module.require_same_layers()
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            raise RuntimeMismatchError(
                f"parameter {name}: was frozen when the pipeline was made, so no optimizer and no"
                " replica knows of it; make a new Pipeline to train it"
            )
