"""The predicted figures of a finished draft."""

from pipeplan.figures import predicted_figures
from pipeplan.pipeline import Prediction
from pipeplan.planning.problem import Draft, Problem

__all__ = ["predict"]


def predict(problem: Problem, draft: Draft) -> Prediction:
    """The figures that a plan carries."""
    return predicted_figures(
        problem.cost,
        draft.stages,
        list(draft.codes),
        draft.iteration_ms,
        schedule_guarantee_ms=draft.schedule_guarantee_ms,
        bound=draft.bound,
    )
