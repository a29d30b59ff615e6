"""Compares a running plan with its prediction after some steps, and says what a new plan would win.

Rank 0 gathers what all ranks did in one step, corrects model and cluster by it, and plans anew. The
pipeline goes on with its plan. Another start with the new plan continues from a checkpoint.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from pipeplan.calibration.measured_run import Span, make_run
from pipeplan.errors import InputError, PipeplanError
from pipeplan.pipeline import Plan
from pipeplan.runtime.supervision.ending import print_line
from pipeplan.runtime.tracing import MS_IN_S, WAIT, RankTrace
from pipeplan.validation import COUNT, require_count

if TYPE_CHECKING:
    from pipeplan.calibration.door import Calibration

__all__ = ["OnReplan", "Replanning"]

OnReplan = Callable[["Calibration"], None]
MAX_SAID = 4
"""Of more findings the first ones are said."""


class Replanning:
    """Looks at one step of a pipeline; `replan_after` None is never."""

    def __init__(self, replan_after: int | None, on_replan: OnReplan | None) -> None:
        if replan_after is not None:
            require_count(InputError, "replan_after", replan_after, COUNT)
        self._after, self._on_replan = replan_after, on_replan

    def is_due(self, num_steps: int) -> bool:
        """Whether this step is the one to look at."""
        return num_steps == self._after

    def look(self, plan: Plan, traces: Sequence[RankTrace]) -> None:
        """Say on rank 0 what differs and what a new plan would win; an error ends nothing."""
        from pipeplan.calibration.door import calibrate  # planning takes a moment to load

        try:
            found = calibrate(plan, make_run(plan, _spans(plan, traces)))
        except PipeplanError as error:
            print_line(f"replan_after: this step cannot be compared with the plan: {error}")
            return
        said = [finding.words for finding in found.findings]
        more = f"; and {len(said) - MAX_SAID} more" if len(said) > MAX_SAID else ""
        words = "; ".join(said[:MAX_SAID]) or "all as predicted"
        print_line(
            f"step {self._after} took {found.measured_ms:.1f} ms, predicted"
            f" {found.predicted_ms:.1f} ms: {words}{more}"
        )
        print_line(found.gain_words)
        if self._on_replan is not None:
            self._on_replan(found)


def _spans(plan: Plan, traces: Sequence[RankTrace]) -> Iterator[Span]:
    """What each device did, in ms since the first rank began the step."""
    used = [trace for trace in traces if trace.stages]
    start_s = min(trace.start_s - trace.zero_s for trace in used)
    for trace in used:
        device = plan.stages[trace.stages[0]].devices[trace.replica]
        for event in trace.events:
            if event.category != WAIT:
                start_ms, end_ms = (
                    (moment_s - trace.zero_s - start_s) * MS_IN_S
                    for moment_s in (event.start_s, event.end_s)
                )
                yield Span(device, event.name, start_ms, end_ms)
