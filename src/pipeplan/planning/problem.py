"""What every planner gets, and what it gives back."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipeplan.cluster import Cluster
from pipeplan.cost import CostModel
from pipeplan.pipeline import Bound, Stage
from pipeplan.profile import ModelProfile
from pipeplan.simulator import Codes

__all__ = ["Draft", "Planner", "Problem", "SearchInterrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A model to train on a cluster, with a number of microbatches an iteration."""

    cost: CostModel
    num_microbatches: int
    runnable: bool = False
    """Whether a stage may have no more replicas than a microbatch has samples."""
    seed: int = 0
    effort: float = 1.0
    """How much more, or less, search than usual; planners without a search ignore it."""
    time_limit_s: float | None = None
    deadline: float = math.inf
    """When to stop searching, on the clock of `time.monotonic`."""
    num_threads: int = 1
    """Never changes the result."""
    report: Callable[[str], None] = lambda _: None
    """Told about progress, a short line each."""

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
    bound: Bound | None = None
    """Set by planners that prove how far from the optimum they can be."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What the planner wants to be recorded among the plan's options."""


Planner = Callable[[Problem], Draft]


class SearchInterrupted(KeyboardInterrupt):
    """Ctrl-C during a search that has a plan already: `draft`, marked as interrupted."""

    def __init__(self, draft: Draft) -> None:
        super().__init__("interrupted")
        self.draft = draft
