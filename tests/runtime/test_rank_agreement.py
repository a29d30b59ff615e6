"""Ranks that are made or treated differently are refused; one group of three runs all scenes."""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.optim.lr_scheduler import ReduceLROnPlateau  # noqa: E402

from pipeplan.runtime import Pipeline, RuntimeMismatchError  # noqa: E402
from runtime.samples import cut_plan, make_mlp, mlp_loss  # noqa: E402
from runtime.workers import Ranks, run_ranks  # noqa: E402

NAMES = list("01234")


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def make_batch(number=0):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 12, generator=generator), torch.randn(8, 4, generator=generator)


def make_pipeline(cuts=(0, 2, 3), replicas=(1, 1, 1), **options):
    torch.manual_seed(0)
    plan = cut_plan(NAMES, list(cuts), list(replicas), 2, 4)
    return Pipeline(plan, make_mlp(), mlp_loss, sgd, **options)


OTHER_SETTINGS = {
    "clip_norm: is '1.0' on rank 2": {"clip_norm": 1.0},
    "metrics: is": {"metrics": {"error": mlp_loss}},
    "amp_dtype: is 'torch.bfloat16' on rank 2": {"amp_dtype": torch.bfloat16},
    "bucket_bytes: is '8' on rank 2": {"bucket_bytes": 8},
    "verify: is 'off' on rank 2": {"verify": "off"},
    "plan: is": {"cuts": (0, 1, 3)},
}


def other_settings(rank):
    said = {}
    for problem, options in OTHER_SETTINGS.items():
        with pytest.raises(RuntimeMismatchError) as caught:
            make_pipeline(**(options if rank == 2 else {}))
        said[problem] = str(caught.value)
        dist.barrier()
    return said


def test_ranks_with_other_settings_are_refused():
    for said in run_ranks(3, other_settings):
        for problem, line in said.items():
            assert line.startswith(problem), line
            assert line.endswith("make the pipeline in the same way on every rank")


def plateau(rank):
    with make_pipeline(scheduler_fn=lambda o: ReduceLROnPlateau(o, patience=0)) as pipeline:
        losses = [pipeline.step(*make_batch(0)) for _ in range(3)]
        losses += [pipeline.step(*make_batch(9)) for _ in range(3)]
        return losses, pipeline.optimizer.param_groups[0]["lr"]


def test_a_scheduler_that_needs_the_loss_gets_it():
    found = run_ranks(3, plateau)
    assert found[0] == found[1] == found[2]
    losses, rate = found[0]
    torch.manual_seed(0)
    optimizer = sgd(make_mlp().parameters())
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    for loss in losses:
        scheduler.step(loss)
    assert rate == optimizer.param_groups[0]["lr"] < 0.1


def step_with(change, replicas):
    def train(rank):
        with make_pipeline((0, 2), replicas) as pipeline:
            pipeline.step(*make_batch(0))
            if rank == 1:
                change(pipeline)
            for number in range(1, 6):
                pipeline.step(*make_batch(number))

    return train


def step_scheduler(pipeline):
    pipeline.optimizer.param_groups[0]["lr"] *= 0.5


@torch.no_grad()
def change_weights(pipeline):
    for parameter in pipeline.model.parameters():
        parameter.data.mul_(0.5)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (step_scheduler, "optimizer: rank 1 has other options than rank 0"),
        (change_weights, "has other values on other ranks that hold it"),
    ],
)
def test_a_rank_that_is_changed_alone_is_refused(change, problem):
    with Ranks(3, step_with(change, (2, 1))) as ranks:
        codes = ranks.wait()
        assert 0 not in codes
        assert None not in codes
        assert problem in "".join(ranks.error(rank) for rank in range(3))
