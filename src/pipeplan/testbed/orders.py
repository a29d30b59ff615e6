"""What the parent asks of the nursery, and what ranks answer; as JSON lines between processes."""

from enum import StrEnum
from typing import Any

import msgspec

__all__ = [
    "Answer",
    "BlockPace",
    "BlockTimes",
    "IterationTimes",
    "LinksOrder",
    "Order",
    "RankTimes",
    "Way",
]


class Way(StrEnum):
    """How the network is emulated."""

    NAMESPACES = "namespaces"
    PACING = "pacing"


class BlockPace(msgspec.Struct, frozen=True, kw_only=True):
    """How long one rank's blocks of one stage take."""

    stage: int
    seconds: dict[str, float]
    """By kind, such as `F`; with what recomputation takes."""


class Order(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """A plan to run."""

    plan: dict[str, Any]
    """The scaled plan, as a document."""
    paces: list[list[BlockPace]]
    """By rank, one for each of its stages."""
    way: Way
    num_warm_ups: int
    num_iterations: int
    build: str | None
    """MODULE:FUNCTION of a real model; None: one that has the sizes only."""


class LinksOrder(msgspec.Struct, frozen=True, kw_only=True, tag="links"):
    """A cluster whose links are to be measured."""

    cluster: dict[str, Any]
    """As a document."""
    way: Way
    seconds: float
    one_at_a_time: bool


class BlockTimes(msgspec.Struct, frozen=True, array_like=True):
    """When a block was under way."""

    name: str
    """Such as `2F3`."""
    start_s: float
    end_s: float
    arrival_s: float
    """When its input had arrived; 0 if it has none."""
    over_s: float
    """By how much real computation took longer than its time."""


class IterationTimes(msgspec.Struct, frozen=True, kw_only=True):
    """When one rank did what in one iteration, by the clock that all processes share."""

    start_s: float
    end_s: float
    before_end_s: float
    """When the iteration before had ended."""
    reduce_end_s: float
    blocks: list[BlockTimes]
    loss: float


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The iterations of one rank, without warm-ups."""

    stages: list[int]
    replica: int
    """In the first of them."""
    iterations: list[IterationTimes]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an order."""

    ranks: list[RankTimes] = []
    cluster: dict[str, Any] = {}
    """As its links were measured, as a document."""
    notes: list[str] = []
    problem: str = ""
    """Why there is nothing else."""
