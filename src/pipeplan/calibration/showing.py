"""A calibration in the terminal."""

from rich.console import Group, RenderableType
from rich.text import Text

from pipeplan.calibration.door import Calibration
from pipeplan.report.units import humanise_ms, signed_percent

__all__ = ["render_calibration"]


def render_calibration(found: Calibration) -> RenderableType:
    """What differs, and what a new plan would win."""
    change = found.measured_ms / found.predicted_ms - 1 if found.predicted_ms else 0.0
    lines = [
        Text(
            f"A step took {humanise_ms(found.measured_ms)}, predicted were"
            f" {humanise_ms(found.predicted_ms)} ({signed_percent(change)}).",
            style="bold",
        )
    ]
    lines += [Text(f"- {finding.words}") for finding in found.findings]
    if not found.findings:
        lines.append(Text("No device, layer or link differs by more than 5 %."))
    else:
        lines.append(
            Text(f"With this the same plan would take {humanise_ms(found.kept.iteration_ms)}.")
        )
    if found.replanned is not None:
        lines.append(Text(found.gain_words, style="bold"))
    return Group(*lines)
