"""What a program changes in a layer between steps, it changes on all replicas."""

import time
import types

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from pipeplan.runtime import Pipeline, RuntimeMismatchError  # noqa: E402
from runtime.samples import cut_plan  # noqa: E402
from runtime.workers import run_ranks  # noqa: E402


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.0)
        self.scale, self.factors, self.mode = 1.0, [1.0, 2.0], "plain"
        self.largest, self.num_calls = 0.0, 0

    def forward(self, x):
        self.largest = max(self.largest, float(x.detach().max()))  # other rows, other values
        self.num_calls += len(x)
        x = self.drop(self.layer(x)) * self.scale * sum(self.factors)
        return x.relu() if self.mode == "relu" else x


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 4))


def doubled(self, x):
    return self.layer(x) * 2


def twice(module, args, output):
    return output * 2


def patch_class(model):
    Scaled.forward = doubled


WRONG = {
    "1.scale": lambda model: setattr(model[1], "scale", 0.5),
    "1.mode": lambda model: setattr(model[1], "mode", "relu"),
    "1.forward": lambda model: setattr(model[1], "forward", types.MethodType(doubled, model[1])),
    "1.factors": lambda model: model[1].factors.append(3.0),
    "1.drop.p": lambda model: setattr(model[1].drop, "p", 0.5),
    "1.drop.training": lambda model: model[1].drop.eval(),
    "1._forward_hooks": lambda model: model[1].register_forward_hook(twice),
    "Scaled.forward": patch_class,
}
HARMLESS = {
    "alike": lambda model, rank: setattr(model[1], "scale", 0.5),
    "equal": lambda model, rank: setattr(model[1], "scale", float("1.0")) if rank else None,
    "unread": lambda model, rank: setattr(model, "started_s", time.time()),
    "path": lambda model, rank: setattr(model[1], "log_path", f"log-{rank}.txt"),
    "text": lambda model, rank: setattr(model[1], "mode", f"plain-{rank}"),
    "mode": lambda model, rank: model[1].drop.eval(),
    "hook": lambda model, rank: model[1].register_forward_hook(lambda *_: None),
}


def make_batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


def change_alone(rank, cuts, replicas, culprit):
    """What each change says; forward is as before afterwards."""
    said, forward = {}, Scaled.forward
    for name, change in WRONG.items():
        plan = cut_plan(list("012"), cuts, replicas, 2, 4)
        pipeline = Pipeline(
            plan, make_model(), nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1)
        )
        for step in range(3):
            pipeline.step(*make_batch(step))
        if rank == culprit:
            change(pipeline.model)
        use = pipeline.evaluate if name == "1.mode" else pipeline.step
        try:
            use(*make_batch(3))
            said[name] = ""
        except RuntimeMismatchError as error:
            said[name] = str(error)
        Scaled.forward = forward
        dist.barrier()
        pipeline.close()
    return said


@pytest.mark.parametrize(
    ("cuts", "replicas", "culprit", "ranks"),
    [
        ([0, 1], [1, 2], 1, (1, 2)),
        ([0, 1], [1, 2], 2, (1, 2)),
        ([0], [3], 1, (0, 1)),
        ([0], [3], 2, (0, 2)),
    ],
)
def test_a_layer_changed_on_one_replica_is_refused(cuts, replicas, culprit, ranks):
    """Whether sums have messages of their own, or ride behind gradients (one stage)."""
    for said in run_ranks(3, change_alone, cuts, replicas, culprit):
        for name, text in said.items():
            assert text.startswith(f"{name}: the program has changed it since the last step"), said
            assert f" on rank {ranks[1]}, but " in text, text
            assert f" on rank {ranks[0]}, which is a replica of the same stage" in text, text


def change_harmlessly(rank):
    plan = cut_plan(list("012"), [0, 1], [1, 2], 2, 4)
    with Pipeline(
        plan, make_model(), nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1)
    ) as pipeline:
        losses = [pipeline.step(*make_batch(0))]
        for step, change in enumerate(HARMLESS.values()):
            if rank:
                change(pipeline.model, rank)
            losses.append(pipeline.step(*make_batch(step)))
            pipeline.evaluate(*make_batch(step))
        if rank:
            losses.append(pipeline.model[1].num_calls > 0)
    return losses[:8]


def test_harmless_differences_pass():
    """Alike on all, of no influence, or of the rank; and what forwards themselves remember."""
    first, *others = run_ranks(3, change_harmlessly)
    assert all(losses == first for losses in others)
