"""Several plans on one scale of time, as a section of the page."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeplan.pipeline import Plan
from pipeplan.report.analysis.plan_analysis import PlanAnalysis, analyse
from pipeplan.report.elements import Markup
from pipeplan.report.names import short_text
from pipeplan.report.timeline_picture import timeline_svg
from pipeplan.report.units import humanise_gb, humanise_ms, percent

__all__ = ["Beside", "MeasuredPlan", "SideBySide", "side_by_side"]

WIDTH = 1180


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """A plan with the times of a run instead of its own."""

    analysis: PlanAnalysis
    facts: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """Plans to draw beside each other: by title, and what to say of them."""

    heading: str
    words: str
    plans: Mapping[str, Plan | MeasuredPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """One of the plans as the page shows it."""

    title: str
    iteration: str
    facts: str
    picture: Markup


def side_by_side(shown: SideBySide) -> list[Beside]:
    """The plans with their timelines, all as long as the longest iteration."""
    analyses = {
        title: plan.analysis if isinstance(plan, MeasuredPlan) else analyse(plan)
        for title, plan in shown.plans.items()
    }
    longest_ms = max(analysis.iteration_ms for analysis in analyses.values())
    last = list(analyses)[-1]
    return [
        Beside(
            title=short_text(title, 60),
            iteration=humanise_ms(analysis.iteration_ms),
            facts=_facts_of(shown.plans[title], analysis),
            picture=timeline_svg(
                analysis, WIDTH, title=False, legend=title == last, span_ms=longest_ms
            ),
        )
        for title, analysis in analyses.items()
    ]


def _facts_of(plan: Plan | MeasuredPlan, analysis: PlanAnalysis) -> str:
    return plan.facts if isinstance(plan, MeasuredPlan) else _facts(analysis)


def _facts(analysis: PlanAnalysis) -> str:
    peak_gb = max(max(memory.peak_gb) for memory in analysis.memory)
    over = any(not need.fits for memory in analysis.memory for need in memory.needs)
    stages = "1 stage" if analysis.num_stages == 1 else f"{analysis.num_stages} stages"
    return (
        f"{stages} on {analysis.num_used_devices} devices, {percent(1 - analysis.shares.compute)}"
        f" bubble, {humanise_gb(peak_gb)} at most{', which does not fit' if over else ''}"
    )
