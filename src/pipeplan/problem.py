"""What every planner gets, and what it gives back."""

from collections.abc import Callable
from dataclasses import dataclass

from pipeplan.cluster import Cluster
from pipeplan.cost import CostModel
from pipeplan.pipeline import Stage
from pipeplan.profile import ModelProfile
from pipeplan.simulator import Codes

__all__ = ["Draft", "Planner", "Problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A model to train on a cluster, with a number of microbatches an iteration."""

    cost: CostModel
    num_microbatches: int
    seed: int = 0

    @property
    def model(self) -> ModelProfile:
        """The model to plan for."""
        return self.cost.model

    @property
    def cluster(self) -> Cluster:
        """The cluster to plan for."""
        return self.cost.cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Where the model is cut, on which devices it runs, and in which order."""

    stages: tuple[Stage, ...]
    codes: Codes
    """The schedule, [stages, 2 * microbatches], as in `Schedule.to_codes`."""
    iteration_ms: float
    schedule_guarantee_ms: float | None = None
    """Set where the schedule is PE's."""


Planner = Callable[[Problem], Draft]
