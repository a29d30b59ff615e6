"""The nouns of a planned pipeline: stages, groups, schedule, timeline, bound, plan. No algorithms.

Blocks and schedules are written in `blocks`, timelines in `timelines`; everybody gets them from
here.
"""

import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pipeplan.blocks import (
    KINDS,
    Block,
    Codes,
    GroupCodes,
    Kind,
    Schedule,
    most_in_flight,
    pack_codes,
    unpack_codes,
)
from pipeplan.cluster import Cluster
from pipeplan.errors import InputError, PlanFileError
from pipeplan.profile import ModelProfile
from pipeplan.timelines import AllReduce, GroupTimeline, TimedBlock, Timeline, Transfer
from pipeplan.validation import (
    GRADIENT_BUCKETS,
    MICROBATCHES,
    SHARE,
    require_choice,
    require_count,
    require_figure,
    require_number,
    require_plan_size,
    require_seed,
    require_text,
)

__all__ = [
    "KINDS",
    "AllReduce",
    "Block",
    "Bound",
    "BoundLimit",
    "BoundScope",
    "Codes",
    "Group",
    "GroupCodes",
    "GroupTimeline",
    "Kind",
    "Plan",
    "Prediction",
    "Schedule",
    "Stage",
    "TimedBlock",
    "Timeline",
    "Transfer",
    "draw_in_notebooks",
    "groups_of",
    "most_in_flight",
    "pack_codes",
    "unpack_codes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive layers on a set of devices, each of which holds a replica."""

    layers: range
    devices: tuple[int, ...]
    """Indices into the cluster's devices."""
    shares: tuple[float, ...] | None = None
    """The fraction of each microbatch that each device takes; None: even."""
    recompute: bool = False
    """Whether activations are computed again in the backward instead of being kept."""
    gradient_buckets: int = 1
    """The number of parts into which the stage's all-reduce is cut."""

    def __post_init__(self) -> None:
        if self.layers.step != 1 or not self.layers:
            raise InputError(f"layers: {self.layers} is not a non-empty range of step 1")
        if not self.devices:
            raise InputError("devices: is empty; a stage runs on at least one device")
        if min(self.devices) < 0:
            raise InputError(f"devices: {min(self.devices)} is negative; devices count from 0")
        if len(set(self.devices)) < len(self.devices):
            raise InputError("devices: one stands twice; a device already serves its stage")
        if not isinstance(self.recompute, bool):
            raise InputError(f"recompute: {reprlib.repr(self.recompute)} is neither true nor false")
        require_count(InputError, "gradient_buckets", self.gradient_buckets, GRADIENT_BUCKETS)
        if self.shares is None:
            return
        for position, share in enumerate(self.shares):
            require_number(InputError, f"shares[{position}]", share, SHARE)
        if len(self.shares) != len(self.devices):
            raise InputError(f"shares: has {len(self.shares)} for {len(self.devices)} devices")

    def __repr__(self) -> str:
        more = [
            *([] if self.shares is None else [f"shares={reprlib.repr(self.shares)}"]),
            *(["recompute=True"] if self.recompute else []),
            *([f"gradient_buckets={self.gradient_buckets}"] if self.gradient_buckets > 1 else []),
        ]
        devices = reprlib.repr(self.devices)
        return f"Stage({', '.join([f'layers={self.layers}', f'devices={devices}', *more])})"

    @property
    def num_replicas(self) -> int:
        """The number of devices that hold this stage."""
        return len(self.devices)

    @property
    def device_shares(self) -> tuple[float, ...]:
        """The share of each device, even ones written out."""
        if self.shares is not None:
            return self.shares
        return (1.0 / len(self.devices),) * len(self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A set of devices with all its stages; it computes one block at a time."""

    stages: tuple[int, ...]
    """Their numbers, rising."""
    devices: tuple[int, ...]
    """As its first stage names them."""

    @property
    def num_replicas(self) -> int:
        """The number of devices, each of which holds all stages of the group."""
        return len(self.devices)


def groups_of(stages: Sequence[Stage]) -> tuple[Group, ...]:
    """The groups of these stages, in the order of their first stages."""
    found: dict[frozenset[int], list[int]] = {}
    for index, stage in enumerate(stages):
        found.setdefault(frozenset(stage.devices), []).append(index)
    return tuple(
        Group(stages=tuple(indices), devices=stages[indices[0]].devices)
        for indices in found.values()
    )


class BoundScope(StrEnum):
    """The plans that a lower bound speaks of."""

    EVEN_SHARES = "even-shares"
    """Every plan with one stage a device, even shares, whole backwards and no recomputation."""
    ANY = "any"
    """Every plan with one stage a device and whole backwards."""
    FAMILIES = "families"
    """Every plan with even shares and without recomputation, several stages a device and backwards
    cut in two included."""


class BoundLimit(StrEnum):
    """What a lower bound takes for granted: it speaks only of plans within this limit."""

    WHOLE_SAMPLES = "whole-samples"
    MEMORY = "memory"
    CONSTRAINTS = "constraints"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """No plan of the scope can be faster."""

    lower_bound_ms: float
    scope: BoundScope
    limits: tuple[BoundLimit, ...] = ()
    """The bound speaks only of plans within these limits."""

    def __post_init__(self) -> None:
        require_figure(PlanFileError, "lower_bound_ms", self.lower_bound_ms)
        scope = require_choice(PlanFileError, "bound_scope", self.scope, BoundScope)
        object.__setattr__(self, "scope", scope)
        limits = tuple(
            require_choice(PlanFileError, f"bound_limits[{i}]", limit, BoundLimit)
            for i, limit in enumerate(self.limits)
        )
        object.__setattr__(self, "limits", limits)
        if len(set(self.limits)) < len(self.limits):
            raise PlanFileError("bound_limits: one stands twice; name each limit once")

    def gap(self, iteration_ms: float) -> float:
        """By which fraction, at most, a plan of that time is slower than the best.

        Infinite where the bound is 0 and so says nothing about a plan that takes any time.

        Examples:
            >>> import pipeplan as pp
            >>> bound = pp.Bound(lower_bound_ms=100.0, scope="any")
            >>> round(bound.gap(103.0), 4)
            0.03
        """
        if not self.lower_bound_ms:
            return math.inf if iteration_ms else 0.0
        return iteration_ms / self.lower_bound_ms - 1

    def verdict(
        self,
        iteration_ms: float,
        schedule_bound_ms: float | None = None,
        *,
        other_plans: bool = False,
    ) -> str:
        """The certificate in words.

        No schedule of the plan's stages takes less than `schedule_bound_ms`. So it is known how
        much of the gap is the schedule's. The rest lies between the stages and the bound. With
        `other_plans` some were searched of which the bound does not speak.
        """
        gap = self.gap(iteration_ms)
        if gap == math.inf:
            return "no bound on the optimum"
        among = ""
        if other_plans and self.scope is not BoundScope.FAMILIES:
            among = " among plans with one stage a device"
        if gap < 1e-6:
            return f"optimal{among}"
        words = f"at most {_percent(gap)} % from the optimum{among}"
        if not schedule_bound_ms:
            return words
        by_schedule = iteration_ms / schedule_bound_ms - 1
        if by_schedule < 1e-6:
            return f"{words}; no schedule of these stages is faster"
        return f"{words}; another schedule saves at most {_percent(by_schedule)} %"


def _percent(part: float) -> str:
    """A part of one in percent with two digits, or whole: never as a power of ten."""
    return f"{100 * part:.2g}" if part < 0.995 else f"{100 * part:.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model says about a plan."""

    iteration_ms: float
    bubble_fraction: float
    """The part of the used devices' time in which they do not compute."""
    peak_memory_gb: dict[str, float]
    """By device name, used devices only."""
    schedule_guarantee_ms: float | None = None
    """The theorem's bound on `iteration_ms`; None unless the schedule is PE's."""
    bound: Bound | None = None

    def __post_init__(self) -> None:
        require_figure(PlanFileError, "iteration_ms", self.iteration_ms)
        # 1 - busy / all may round to just below zero; whether it is right is for the checker.
        require_figure(PlanFileError, "bubble_fraction", self.bubble_fraction, may_be_negative=True)
        if self.schedule_guarantee_ms is not None:
            require_figure(PlanFileError, "schedule_guarantee_ms", self.schedule_guarantee_ms)
        for name, need_gb in self.peak_memory_gb.items():
            require_text(PlanFileError, "peak_memory_gb", name)
            require_figure(PlanFileError, f"peak_memory_gb[{name!r}]", need_gb)

    def __repr__(self) -> str:
        peak_gb = max(self.peak_memory_gb.values(), default=0.0)
        bound = "no bound" if self.bound is None else f"bound {self.bound.lower_bound_ms:.6g} ms"
        return (
            f"<Prediction: {self.iteration_ms:.6g} ms, {bound},"
            f" {100 * self.bubble_fraction:.1f} % bubble, {peak_gb:.3g} GB at most>"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole answer, with the inputs it answers: one object feeds all that comes after."""

    model: ModelProfile
    cluster: Cluster
    microbatches: int
    stages: tuple[Stage, ...]
    schedule: Schedule
    planner: str
    predicted: Prediction | None = None
    """None only for a plan written by hand."""
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    """Any whole number of 64 bits."""
    version: str = ""
    shard_optimizer: bool = False
    """Whether each device of a group keeps only its part of the optimizer's moments."""

    def __post_init__(self) -> None:
        require_count(PlanFileError, "microbatches", self.microbatches, MICROBATCHES)
        require_plan_size(len(self.stages), self.microbatches)
        require_seed(self.seed)
        require_text(PlanFileError, "planner", self.planner)
        require_text(PlanFileError, "version", self.version)
        if not isinstance(self.options, dict):
            raise PlanFileError(f"options: {reprlib.repr(self.options)} is not a dict")
        if not isinstance(self.shard_optimizer, bool):
            given = reprlib.repr(self.shard_optimizer)
            raise PlanFileError(f"shard_optimizer: {given} is neither true nor false")

    @property
    def groups(self) -> tuple[Group, ...]:
        """The sets of devices with their stages; the schedule has an order for each."""
        return groups_of(self.stages)

    @property
    def uses_families(self) -> bool:
        """Whether it needs the second version of plans.

        It has several stages a group, backwards cut in two, gradients in several buckets or a
        sharded optimizer.
        """
        return (
            not self.schedule.is_by_stage
            or self.shard_optimizer
            or any(stage.gradient_buckets > 1 for stage in self.stages)
            or len(self.groups) < len(self.stages)
        )

    @property
    def num_used_devices(self) -> int:
        """The number of devices that serve any stage."""
        return len({device for stage in self.stages for device in stage.devices})

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.stages)

    @property
    def iteration_ms(self) -> float:
        """The predicted time of one iteration."""
        return self.require_predicted().iteration_ms

    @property
    def bound(self) -> Bound | None:
        """The certificate: no plan of its scope can be faster."""
        return self.require_predicted().bound

    @property
    def samples_per_second(self) -> float:
        """The training throughput that the prediction means."""
        samples = self.microbatches * self.model.microbatch_size
        return 1e3 * samples / self.iteration_ms if self.iteration_ms else float("inf")

    def require_predicted(self) -> Prediction:
        """The predicted figures, or an error that says how to get them."""
        if self.predicted is None:
            raise PlanFileError("predicted: is missing; simulate the plan to get its figures")
        return self.predicted

    def __repr__(self) -> str:
        num_devices = self.num_used_devices
        time = "not simulated" if self.predicted is None else f"{self.iteration_ms:.6g} ms"
        return (
            f"<Plan of {reprlib.repr(self.model.name)} on {reprlib.repr(self.cluster.name)}"
            f" by {reprlib.repr(self.planner)}: {len(self.stages)} stages on {num_devices} devices,"
            f" {self.microbatches} microbatches, {time}>"
        )

    def _repr_html_(self) -> str | None:
        """What notebooks show, once the front door has said who draws it."""
        return None if _draw_in_notebooks is None else _draw_in_notebooks(self)


_draw_in_notebooks: Callable[[Plan], str] | None = None


def draw_in_notebooks(draw: Callable[[Plan], str]) -> None:
    """Let notebooks show plans by `draw`; pictures are made in a room that knows plans."""
    global _draw_in_notebooks
    _draw_in_notebooks = draw
