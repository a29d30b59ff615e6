"""Shared links over time for the page: one row for each direction of each link, busiest first."""

import numpy as np

from pipeplan.report.analysis.plan_analysis import PlanAnalysis
from pipeplan.report.analysis.shared_links import LinkUse
from pipeplan.report.elements import Markup, element, join
from pipeplan.report.names import short_text

__all__ = ["shared_links_rows"]

MAX_ROWS = 24
"""Of more links the busiest are shown."""
COLUMNS, HEIGHT = 480, 22


def shared_links_rows(analysis: PlanAnalysis) -> Markup:
    """What each shared link carries during the iteration; empty if none is used."""
    use = analysis.shared_use
    if not use.links:
        return Markup("")
    ranked = sorted(use.links, key=lambda link: -link.busy)
    parts = [
        element("h3", "Shared links over time"),
        element(
            "div",
            *(_row(link, analysis.iteration_ms) for link in ranked[:MAX_ROWS]),
            class_="shared-links",
        ),
        element("p", _note(analysis, len(ranked)), class_="note"),
    ]
    return join(parts)


def _note(analysis: PlanAnalysis, num_links: int) -> str:
    slowed = len(analysis.shared_use.slowed)
    words = (
        f"{slowed} transfers and all-reduces take longer than alone, because they share a full"
        " link. The timeline underlines them, and says what slowed each of them."
        if slowed
        else "No two transfers slow each other."
    )
    if num_links > MAX_ROWS:
        words += f" The busiest {MAX_ROWS} of {num_links} are shown."
    return words


def _row(link: LinkUse, iteration_ms: float) -> Markup:
    name = f"{short_text(link.name, 32)} ({link.direction})"
    numbers = f"{100 * link.busy:.0f} % busy, {100 * link.full:.0f} % of the time full"
    picture = element(
        "svg",
        element("path", d=_outline(link, iteration_ms)),
        class_="use",
        viewBox=f"0 0 {COLUMNS} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{name} over time: {numbers}",
    )
    return element(
        "div",
        element("span", name, element("small", f"{link.gb_per_s:.3g} GB/s"), class_="what"),
        picture,
        element("span", numbers, class_="how-much"),
        class_="shared-link",
    )


def _outline(link: LinkUse, iteration_ms: float) -> str:
    """The mean use in each column, as an area; columns of equal height become one."""
    edges_ms = np.linspace(0.0, iteration_ms or 1.0, COLUMNS + 1)
    until_ms = np.append(link.times_ms, max(float(edges_ms[-1]), float(link.times_ms[-1])))
    carried = np.append(0.0, np.cumsum(np.diff(until_ms) * link.used))
    mean_K = np.diff(np.interp(edges_ms, until_ms, carried)) / np.diff(edges_ms)
    heights = np.round(HEIGHT * (1 - np.clip(mean_K, 0.0, 1.0)), 1).tolist()
    steps, before = [f"M0 {HEIGHT}"], float(HEIGHT)
    for column, y in enumerate(heights):
        if y != before:
            steps.append(f"H{column}V{y:g}")
            before = y
    return "".join([*steps, f"H{COLUMNS}V{HEIGHT}Z"])
