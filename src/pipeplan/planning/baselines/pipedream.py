"""PipeDream's hierarchical partition, run synchronously with 1F1B.

Reference:
    Narayanan et al. 2019 (PipeDream), SOSP, §3.1, with the transfer terms of its optimizer on.
    Within a level of m units with bandwidth B, for layers i..j-1 (T compute, W parameter bytes,
    o bytes over a cut), `A(i, j, m)` is the smaller of

        one stage    (T(i, j) + 4 (m-1) W(i, j) / (m B)) / m
        split at k   max( A(i, k, m - m'), (T(k, j) + 4 (m'-1) W(k, j) / (m' B)) / m',
                          2 o(k) / (B m'), 2 o(j) / (B m') unless j is the end )

    over k and m'. The T of the level above is the A of this level with all its units.
    Objective: the slowest stage or transfer in the steady state; no fill, no drain, no barrier. Its
    minibatch is our microbatch, and it synchronises replicas after each: 4 W, because 2 W are sent
    and 2 W received. Cost model: levels of equal units, here hosts and the devices in them; one
    bandwidth for each level.
    Differs: run with a barrier instead of stale weights. Ties go to the first split instead of the
    order of a set, so plans do not vary. Hosts of different sizes are divided into groups; the size
    of a group is the greatest common divisor. If it is 1, there is one flat level. No memory limit.

Complexity: O(L^3 m^2) for the level of a host, O(L^2 m^2) for a level on top.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan import _core
from pipeplan.cost import CostModel, Floats
from pipeplan.pipeline import Stage
from pipeplan.planning.baselines.cuts import Split
from pipeplan.planning.baselines.view import execute, range_sums, view_cluster
from pipeplan.planning.problem import Draft, Problem

__all__ = ["plan_pipedream", "split_pipedream"]

SYNC_VOLUME = 4
"""Gradients and weights, each sent and received."""
TRANSFER_VOLUME = 2
"""Activations one way, gradients the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """The table of one level. Axes: m - 1 for m = 1..units, start layers, L + 1 end layers."""

    best_ms_mLL: Floats
    cut_mLL: NDArray[np.int32]
    """k of the last split; -1 if there is only one stage."""
    behind_mLL: NDArray[np.int32]
    """m' of the last split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Consecutive layers on consecutive units of a level."""

    start: int
    end: int
    first_unit: int
    end_unit: int


def plan_pipedream(problem: Problem) -> Draft:
    """PipeDream's stages under 1F1B."""
    return execute(problem, split_pipedream(problem.cost).stages, "1f1b")


def split_pipedream(cost: CostModel) -> Split:
    """The stages with the least bottleneck over all levels."""
    view = view_cluster(cost)
    num_layers = len(cost.forward_ms_L)
    compute_ms_LL = range_sums(cost.forward_ms_L + cost.backward_ms_L) / view.speed
    inside = 1 if len(view.hosts) == 1 else view.group_size
    units = view.num_devices // inside
    if inside == 1:
        top = _solve_level(cost, compute_ms_LL, units, view.flat_bytes_per_ms, 1)
        parts = _parts(top, 0, num_layers, units)
    else:
        host = _solve_level(cost, compute_ms_LL, inside, view.inside_bytes_per_ms, num_layers)
        inner_ms_LL = np.full_like(compute_ms_LL, np.inf)
        inner_ms_LL[:num_layers] = host.best_ms_mLL[inside - 1]
        top = _solve_level(cost, inner_ms_LL, units, view.between_bytes_per_ms, 1)
        parts = _parts(top, 0, num_layers, units)
    stages = []
    for part in parts:
        groups = [
            view.ranks[unit * inside : (unit + 1) * inside]
            for unit in range(part.first_unit, part.end_unit)
        ]
        if inside == 1:
            inner_parts = [_Part(start=part.start, end=part.end, first_unit=0, end_unit=1)]
        else:
            inner_parts = _parts(host, part.start, part.end, inside)
        # Several groups may replicate these layers: their n-th devices serve the same stage.
        stages += [
            Stage(
                layers=range(inner.start, inner.end),
                devices=tuple(d for g in groups for d in g[inner.first_unit : inner.end_unit]),
            )
            for inner in inner_parts
        ]
    return Split(
        stages=tuple(stages), objective_ms=float(top.best_ms_mLL[units - 1, 0, num_layers])
    )


def _solve_level(
    cost: CostModel,
    compute_ms_LL: Floats,
    units: int,
    bytes_per_ms: float,
    num_starts: int,
) -> _Level:
    """The table for every range of layers that begins at one of the first `num_starts`."""
    size = len(compute_ms_LL)
    parameter_bytes_LL = range_sums(cost.parameter_bytes_L)
    crossing_bytes = np.concatenate(([0.0], cost.output_bytes_L[:-1], [0.0]))  # [L + 1]
    no_layer = np.tril(np.ones((size, size), dtype=bool))
    one_stage_ms = np.empty((units, size, size))
    last_stage_ms = np.empty_like(one_stage_ms)
    for m in range(1, units + 1):
        sync_ms = SYNC_VOLUME * (m - 1) / m * parameter_bytes_LL / bytes_per_ms
        one_stage_ms[m - 1] = np.where(no_layer, np.inf, (compute_ms_LL + sync_ms) / m)
        transfer_ms = TRANSFER_VOLUME * crossing_bytes / (bytes_per_ms * m)
        either_end_ms = np.maximum(transfer_ms[:, None], transfer_ms[None, :])
        last_stage_ms[m - 1] = np.maximum(one_stage_ms[m - 1], either_end_ms)
    best, cut, behind = _core.split_level(one_stage_ms, last_stage_ms, num_starts)
    return _Level(best_ms_mLL=best, cut_mLL=cut, behind_mLL=behind)


def _parts(level: _Level, start: int, end: int, units: int) -> list[_Part]:
    """How the level splits layers start..end-1 over all its units, front to back."""
    parts: list[_Part] = []
    while True:
        k = int(level.cut_mLL[units - 1, start, end])
        extra = int(level.behind_mLL[units - 1, start, end])
        if k < 0:
            parts.append(_Part(start=start, end=end, first_unit=0, end_unit=units))
            return parts[::-1]
        parts.append(_Part(start=k, end=end, first_unit=units - extra, end_unit=units))
        end, units = k, units - extra
