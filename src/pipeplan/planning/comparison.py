"""Many planners on one problem, side by side."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

from pipeplan.cluster import Cluster
from pipeplan.cost import CostModel
from pipeplan.documents.text import nearest
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.planning.prediction import predict
from pipeplan.planning.problem import MAX_MICROBATCHES, Planner, Problem
from pipeplan.profile import ModelProfile

__all__ = ["Comparison", "ComparisonRow", "choose_planners", "compare"]

REFERENCE = "data-parallel"
"""The planner that speed-ups are measured against, where it made a plan."""

SLOW = "exact"
"""Takes minutes where the others take milliseconds, so it runs only when it is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """What one planner made of the problem; figures are None where it made no plan."""

    planner: str
    planning_s: float
    iteration_ms: float | None = None
    speedup: float | None = None
    """Over the comparison's reference; above 1 is faster."""
    bubble_fraction: float | None = None
    peak_memory_gb: float | None = None
    """Of the device that needs the most."""
    fits_memory: bool | None = None
    num_stages: int | None = None
    num_devices: int | None = None
    """How many devices the plan uses."""
    lower_bound_ms: float | None = None
    gap: float | None = None
    """iteration_ms over the best bound that any of the planners proved, - 1."""
    infeasible_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All rows, fastest first, planners without a plan last."""

    model: str
    cluster: str
    microbatches: int
    seed: int
    reference: str | None
    """What `speedup` is over: `data-parallel`, else the slowest planner; None without a plan."""
    rows: tuple[ComparisonRow, ...]


def choose_planners(registry: Mapping[str, Planner], names: str | None) -> dict[str, Planner]:
    """The planners of a list with commas between their names; None: all that are quick."""
    if names is None:
        return {name: planner for name, planner in registry.items() if name != SLOW}
    chosen = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in registry:
            raise InputError(f"planners: {name!r} is not known{nearest(name, registry)}")
        chosen[name] = registry[name]
    if not chosen:
        raise InputError(f"planners: {names!r} names none; known are {', '.join(registry)}")
    return chosen


def compare(
    model: ModelProfile,
    cluster: Cluster,
    microbatches: int,
    planners: Mapping[str, Planner],
    *,
    seed: int = 0,
    on_start: Callable[[str], None] | None = None,
) -> Comparison:
    """Run every planner on the same problem and time it.

    Args:
        model: what a microbatch costs, layer by layer.
        cluster: the devices and what connects them.
        microbatches: how many of them make an iteration.
        planners: the planners by name, in the order in which they run.
        seed: for planners that draw random numbers.
        on_start: called with each planner's name before it runs.
    """
    if not 1 <= microbatches <= MAX_MICROBATCHES:
        raise InputError(f"microbatches: {microbatches} is not within 1..{MAX_MICROBATCHES}")
    problem = Problem(cost=CostModel(model, cluster), num_microbatches=microbatches, seed=seed)
    rows = []
    for name, planner in planners.items():
        if on_start is not None:
            on_start(name)
        rows.append(_run(problem, name, planner))
    rows.sort(key=lambda row: float("inf") if row.iteration_ms is None else row.iteration_ms)
    reference = _reference(rows)
    bounds_ms = [row.lower_bound_ms for row in rows if row.lower_bound_ms is not None]
    return Comparison(
        model=model.name,
        cluster=cluster.name,
        microbatches=microbatches,
        seed=seed,
        reference=None if reference is None else reference.planner,
        rows=tuple(_with_gap(_with_speedup(row, reference), bounds_ms) for row in rows),
    )


def _run(problem: Problem, name: str, planner: Planner) -> ComparisonRow:
    started_s = perf_counter()
    try:
        draft = planner(problem)
    except InfeasibleError as error:
        return ComparisonRow(
            planner=name, planning_s=perf_counter() - started_s, infeasible_reason=str(error)
        )
    planning_s = perf_counter() - started_s
    predicted = predict(problem, draft)
    limits = {device.name: device.memory_gb for device in problem.cluster.devices}
    return ComparisonRow(
        planner=name,
        planning_s=planning_s,
        iteration_ms=predicted.iteration_ms,
        bubble_fraction=predicted.bubble_fraction,
        peak_memory_gb=max(predicted.peak_memory_gb.values()),
        fits_memory=all(
            limit is None or need_gb <= limit
            for need_gb, limit in (
                (need_gb, limits[device]) for device, need_gb in predicted.peak_memory_gb.items()
            )
        ),
        num_stages=len(draft.stages),
        num_devices=sum(stage.num_replicas for stage in draft.stages),
        lower_bound_ms=None if predicted.bound is None else predicted.bound.lower_bound_ms,
    )


def _with_gap(row: ComparisonRow, bounds_ms: list[float]) -> ComparisonRow:
    """A bound that one planner proves holds for all plans of its scope, so the best one counts."""
    if row.iteration_ms is None or not bounds_ms or not max(bounds_ms) > 0:
        return row
    return replace(row, gap=row.iteration_ms / max(bounds_ms) - 1)


def _reference(rows: list[ComparisonRow]) -> ComparisonRow | None:
    feasible = [row for row in rows if row.iteration_ms is not None]
    for row in feasible:
        if row.planner == REFERENCE:
            return row
    return feasible[-1] if feasible else None


def _with_speedup(row: ComparisonRow, reference: ComparisonRow | None) -> ComparisonRow:
    if reference is None or row.iteration_ms is None or reference.iteration_ms is None:
        return row
    if row.iteration_ms == 0:  # a model that costs nothing
        return replace(row, speedup=1.0 if reference.iteration_ms == 0 else float("inf"))
    return replace(row, speedup=reference.iteration_ms / row.iteration_ms)
