"""Several planners on one problem, side by side."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Unpack

from pipeplan.cluster import Cluster
from pipeplan.errors import InputError, PlanningInterrupted
from pipeplan.pipeline import Bound, BoundScope, Plan
from pipeplan.planning.door import Attempt, attempt, make_problem
from pipeplan.planning.limits import Limits
from pipeplan.planning.options import OptionArguments
from pipeplan.planning.problem import Planner
from pipeplan.planning.registry import PLANNERS, choose_planners
from pipeplan.profile import ModelProfile

__all__ = ["Comparison", "ComparisonRow", "compare"]

REFERENCE = "data-parallel"
"""The planner that speed-ups are measured against, where it made a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """The result of one planner; all figures are None if it made no plan."""

    planner: str
    planning_s: float
    iteration_ms: float | None = None
    speedup: float | None = None
    """Over the comparison's reference; above 1 is faster."""
    bubble_fraction: float | None = None
    peak_memory_gb: float | None = None
    """Memory of the device that needs the most."""
    fits_memory: bool | None = None
    has_whole_samples: bool | None = None
    """False if the plan splits samples, and they may not be split."""
    broken_constraint: str | None = None
    """The constraint that the plan breaks, in words."""
    num_stages: int | None = None
    num_devices: int | None = None
    """How many devices the plan uses."""
    lower_bound_ms: float | None = None
    gap: float | None = None
    """iteration_ms / bound - 1, with the highest bound that any of the planners proved. All plans
    have the same yardstick, that for several stages a device, where a planner has proved one."""
    infeasible_reason: str | None = None
    keeps_limits: bool | None = None
    """Whether the plan keeps all limits that count."""

    def __repr__(self) -> str:
        if self.iteration_ms is None:
            return f"<{self.planner}: no plan, {reprlib.repr(self.infeasible_reason)}>"
        speedup = "" if self.speedup is None else f", {self.speedup:.3g}x"
        limits = "" if self.keeps_limits else ", breaks a limit"
        return f"<{self.planner}: {self.iteration_ms:.6g} ms{speedup}{limits}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All rows: plans within the limits, plans that break one, planners without a plan.

    The fastest come first among each.
    """

    model: str
    cluster: str
    microbatches: int
    seed: int
    reference: str | None
    """The planner with speed-up 1: `data-parallel`, else the slowest; None without a plan."""
    rows: tuple[ComparisonRow, ...]
    plans: Mapping[str, Plan] = field(default_factory=dict, repr=False)
    """The plans themselves, by the planners' names, in the order of the rows."""

    def __repr__(self) -> str:
        first = f", {self.rows[0].planner} first" if self.plans else ""
        return (
            f"<Comparison of {len(self.rows)} planners for {reprlib.repr(self.model)} on"
            f" {reprlib.repr(self.cluster)}, {self.microbatches} microbatches{first}>"
        )

    @property
    def fastest(self) -> Plan | None:
        """The plan of the first row; None if no planner made one."""
        return next(iter(self.plans.values()), None)

    def document(self) -> dict[str, Any]:
        """The comparison for machines: everything but the plans."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "plans"}
        return {**named, "rows": [asdict(row) for row in self.rows]}


def compare(
    model: ModelProfile,
    cluster: Cluster,
    microbatches: int = 16,
    planners: Sequence[str] | Mapping[str, Planner] | None = None,
    *,
    seed: int = 0,
    num_threads: int | None = None,
    on_start: Callable[[str], None] | None = None,
    **options: Unpack[OptionArguments],
) -> Comparison:
    """The results of several planners on the same problem, with the time that each took.

    Args:
        model: what a microbatch costs, layer by layer.
        cluster: the devices and the links between them.
        microbatches: the number of microbatches in an iteration.
        planners: their names, or functions by name, in the order in which they run. By default
            these are all quick planners.
        seed: for planners that draw random numbers.
        num_threads: by default one for each processor. It never changes a plan.
        on_start: called with each planner's name before it runs.
        options: the fields of `PlanningOptions`, such as `divisible` or `ignore_memory`. Published
            planners ignore them; their rows say which limits they break.

    Examples:
        >>> import pipeplan as pp
        >>> model, cluster = pp.zoo.model("vgg19"), pp.zoo.cluster("4x2-10g")
        >>> found = pp.compare(model, cluster, 16, ["spp", "gpipe", "data-parallel"])
        >>> [row.planner for row in found.rows if row.fits_memory]
        ['data-parallel', 'spp']
        >>> found.plans["spp"].num_stages
        2
    """
    problem = make_problem(
        model,
        cluster,
        microbatches,
        seed=seed,
        num_threads=num_threads,
        **options,
    )
    functions: Mapping[str, Planner] = {}
    if isinstance(planners, Mapping):
        functions, names = planners, tuple(planners)
    else:
        names = choose_planners(planners)
    attempts = []
    for name in names:
        if on_start is not None:
            on_start(name)
        try:
            attempts.append(attempt(problem, name, function=functions.get(name)))
        except PlanningInterrupted:
            raise KeyboardInterrupt from None  # to compare an interrupted planner would be unfair
        except InputError as failure:
            if planners is not None or name in PLANNERS:
                raise
            # Nobody asked for this planner of another package, so the others still count.
            attempts.append(Attempt(planner=name, planning_s=0.0, reason=str(failure)))
    attempts.sort(key=lambda made: _rank(made, problem.limits))
    rows = [_row(made, problem.limits) for made in attempts]
    reference = _reference(rows)
    bounds = [bound for made in attempts if made.plan and (bound := made.plan.bound) is not None]
    return Comparison(
        model=model.name,
        cluster=cluster.name,
        microbatches=problem.num_microbatches,
        seed=problem.seed,
        reference=None if reference is None else reference.planner,
        rows=tuple(
            _with_gap(_with_speedup(row, reference), _bounds_ms(made, bounds))
            for row, made in zip(rows, attempts, strict=True)
        ),
        plans={made.planner: made.plan for made in attempts if made.plan is not None},
    )


def _rank(made: Attempt, limits: Limits) -> tuple[bool, float]:
    """Plans within the limits first, the fastest of them in front."""
    if made.plan is None:
        return True, float("inf")
    return not _keeps(made, limits), made.plan.iteration_ms


def _keeps(made: Attempt, limits: Limits) -> bool:
    """Whether the plan keeps the limits; memory counts only if it is limited."""
    broken = made.broken if limits.memory else replace(made.broken, fits_memory=True)
    return broken.keeps_all


def _row(made: Attempt, limits: Limits) -> ComparisonRow:
    if made.plan is None:
        return ComparisonRow(
            planner=made.planner, planning_s=made.planning_s, infeasible_reason=made.reason
        )
    plan, predicted = made.plan, made.plan.require_predicted()
    return ComparisonRow(
        planner=made.planner,
        planning_s=made.planning_s,
        iteration_ms=predicted.iteration_ms,
        bubble_fraction=predicted.bubble_fraction,
        peak_memory_gb=max(predicted.peak_memory_gb.values()),
        fits_memory=made.broken.fits_memory,
        has_whole_samples=made.broken.has_whole_samples,
        broken_constraint=made.broken.constraint,
        keeps_limits=_keeps(made, limits),
        num_stages=plan.num_stages,
        num_devices=plan.num_used_devices,
        lower_bound_ms=None if predicted.bound is None else predicted.bound.lower_bound_ms,
    )


def _bounds_ms(made: Attempt, bounds: list[Bound]) -> list[float]:
    """The bounds that speak of this plan: with several stages a device, only those for families.

    If there is one for families, it counts for all plans. Otherwise a plan with one stage a device
    could seem to be nearer to the optimum than a faster one with several.
    """
    of_all = [bound for bound in bounds if bound.scope is BoundScope.FAMILIES]
    is_family = made.plan is not None and made.plan.uses_families
    counted = of_all if of_all or is_family else bounds
    return [bound.lower_bound_ms for bound in counted]


def _with_gap(row: ComparisonRow, bounds_ms: list[float]) -> ComparisonRow:
    """The row with its gap. Each bound holds for all plans of its scope, so the highest counts.

    Plans that break a limit get none: bounds speak of plans within the limits.
    """
    if row.iteration_ms is None or not bounds_ms or not max(bounds_ms) > 0:
        return row
    if not row.keeps_limits:
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
