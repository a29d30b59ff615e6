"""What the checker asks of the bound that a plan carries."""

import math
from collections.abc import Iterator

from pipeplan.pipeline import BoundScope, Plan, Prediction, Stage

__all__ = ["bound_errors", "has_even_shares"]

RELATIVE_TOLERANCE = 1e-6


def bound_errors(plan: Plan, predicted: Prediction, iteration_ms: float) -> Iterator[str]:
    """What is wrong with the bound of a plan that takes so long."""
    if predicted.bound is None:
        return
    bound_ms = predicted.bound.lower_bound_ms
    if not 0 <= bound_ms < math.inf:
        yield f"predicted.lower_bound_ms: {bound_ms:g} is not a finite number of at least 0"
    elif bound_ms > iteration_ms * (1 + RELATIVE_TOLERANCE):
        yield (
            f"predicted.lower_bound_ms: {bound_ms:.9g} is above"
            f" the plan's own iteration of {iteration_ms:.9g}"
        )
    scope = predicted.bound.scope
    if plan.uses_families and scope != BoundScope.FAMILIES:
        yield (
            f"predicted.bound_scope: {scope.value!r} speaks of plans with one stage a device and"
            " whole backwards; for this one it has to be 'families' or null"
        )
    elif scope != BoundScope.ANY:
        other = "null" if plan.uses_families else "'any' or null"
        for index, stage in enumerate(plan.stages):
            if not has_even_shares(stage, plan.model.microbatch_size):
                yield (
                    f"predicted.bound_scope: {scope.value!r} does not speak of this plan: the"
                    f" shares of stages[{index}] are not even; it has to be {other}"
                )


def has_even_shares(stage: Stage, microbatch_size: int) -> bool:
    """Whether all shares are equal, or as equal as whole samples can be."""
    if stage.shares is None:
        return True
    k = len(stage.shares)
    even = [1 / k] * k
    fewer, with_one_more = divmod(microbatch_size, k)
    whole = [fewer / microbatch_size] * (k - with_one_more)
    whole += [(fewer + 1) / microbatch_size] * with_one_more
    ordered = sorted(stage.shares)
    return any(all(map(_is_same_share, ordered, expected)) for expected in (even, whole))


def _is_same_share(share: float, other: float) -> bool:
    return math.isclose(share, other, rel_tol=RELATIVE_TOLERANCE)
