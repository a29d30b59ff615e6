"""The predicted figures of a finished draft."""

from pipeplan.figures import group_figures, predicted_figures
from pipeplan.pipeline import Prediction
from pipeplan.planning.problem import Draft, Problem

__all__ = ["predict"]


def predict(problem: Problem, draft: Draft) -> Prediction:
    """The figures that a plan carries."""
    if draft.orders or draft.shard_optimizer:
        schedule = draft.schedule
        return group_figures(
            problem.cost,
            draft.stages,
            [schedule.group_codes(group) for group in range(len(schedule))],
            draft.iteration_ms,
            num_microbatches=problem.num_microbatches,
            shard_optimizer=draft.shard_optimizer,
            bound=draft.bound,
        )
    return predicted_figures(
        problem.cost,
        draft.stages,
        list(draft.codes),
        draft.iteration_ms,
        schedule_guarantee_ms=draft.schedule_guarantee_ms,
        bound=draft.bound,
    )
