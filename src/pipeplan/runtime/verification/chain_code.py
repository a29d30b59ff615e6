"""Looks at the forward that a model has itself where its layers are a chain: no stage runs that.

Here it runs on a few rows, with its layers and without them. Later the first stage rehearses it for
each microbatch (`splitting.rehearsals`).
"""

from collections.abc import Mapping

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.verification.between_layers import find_operation
from pipeplan.runtime.verification.differences import Difference
from pipeplan.runtime.verification.stage_calls import Result, Sample, StageCalls
from pipeplan.splitting.rehearsals import (
    Outline,
    Outlines,
    Rehearsal,
    does_its_own,
    outline,
    shapes_of,
)

__all__ = ["look_at_chain"]


def look_at_chain(
    stage: StageCalls, sample: Sample, wholes: Mapping[bool, Result]
) -> tuple[Difference | None, Outlines | None]:
    """What is lost between layers, and what a rehearsal needs; one stage is enough to see it.

    `wholes` are the results of the whole model, in training and in evaluation.
    """
    if not stage.module.is_first:
        return None, None
    found = _find_between(stage, sample)
    outlines = _outlines_of(stage, sample, wholes) if found is None else None
    if outlines is not None:
        found = _rehearse(stage, sample, outlines)
    # A stage whose values differ can say more.
    return Difference(text=found, is_in_forward=False) if found else None, outlines


def _find_between(stage: StageCalls, sample: Sample) -> str | None:
    with stage.module.whole():
        state = stage.state()
        try:
            return find_operation(stage, sample)
        finally:
            state.put_back()


def _outlines_of(
    stage: StageCalls, sample: Sample, wholes: Mapping[bool, Result]
) -> Outlines | None:
    """What each layer of a chain returns; None if its forward need not or cannot be rehearsed."""
    module = stage.module
    with module.whole() as model:
        if not does_its_own(model, module.layout):
            return None
    found: dict[bool, list[Outline]] = {True: [], False: []}
    for trains, whole in wholes.items():
        for atom in range(len(module.layout.atoms)):
            call = whole.calls[0].get(atom)
            if call is None or call.output is None:
                return None
            try:
                found[trains].append(outline(call.output.value))
            except RuntimeMismatchError:  # a layer returns what cannot cross a cut
                return None
    return Outlines(of_layers=found, inputs=shapes_of(*sample.call))


def _rehearse(stage: StageCalls, sample: Sample, outlines: Outlines) -> str | None:
    module, state = stage.module, stage.state()
    rehearsal = Rehearsal(module.model, module.layout, module.held.standing, outlines)
    rehearsal.has_told = True  # the one of training will say it
    try:
        rehearsal.run(*sample.copied().call)
    except RuntimeMismatchError as error:
        return str(error)
    finally:
        state.put_back()
    return None
