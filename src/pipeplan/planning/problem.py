"""The input and the output of every planner: `Problem` and `Draft`."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipeplan import _core
from pipeplan.cluster import Cluster
from pipeplan.cost import BYTES_IN_GB, CostModel
from pipeplan.pipeline import Bound, GroupCodes, Schedule, Stage
from pipeplan.planning.limits import Limits
from pipeplan.planning.options import PlanningOptions
from pipeplan.profile import ModelProfile
from pipeplan.simulator import Codes

__all__ = ["Draft", "LateStart", "Planner", "Problem", "SearchInterrupted", "check_deadline"]

NO_LIMIT = 2**31 - 1
PLAIN = PlanningOptions(positions=1, split_backward=False)
"""One stage a device and whole backwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A model to train on a cluster, and the number of microbatches in an iteration."""

    cost: CostModel
    num_microbatches: int
    limits: Limits = field(default_factory=Limits)
    """What the plan has to keep. Published planners plan by their own rules and ignore it."""
    options: PlanningOptions = field(default_factory=lambda: PLAIN)
    """What the user asked for, as plans record it."""
    seed: int = 0
    effort: float = 1.0
    """How much to search; 1 is the usual amount. Planners without a search ignore it."""
    needs_bound: bool = True
    """Whether the result's bound counts. If not, no time is spent on proofs that give no plans."""
    time_limit_s: float | None = None
    deadline: float = math.inf
    """When to stop searching, on the clock of `time.monotonic`."""
    num_threads: int = 1
    """More threads are faster, but never change the result."""
    report: Callable[[str], None] = lambda _: None
    """Called with a short line about progress."""

    @property
    def limits_memory(self) -> bool:
        """Whether memory counts and some device has a limit."""
        has_limits = any(device.memory_gb is not None for device in self.cluster.devices)
        return self.limits.memory and has_limits

    @property
    def memory_differs(self) -> bool:
        """Whether memory counts and some devices have less than others."""
        return self.limits_memory and len({d.memory_gb for d in self.cluster.devices}) > 1

    @property
    def any_shares(self) -> bool:
        """Whether shares may follow speed, so that bounds have to speak of all shares."""
        return self.limits.shares and len(set(self.cost.speed_D.tolist())) > 1

    def within_samples(self) -> "Problem":
        """The same problem; no stage may have more devices than the limits allow."""
        if not self.limits.whole_samples:
            return self
        most = min(self.cost.max_replicas, self.model.microbatch_size)
        return replace(self, cost=self.cost.with_max_replicas(most))

    def kernel_instance(
        self, *, memory_factor: float = 1.0, least_times: bool = False, positions: int = 1
    ) -> _core.Instance:
        """The problem as planning kernels read it, limits included.

        Bounds need `least_times`, where times were measured at several microbatch sizes: they
        count with times in proportion to the samples that are nowhere above. `positions` is the
        most stages of a device in the plans that are searched, whatever the options allow: a limit
        on stages that such plans cannot reach would only make the search slower.

        Layers that share a stage and devices that stay unused are not among its limits: problems
        with these are made smaller before they are planned (`planner/reduction.py`).
        """
        limits, model = self.limits, self.model
        memory_bytes: list[float] = []
        if self.limits_memory:
            memory_bytes = [
                math.inf
                if device.memory_gb is None
                else device.memory_gb * BYTES_IN_GB * memory_factor
                for device in self.cluster.devices
            ]
        cost = self.cost.with_least_times() if least_times else self.cost
        return cost.kernel_instance(
            self.num_microbatches,
            _core.PlanLimits(
                whole_samples=limits.whole_samples,
                may_recompute=limits.recompute,
                memory_bytes=memory_bytes,
                state_bytes_per_parameter_byte=1 + model.optimizer_bytes_per_parameter_byte,
                input_bytes=model.input_bytes,
                min_stages=limits.min_stages,
                max_stages=self._max_stages(positions),
                first_device=-1 if limits.first_on is None else limits.first_on,
                last_device=-1 if limits.last_on is None else limits.last_on,
                any_shares=self.any_shares,
            ),
        )

    def bound_instance(self, instance: _core.Instance) -> _core.Instance:
        """The instance itself; where times were measured at several sizes, one of least times."""
        return instance if self.cost.measured is None else self.kernel_instance(least_times=True)

    def _max_stages(self, positions: int) -> int:
        """The limit on the number of stages; a number that cannot be reached where it is none."""
        asked = self.limits.max_stages
        possible = min(self.model.num_layers, positions * self.cluster.num_devices)
        return NO_LIMIT if asked is None or asked >= possible else asked

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
    iteration_ms: float
    codes: Codes = field(default_factory=lambda: np.empty((0, 0), dtype=np.int32))
    """The schedule, [stages, 2 * microbatches], as in `Schedule.to_codes`; empty with `orders`."""
    orders: tuple[GroupCodes, ...] = ()
    """Instead of `codes`, where groups have several stages or backwards are cut in two: one order
    for each group, as in `Schedule.from_group_codes`."""
    schedule_guarantee_ms: float | None = None
    """Only for the schedule PE, which has a guarantee."""
    bound: Bound | None = None
    """Only from planners that prove a lower bound on the time of all plans."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Entries that the planner adds to the plan's options."""
    shard_optimizer: bool = False
    """Whether replicas share the optimizer's moments."""

    @property
    def schedule(self) -> Schedule:
        """The order of blocks."""
        if self.orders:
            return Schedule.from_group_codes(self.orders)
        return Schedule.from_codes(self.codes.tolist())


Planner = Callable[[Problem], Draft]
LateStart = Callable[[], Draft]
"""Makes a plan to start from. It takes long, so it is called only if the optimum is not found."""


def check_deadline(deadline: float) -> None:
    """Raise `DeadlineError` once the time on the clock of `time.monotonic` is over."""
    if time.monotonic() >= deadline:
        raise _core.DeadlineError


class SearchInterrupted(KeyboardInterrupt):
    """Ctrl-C during a search; `draft` is the best plan so far, marked as interrupted."""

    def __init__(self, draft: Draft) -> None:
        super().__init__("interrupted")
        self.draft = draft
