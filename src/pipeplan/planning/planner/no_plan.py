"""Why no plan keeps the limits: what the plan that comes closest to fitting would need.

All memory is taken larger by one factor. The least factor for which all layers fit on one of the
device orders is closed in on, then the least for which the recursion finds a plan there. The plan
says which stage needs how much.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from pipeplan import _core
from pipeplan.errors import NoPlanError
from pipeplan.pipeline import Stage
from pipeplan.planning.planner.coarsening import CoarseModel, coarsen
from pipeplan.planning.planner.placement import placed_stages
from pipeplan.planning.planner.room import may_fit_on
from pipeplan.planning.planner.settings import Sizes, replica_counts, unit_of
from pipeplan.planning.problem import Problem

__all__ = ["explain_no_plan"]

MOST_FACTOR = 2.0**40
CLOSE_ENOUGH = 1.001
MAX_ORDERS, MAX_LAYERS = 4, 256
CAPACITY = 2

Made = TypeVar("Made")


def explain_no_plan(
    problem: Problem, orders: Sequence[tuple[int, ...]], *, is_proved: bool = False
) -> NoPlanError:
    """The error for a problem without a plan; it names the stage that lacks the most memory.

    Only if that is proved, it says that there is no plan. Else none was found.
    """
    if not problem.limits_memory:
        return NoPlanError(
            "found no plan that keeps all constraints: the devices that they ask for lack paths to"
            " each other or share too few samples; drop a constraint or use a larger"
            " microbatch_size"
        )
    stages = _closest(problem, orders[:MAX_ORDERS])
    if stages is None:
        return NoPlanError(
            "found no plan that keeps all constraints, whatever memory the devices had; drop a"
            " constraint"
        )
    is_known = is_proved and not problem.options.uses_families
    return _error(problem, stages, "nothing fits" if is_known else "found no plan that fits")


def _error(problem: Problem, stages: tuple[Stage, ...], what: str) -> NoPlanError:
    """The error for the stage with the largest excess, if each holds one microbatch."""
    devices = problem.cluster.devices
    _, need_gb, index, device = max(
        (need_gb / (devices[u].memory_gb or np.inf), need_gb, index, u)
        for index, stage in enumerate(stages)
        for u, need_gb in zip(stage.devices, problem.cost.memory_gb(stage, 1), strict=True)
    )
    stage = stages[index]
    names = tuple(
        devices[u].name
        for u, need_gb in zip(stage.devices, problem.cost.memory_gb(stage, 1), strict=True)
        if need_gb > (devices[u].memory_gb or np.inf)
    )
    layers = (stage.layers.start, stage.layers.stop)
    recomputed = ", even with recomputation" if stage.recompute else ""
    return NoPlanError(
        f"{what}: the one that comes closest needs {need_gb:.3g} GB on"
        f" {devices[device].name!r} ({devices[device].memory_gb:g} GB) in stage {index} of"
        f" {len(stages)}{recomputed};"
        " use more or larger devices or a smaller microbatch",
        stage=index,
        layers=layers,
        devices=names or (devices[device].name,),
        need_gb=need_gb,
        memory_gb=devices[device].memory_gb,
    )


def _closest(problem: Problem, orders: Sequence[tuple[int, ...]]) -> tuple[Stage, ...] | None:
    """The stages that fit with the least additional memory on one of the orders."""
    coarse = coarsen(problem.cost, MAX_LAYERS)

    def has_room(factor: float) -> bool | None:
        instance = coarse.cost.with_layers(problem.kernel_instance(memory_factor=factor))
        return may_fit_on(instance, orders, problem.deadline) or None

    def stages(factor: float) -> tuple[Stage, ...] | None:
        return _first_plan(problem, coarse, factor, orders)

    # That there is room says nothing of links and constraints. So plans are looked for beyond it.
    _, _, enough = _least_factor(has_room, 1.0, 2.0)
    found, _, _ = _least_factor(stages, enough / CLOSE_ENOUGH, enough)
    return found


def _least_factor(
    made: Callable[[float], Made | None], low: float, high: float
) -> tuple[Made | None, float, float]:
    """What is made of about the least factor that allows it, and the factors around it."""
    found = made(high)
    while found is None and high <= MOST_FACTOR:
        low, high = high, max(2.0, high) ** 2
        found = made(high)
    while found is not None and high > low * CLOSE_ENOUGH:
        middle = (low * high) ** 0.5
        better = made(middle)
        if better is None:
            low = middle
        else:
            high, found = middle, better
    return found, low, high


def _first_plan(
    problem: Problem, coarse: CoarseModel, factor: float, orders: Sequence[tuple[int, ...]]
) -> tuple[Stage, ...] | None:
    """A plan with so many times the memory, on the first order that has one."""
    whole = problem.kernel_instance(memory_factor=factor)
    instance = coarse.cost.with_layers(whole)
    num_devices = problem.cluster.num_devices
    unit = unit_of(num_devices)
    sizes = replica_counts(Sizes.QUARTERS, -(-num_devices // unit))
    for order in orders:
        _, plans = _core.plan_on_order(
            instance.on_devices(order),
            np.array(sizes, dtype=np.int32),
            CAPACITY,
            np.inf,
            1,
            problem.num_threads,
            problem.deadline,
            unit,
        )
        if plans:
            return placed_stages(plans[0], whole, order=order, end_layer=coarse.end_layer)
    return None
