"""Microbatch size and number of microbatches for a global batch, chosen with the plan.

The product of the two is the batch, so the sizes are its divisors. A profile at one size stands for
all others: times and bytes of activations, outputs, gradients and inputs grow with the size,
parameters do not. Larger microbatches have fewer latencies and allow more replicas. Smaller ones
fill the pipeline better and take less memory.

Each size is planned with little effort first, the most promising sizes before the others. A size
is left out if its lower bound is above the best time so far, or if two smaller ones do not fit and
need ever more memory. The best two are planned in earnest. Of equally fast plans the one
with the smallest microbatches wins.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

from pipeplan.cluster import Cluster
from pipeplan.errors import (
    InfeasibleError,
    InputError,
    NoPlanError,
    PlanningInterrupted,
    ProfileError,
)
from pipeplan.measured_times import times_of_layer
from pipeplan.pipeline import BoundScope, Plan
from pipeplan.planning.door import make_problem, may_search_families
from pipeplan.planning.door import plan as make_plan
from pipeplan.planning.options import OptionArguments, PlanningOptions
from pipeplan.planning.planner.lower_bound import bucket_sizes, relaxed_bound_ms, work_bound_ms
from pipeplan.profile import LayerProfile, ModelProfile, TimesAt
from pipeplan.validation import COUNT, MAX_BLOCKS, MICROBATCHES, require_count

__all__ = ["plan_global_batch", "scaled_model"]

QUICK_EFFORT = 0.05
NUM_IN_EARNEST = 2
MAX_SIZES = 12
"""Of more divisors an even selection is tried, and then those beside the best one."""
NO_BETTER, SAME = 1 - 1e-6, 1 + 1e-6
MICROBATCHES_A_DEVICE = 4
"""Where to begin: so many microbatches for each device fill a pipeline well."""


def scaled_model(model: ModelProfile, microbatch_size: int) -> ModelProfile:
    """The profile for another microbatch size: all but the parameters grows in proportion.

    Where a layer was measured at several sizes, its times follow these measurements.
    """
    require_count(InputError, "microbatch_size", microbatch_size, COUNT)
    if microbatch_size == model.microbatch_size:
        return model
    factor = microbatch_size / model.microbatch_size
    try:
        return replace(
            model,
            microbatch_size=microbatch_size,
            input_bytes=model.input_bytes * factor,
            layers=tuple(
                _scaled_layer(layer, factor, model.microbatch_size, microbatch_size)
                for layer in model.layers
            ),
        )
    except ProfileError as problem:
        raise InputError(
            f"microbatch_size: {microbatch_size} takes the profile out of its limits: {problem}"
        ) from None


def _scaled_layer(layer: LayerProfile, factor: float, old: int, new: int) -> LayerProfile:
    weight_grad_ms = None if layer.weight_grad_ms is None else layer.weight_grad_ms * factor
    forward_ms, backward_ms, at = layer.forward_ms * factor, layer.backward_ms * factor, layer.at
    if at:
        forward_ms, backward_ms = times_of_layer(layer, old, new)
        own = TimesAt(
            microbatch_size=old, forward_ms=layer.forward_ms, backward_ms=layer.backward_ms
        )
        at = tuple(times for times in (*at, own) if times.microbatch_size != new)
        if weight_grad_ms is not None:
            weight_grad_ms = min(weight_grad_ms, backward_ms)
    return replace(
        layer,
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        at=at,
        output_bytes=layer.output_bytes * factor,
        gradient_bytes=layer.gradient_bytes * factor,
        activation_bytes=layer.activation_bytes * factor,
        weight_grad_ms=weight_grad_ms,
        weight_grad_bytes=layer.weight_grad_bytes * factor,
    )


def plan_global_batch(
    model: ModelProfile,
    cluster: Cluster,
    global_batch: int,
    planner: str = "best",
    *,
    schedule: str | None = None,
    seed: int = 0,
    time_limit_s: float | None = None,
    num_threads: int | None = None,
    report: Callable[[str], None] | None = None,
    **options: Unpack[OptionArguments],
) -> Plan:
    """The plan with the fastest microbatch size that was found for a batch of so many samples.

    The plan embeds the scaled model. Its options say `global_batch` and `profiled_microbatch_size`.
    A time limit holds for each of the plannings. Otherwise the arguments are those of `plan`.

    Raises:
        InputError: as `plan`, and for a batch that no allowed number of microbatches divides.
        InfeasibleError: no size has a plan; the message is that of the smallest size.

    Examples:
        >>> import pipeplan as pp
        >>> model, cluster = pp.zoo.model("vgg19"), pp.zoo.cluster("4x2-10g")
        >>> plan = pp.plan_global_batch(model, cluster, 256, planner="spp")
        >>> plan.microbatches * plan.model.microbatch_size
        256
    """
    require_count(InputError, "global_batch", global_batch, COUNT)
    search = _Search(
        model=model,
        cluster=cluster,
        global_batch=int(global_batch),
        planner=planner,
        options=PlanningOptions(**options),
        settings={
            "schedule": schedule,
            "seed": seed,
            "time_limit_s": time_limit_s,
            "num_threads": num_threads,
        },
        report=report or (lambda _: None),
    )
    return search.run()


class _Search:
    """The sizes that were tried, with their plans."""

    def __init__(
        self,
        *,
        model: ModelProfile,
        cluster: Cluster,
        global_batch: int,
        planner: str,
        options: PlanningOptions,
        settings: dict[str, Any],
        report: Callable[[str], None],
    ) -> None:
        self.model, self.cluster, self.global_batch = model, cluster, global_batch
        self.planner, self.options, self.settings = planner, options, settings
        self.report = report
        self.plans: dict[int, Plan] = {}
        self.reasons: dict[int, InfeasibleError | InputError] = {}
        self.left_out: list[int] = []
        self.searches_families = may_search_families(options, planner, settings["schedule"])

    def run(self) -> Plan:
        """The best plan of all sizes."""
        sizes = self._sizes()
        self._try(_selection(sizes), QUICK_EFFORT)
        while self.plans:  # beside the best one, until it stays the best
            at = sizes.index(self._best())
            beside = [n for n in sizes[max(at - 1, 0) : at + 2] if not self._is_done(n)]
            if not beside:
                break
            self._try(beside, QUICK_EFFORT)
        if not self.plans:
            raise self.reasons[min(self.reasons)]
        ranked = sorted(self.plans, key=lambda size: (self.plans[size].iteration_ms, size))
        if self.options.effort > QUICK_EFFORT:
            for size in ranked[:NUM_IN_EARNEST]:
                if self._may_improve(size):
                    self._plan(size, self.options.effort)
        return self._finished(self.plans[self._best()])

    def _may_improve(self, size: int) -> bool:
        """Whether the certificate of a size leaves room for a plan faster than the best so far."""
        bound, best_ms = self.plans[size].bound, self.plans[self._best()].iteration_ms
        if bound is None or (self.searches_families and bound.scope is not BoundScope.FAMILIES):
            return True
        return bound.lower_bound_ms < best_ms * NO_BETTER

    def _sizes(self) -> list[int]:
        """The divisors of the batch that leave an allowed number of microbatches."""
        most_stages = min(self.model.num_layers, self.cluster.num_devices)
        most = min(int(MICROBATCHES.most), MAX_BLOCKS // (2 * most_stages))
        sizes = [n for n in _divisors(self.global_batch) if self.global_batch // n <= most]
        if not sizes:
            raise InputError(f"global_batch: {self.global_batch} has no microbatch size")
        return sizes

    def _is_done(self, size: int) -> bool:
        return size in self.plans or size in self.reasons or size in self.left_out

    def _best(self) -> int:
        least_ms = min(plan.iteration_ms for plan in self.plans.values())
        return min(n for n, plan in self.plans.items() if plan.iteration_ms <= least_ms * SAME)

    def _try(self, sizes: list[int], effort: float) -> None:
        """Plan the sizes that can still win, those that fill the pipeline well first."""
        wanted = max(self.global_batch / (MICROBATCHES_A_DEVICE * self.cluster.num_devices), 1.0)
        for size in sorted(sizes, key=lambda n: (abs(math.log(n / wanted)), n)):
            if self._is_too_large(size) or self._cannot_win(size):
                self.left_out.append(size)
            else:
                self._plan(size, min(effort, self.options.effort))

    def _is_too_large(self, size: int) -> bool:
        """Whether smaller sizes do not fit, the largest of them least of all."""
        needs_gb = [
            reason.need_gb
            for tried, reason in sorted(self.reasons.items())
            if tried < size and isinstance(reason, NoPlanError) and reason.need_gb is not None
        ]
        return len(needs_gb) > 1 and needs_gb[-2] < needs_gb[-1]

    def _cannot_win(self, size: int) -> bool:
        """Whether the lower bound of a size is above the best time so far.

        With several stages a device only that of the work holds.
        """
        if not self.plans:
            return False
        best_ms = self.plans[self._best()].iteration_ms
        buckets = bucket_sizes(self.cluster.num_devices, self.model.num_layers)
        if buckets is None and not self.searches_families:
            return False
        try:
            problem = make_problem(
                scaled_model(self.model, size),
                self.cluster,
                self.global_batch // size,
                self.options,
            )
        except (InputError, InfeasibleError):
            return False
        if self.searches_families or buckets is None:
            return work_bound_ms(problem.cost, problem.num_microbatches) >= best_ms * NO_BETTER
        bound_ms = relaxed_bound_ms(
            problem.kernel_instance(least_times=True), buckets, best_ms, problem.num_threads
        )
        return bound_ms >= best_ms * NO_BETTER

    def _plan(self, size: int, effort: float) -> None:
        self.report(f"planning microbatches of {size}")
        try:
            made = make_plan(
                scaled_model(self.model, size),
                self.cluster,
                self.global_batch // size,
                self.planner,
                report=lambda line: self.report(f"microbatches of {size}: {line}"),
                **self.settings,
                **{**self.options.arguments(), "effort": effort},
            )
        except (InfeasibleError, InputError) as reason:
            self.reasons[size] = reason
        except PlanningInterrupted as stop:
            plans = [*self.plans.values(), stop.plan]
            best = min(plans, key=lambda plan: plan.iteration_ms)
            marked = replace(best, options={**best.options, "interrupted": True})
            raise PlanningInterrupted(self._finished(marked)) from None
        else:
            known = self.plans.get(size)
            if known is None or made.iteration_ms <= known.iteration_ms:
                self.plans[size] = made

    def _finished(self, plan: Plan) -> Plan:
        asked = {
            "global_batch": self.global_batch,
            "profiled_microbatch_size": self.model.microbatch_size,
        }
        return replace(plan, options={**plan.options, "effort": self.options.effort, **asked})


def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def _selection(sizes: list[int]) -> list[int]:
    """All of few sizes; of many an even selection with the first and the last."""
    if len(sizes) <= MAX_SIZES:
        return sizes
    last = len(sizes) - 1
    return [sizes[i * last // (MAX_SIZES - 1)] for i in range(MAX_SIZES)]
