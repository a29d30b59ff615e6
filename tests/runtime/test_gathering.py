"""Ranks that call different methods are told so, and never read each other's values."""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pipeplan.runtime import Pipeline, RuntimeMismatchError  # noqa: E402
from pipeplan.runtime.gathering import READING_STATE, STEPPING, gather  # noqa: E402
from runtime.samples import cut_plan, make_mlp, mlp_loss  # noqa: E402
from runtime.workers import run_ranks  # noqa: E402


def refusal(call):
    try:
        return call()
    except RuntimeMismatchError as error:
        return str(error)


def gather_unlike(rank):
    everyone = [None] * dist.get_world_size()
    return [
        refusal(lambda: gather(rank, STEPPING)),
        refusal(lambda: gather(rank, READING_STATE if rank else STEPPING)),
        refusal(lambda: gather(rank, STEPPING))
        if rank
        else dist.all_gather_object(everyone, "the program's own"),
    ]


def test_values_come_with_what_ranks_are_doing():
    first, second = run_ranks(2, gather_unlike)
    assert first[0] == second[0] == [0, 1]
    assert "rank 1 asks for the full state while rank 0 runs a step" in first[1]
    assert "rank 0 runs a step or an evaluation while rank 1 asks for the full" in second[1]
    assert "rank 0 calls a collective of its own while rank 1 runs a step" in second[2]


def step_on_one(rank):
    torch.manual_seed(0)
    plan = cut_plan([str(n) for n in range(5)], [0, 2], [1, 1], 2, 4)
    pipeline = Pipeline(
        plan, make_mlp(), mlp_loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    batch = torch.ones(8, 12), torch.ones(8, 4)
    call = pipeline.full_state_dict if rank else lambda: pipeline.step(*batch)
    text = refusal(call)
    dist.barrier()
    pipeline.close()
    return text


def test_the_first_step_on_one_rank_and_the_state_on_another():
    for text in run_ranks(2, step_on_one):
        assert "call the same methods of the pipeline in the same order on all ranks" in text
        assert "\n" not in text
