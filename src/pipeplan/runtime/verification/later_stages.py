"""Compares a rank's stages with the whole model again, behind some later batch.

Before the first step only a few rows are looked at. A model may do something else with as many rows
as a microbatch has, or since some step: keep something in a global that another stage reads, for
example. So this is done with one microbatch. The whole model runs on this rank, with the tensors
of other stages, and begins with what this rank remembers, as its stages do. So whatever
differs between the two is an error, even if ranks remember different things.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.verification.differences import (
    Difference,
    find_difference,
    is_of_memory,
    raised,
)
from pipeplan.runtime.verification.runs import run_stage, run_whole
from pipeplan.runtime.verification.stage_calls import Sample, StageCalls

__all__ = ["find_in_stages"]


def find_in_stages(
    stages: Sequence[StageCalls],
    sample: Sample,
    held_by: Mapping[str, set[int]],
    being_whole: Callable[[], AbstractContextManager[Any]],
) -> str | None:
    """One line about the first stage of this rank that is not what the whole model is there.

    Inside of `being_whole` the model is whole. Parameters that several stages hold are left out:
    their gradients are sums.
    """
    for stage in stages:
        shared = [name for name in stage.parameters if len(held_by[name]) > 1]
        found = _compare(stage, sample, shared, being_whole)
        if found is not None:
            return f"{found.text} (in a later step than the first one)"
    return None


def _compare(
    stage: StageCalls,
    sample: Sample,
    shared: Sequence[str],
    being_whole: Callable[[], AbstractContextManager[Any]],
) -> Difference | None:
    with being_whole():
        state = stage.state()
        try:
            whole = run_whole(stage, [sample], trains=True)
        except Exception as error:
            if is_of_memory(error):
                raise
            return None  # ranks compare whether it raises
        finally:
            state.put_back()
    state = stage.state()
    try:
        cut = run_stage(stage, [sample], whole, trains=True)
    except RuntimeMismatchError as error:
        return Difference(text=str(error), is_in_forward=True)
    except Exception as error:
        if is_of_memory(error):
            raise
        return raised(stage.module, whole, error)
    finally:
        state.put_back()
    return find_difference(stage, whole, cut, shared=shared)
