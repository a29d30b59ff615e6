"""What can go wrong, as exceptions whose messages name the field, the value and the remedy.

::

    PipeplanError
    ├── InputError (also a ValueError)   the caller gave something that cannot be (exit code 2)
    │   ├── ProfileError                 ... in a model profile
    │   ├── ClusterError                 ... in a cluster
    │   ├── PlanFileError                ... in a plan
    │   └── ScheduleError                ... in a schedule: it deadlocks or is incomplete
    ├── InfeasibleError                  the inputs are fine, but no plan exists (exit code 3)
    │   └── NoPlanError                  ... because nothing fits; says what is needed
    ├── NonFiniteLossError               the loss is NaN or infinite, and that was to be raised
    └── RuntimeMismatchError             plan, model, batch and ranks do not fit (exit code 2)
        └── CheckpointError              ... a checkpoint is damaged, or of another model
    KeyboardInterrupt
    └── PlanningInterrupted              Ctrl-C; carries the best plan so far (exit code 130)
"""

from typing import Any

__all__ = [
    "CheckpointError",
    "ClusterError",
    "InfeasibleError",
    "InputError",
    "NoPlanError",
    "NonFiniteLossError",
    "PipeplanError",
    "PlanFileError",
    "PlanningInterrupted",
    "ProfileError",
    "RuntimeMismatchError",
    "ScheduleError",
]


class PipeplanError(Exception):
    """The root of everything that pipeplan raises on purpose."""

    exit_code = 2


class InputError(PipeplanError, ValueError):
    """The caller gave something that cannot be."""


class ProfileError(InputError):
    """A model profile that cannot be."""


class ClusterError(InputError):
    """A cluster that cannot be."""


class PlanFileError(InputError):
    """A plan that cannot be."""


class ScheduleError(InputError):
    """A schedule that never ends, or leaves work out."""


class InfeasibleError(PipeplanError):
    """The inputs are fine, but no plan exists for them."""

    exit_code = 3


class NoPlanError(InfeasibleError):
    """No plan keeps all limits.

    Where memory is short, the fields describe the plan that comes closest to fitting: the device
    that lacks the largest part of its need.
    """

    def __init__(
        self,
        message: str,
        *,
        stage: int | None = None,
        layers: tuple[int, int] | None = None,
        devices: tuple[str, ...] = (),
        need_gb: float | None = None,
        memory_gb: float | None = None,
    ) -> None:
        super().__init__(message)
        self.stage = stage
        self.layers = layers
        """The stage's first layer and one past its last."""
        self.devices = devices
        """The devices of that stage which need too much."""
        self.need_gb = need_gb
        """What one of these needs at most."""
        self.memory_gb = memory_gb
        """What that device has."""


class RuntimeMismatchError(PipeplanError):
    """The plan does not fit the model, the batch or the ranks that are to run it."""


class CheckpointError(RuntimeMismatchError):
    """A checkpoint or a file of weights is damaged, of another model, or cannot be written."""


class NonFiniteLossError(PipeplanError):
    """The loss of a step is NaN or infinite."""


class PlanningInterrupted(KeyboardInterrupt):
    """Ctrl-C while planning; `plan` is the best one so far, marked as interrupted."""

    def __init__(self, plan: Any) -> None:
        super().__init__("interrupted")
        self.plan = plan
