"""The nouns of a planned pipeline: stages, blocks, schedule, timeline, bound, plan. No algorithms.

A schedule says in which order each stage runs its blocks, and no times::

    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 B0 F1 B1 F2 B2 F3 B3

A timeline is what becomes of it under the cost model: blocks, transfers and all-reduces
with their start and end.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any

from pipeplan.cluster import Cluster
from pipeplan.errors import InputError, PlanFileError
from pipeplan.profile import ModelProfile
from pipeplan.validation import (
    MICROBATCHES,
    SHARE,
    require_count,
    require_figure,
    require_number,
    require_plan_size,
    require_seed,
)

__all__ = [
    "AllReduce",
    "Block",
    "Bound",
    "BoundLimit",
    "BoundScope",
    "Kind",
    "Plan",
    "Prediction",
    "Schedule",
    "Stage",
    "TimedBlock",
    "Timeline",
    "Transfer",
    "draw_in_notebooks",
]


class Kind(StrEnum):
    """The two directions that a microbatch goes through the pipeline."""

    FORWARD = "F"
    BACKWARD = "B"


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

    def __post_init__(self) -> None:
        if self.layers.step != 1 or not self.layers:
            raise InputError(f"layers: {self.layers} is not a non-empty range of step 1")
        if not self.devices:
            raise InputError("devices: is empty; a stage runs on at least one device")
        if min(self.devices) < 0:
            raise InputError(f"devices: {min(self.devices)} is negative; devices count from 0")
        if len(set(self.devices)) < len(self.devices):
            raise InputError("devices: one stands twice; a device already serves its stage")
        if self.shares is None:
            return
        for position, share in enumerate(self.shares):
            require_number(InputError, f"shares[{position}]", share, SHARE)
        if len(self.shares) != len(self.devices):
            raise InputError(f"shares: has {len(self.shares)} for {len(self.devices)} devices")

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


@dataclass(frozen=True, slots=True)
class Block:
    """The smallest scheduled work: one microbatch forward or backward through one stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """For each stage the order of its blocks; no times."""

    orders: tuple[tuple[Block, ...], ...]

    @classmethod
    def from_codes(cls, codes: Sequence[Sequence[int]]) -> "Schedule":
        """The schedule that a kernel wrote: `m` is F(m), `-1 - m` is B(m)."""
        forward, backward = Kind.FORWARD, Kind.BACKWARD
        return cls(
            tuple(
                tuple(
                    Block(forward, stage, code) if code >= 0 else Block(backward, stage, -1 - code)
                    for code in order
                )
                for stage, order in enumerate(codes)
            )
        )

    def to_codes(self) -> list[list[int]]:
        """The schedule as kernels read it: F(m) is `m`, B(m) is `-1 - m`."""
        return [
            [b.microbatch if b.kind is Kind.FORWARD else -1 - b.microbatch for b in order]
            for order in self.orders
        ]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.orders)

    def most_in_flight(self, stage: int) -> int:
        """The most microbatches that the stage has begun forward and not ended backward."""
        steps = (1 if block.kind is Kind.FORWARD else -1 for block in self.orders[stage])
        return max(accumulate(steps), default=0)

    def __iter__(self) -> Iterator[tuple[Block, ...]]:
        return iter(self.orders)

    def __getitem__(self, stage: int) -> tuple[Block, ...]:
        return self.orders[stage]

    def __len__(self) -> int:
        return len(self.orders)


@dataclass(frozen=True, slots=True)
class TimedBlock:
    """A block with its times."""

    block: Block
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """One microbatch's tensors on their way between stages `channel` and `channel + 1`."""

    kind: Kind
    channel: int
    microbatch: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The gradient all-reduce of one stage's replicas."""

    stage: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Everything that happens in one iteration, with its times."""

    blocks: tuple[tuple[TimedBlock, ...], ...]
    """For each stage, in the order in which it runs them."""
    transfers: tuple[Transfer, ...]
    """By channel, forward before backward, each in the order in which they are sent."""
    all_reduces: tuple[AllReduce, ...]
    """One for each stage; of no length where the stage has one replica."""
    iteration_ms: float
    """The latest end of any stage's all-reduce."""


class BoundScope(StrEnum):
    """The plans that a lower bound speaks of."""

    EVEN_SHARES = "even-shares"
    """Every plan with even shares and without recomputation."""
    ANY = "any"


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
        if len(set(self.limits)) < len(self.limits):
            raise PlanFileError("bound_limits: one stands twice; name each limit once")

    def gap(self, iteration_ms: float) -> float:
        """By which fraction, at most, a plan of that time is slower than the best."""
        return iteration_ms / self.lower_bound_ms - 1 if self.lower_bound_ms else 0.0

    def verdict(self, iteration_ms: float) -> str:
        """The certificate in words."""
        gap = self.gap(iteration_ms)
        return "optimal" if gap < 1e-6 else f"at most {100 * gap:.2g} % from the optimum"


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
            require_figure(PlanFileError, f"peak_memory_gb[{name!r}]", need_gb)


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

    def __post_init__(self) -> None:
        require_count(PlanFileError, "microbatches", self.microbatches, MICROBATCHES)
        require_plan_size(len(self.stages), self.microbatches)
        require_seed(self.seed)

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

    def _repr_html_(self) -> str | None:
        """What notebooks show, once the front door has said who draws it."""
        return None if _draw_in_notebooks is None else _draw_in_notebooks(self)


_draw_in_notebooks: Callable[[Plan], str] | None = None


def draw_in_notebooks(draw: Callable[[Plan], str]) -> None:
    """Let notebooks show plans by `draw`; pictures are made in a room that knows plans."""
    global _draw_in_notebooks
    _draw_in_notebooks = draw
