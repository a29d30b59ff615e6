"""The cells of the grid, each with its inputs, and the rows that come out."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from itertools import product

from pipeplan.cluster import Cluster
from pipeplan.documents.inputs import cluster_document, model_document
from pipeplan.documents.json_text import to_json
from pipeplan.documents.text import nearest, printable
from pipeplan.errors import InputError, PipeplanError
from pipeplan.planning.door import Attempt, attempt, make_problem
from pipeplan.planning.options import PlanningOptions
from pipeplan.planning.registry import planner_names
from pipeplan.planning.sweep.specification import SweepSpec
from pipeplan.profile import ModelProfile
from pipeplan.version import VERSION

__all__ = ["COLUMNS", "Outcome", "SweepCase", "SweepRow", "digest", "expand_cases", "run_case"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCase(PlanningOptions):
    """One cell of the grid with its inputs, so that a worker elsewhere needs no files."""

    index: int
    model_name: str
    """As the specification spells it; the profile's own name may be longer."""
    cluster_name: str
    model: ModelProfile
    cluster: Cluster
    microbatches: int
    planner: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """The result of one case; figures are None where there is an error."""

    model: str
    cluster: str
    microbatches: int
    planner: str
    seed: int
    iteration_ms: float | None = None
    samples_per_second: float | None = None
    bubble_fraction: float | None = None
    peak_memory_gb: float | None = None
    num_stages: int | None = None
    num_devices: int | None = None
    """How many devices the plan uses."""
    cluster_devices: int | None = None
    """How many devices the cluster has."""
    lower_bound_ms: float | None = None
    fits_memory: bool | None = None
    has_whole_samples: bool | None = None
    broken_constraint: str | None = None
    """The constraint that the plan breaks, in words."""
    error: str | None = None
    """Why there is no plan."""


COLUMNS = tuple(field.name for field in fields(SweepRow))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished case: its index, its row, and the seconds that planning took."""

    index: int
    row: SweepRow
    planning_s: float


def expand_cases(
    spec: SweepSpec,
    resolve_model: Callable[[str], ModelProfile],
    resolve_cluster: Callable[[str, int], Cluster],
) -> list[SweepCase]:
    """Every case of the grid in its order: models outermost, seeds innermost."""
    known = planner_names()
    for index, planner in enumerate(spec.planners):
        if planner not in known:
            raise InputError(
                f"planners[{index}]: {planner!r} is not known{nearest(planner, known)}"
            )
    models = {name: resolve_model(name) for name in spec.models}
    clusters = {
        (name, seed): resolve_cluster(name, seed) for name in spec.clusters for seed in spec.seeds
    }
    grid = product(spec.models, spec.clusters, spec.microbatches, spec.planners, spec.seeds)
    return [
        SweepCase(
            index=index,
            model_name=model,
            cluster_name=cluster,
            model=models[model],
            cluster=clusters[cluster, seed],
            microbatches=microbatches,
            planner=planner,
            seed=seed,
            **spec.arguments(),
        )
        for index, (model, cluster, microbatches, planner, seed) in enumerate(grid)
    ]


def digest(cases: Iterable[SweepCase]) -> str:
    """A text that differs between sweeps: a hash of all inputs and of the version that plans."""
    whole = sha256(VERSION.encode())
    seen: dict[int, bytes] = {}  # the same input serves many cases
    for case in cases:
        for part in (case.model, case.cluster):
            if id(part) not in seen:
                seen[id(part)] = sha256(_as_file(part)).digest()
            whole.update(seen[id(part)])
        names = [case.model_name, case.cluster_name, case.planner]
        numbers = [case.microbatches, case.seed]
        whole.update(json.dumps([names, numbers, case.arguments()]).encode())
    return whole.hexdigest()


def _as_file(part: ModelProfile | Cluster) -> bytes:
    """An input as the bytes of its file."""
    if isinstance(part, ModelProfile):
        return to_json(model_document(part))
    return to_json(cluster_document(part))


def run_case(case: SweepCase) -> Outcome:
    """The outcome of one case; a case without a plan has its reason in the row."""
    try:
        problem = make_problem(
            case.model,
            case.cluster,
            case.microbatches,
            PlanningOptions(**case.arguments()),
            seed=case.seed,
            num_threads=1,  # cases run side by side already
        )
        made = attempt(problem, case.planner)
    except PipeplanError as error:
        made = Attempt(planner=case.planner, planning_s=0.0, reason=str(error))
    return Outcome(index=case.index, row=_row(case, made), planning_s=made.planning_s)


def _row(case: SweepCase, made: Attempt) -> SweepRow:
    row = SweepRow(
        model=case.model_name,
        cluster=case.cluster_name,
        microbatches=case.microbatches,
        planner=case.planner,
        seed=case.seed,
        cluster_devices=case.cluster.num_devices,
    )
    plan = made.plan
    if plan is None:
        return replace(row, error=printable(made.reason or "no plan"))
    predicted = plan.require_predicted()
    return replace(
        row,
        iteration_ms=plan.iteration_ms,
        samples_per_second=plan.samples_per_second if plan.iteration_ms else None,
        bubble_fraction=predicted.bubble_fraction,
        peak_memory_gb=max(predicted.peak_memory_gb.values()),
        num_stages=len(plan.stages),
        num_devices=plan.num_used_devices,
        lower_bound_ms=None if predicted.bound is None else predicted.bound.lower_bound_ms,
        fits_memory=made.broken.fits_memory,
        has_whole_samples=made.broken.has_whole_samples,
        broken_constraint=made.broken.constraint,
    )
