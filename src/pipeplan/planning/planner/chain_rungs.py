"""Rungs of effort, which the search for chains climbs one by one.

More effort climbs further, from what the rungs below have found, and never redoes a rung in another
way. So more effort never gives a slower plan. Effort between two rungs counts as the lower one.
"""

from dataclasses import dataclass
from itertools import pairwise

__all__ = ["USUAL_EFFORT", "Rung", "rungs_up_to"]

EFFORTS = (0.01, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
USUAL_EFFORT = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One search, from the best plans so far."""

    number: int
    budget: float
    """The effort of this rung alone."""
    one_stage_effort: float
    """With which the plan with one stage a device is made that this rung knows. Below the usual
    effort the quickest one is enough."""


def rungs_up_to(effort: float) -> list[Rung]:
    """The rungs that this effort climbs."""
    return [
        Rung(
            number=number,
            budget=top - below,
            one_stage_effort=top if top >= USUAL_EFFORT else EFFORTS[0],
        )
        for number, (below, top) in enumerate(pairwise((0.0, *EFFORTS)))
        if top <= effort * (1 + 1e-9)
    ]
