"""The comparison with the whole model, on real ranks: one group of four runs all scenes."""

import copy
import tempfile
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from pipeplan.runtime import Pipeline, RuntimeMismatchError, add_loss, collect_losses  # noqa: E402
from runtime.samples import TinyLanguageModel, cut_plan, make_mlp, mlp_loss, token_loss  # noqa: E402
from runtime.workers import run_ranks, share_from_first  # noqa: E402

LIST = ["before", "blocks.0", "blocks.1", "blocks.2", "behind"]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make_rows(count=8, steps=3):
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(count, 6, generator=generator), torch.randn(count, 6, generator=generator))
        for _ in range(steps)
    ]


def make_tokens(count=8, steps=3):
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(17, (count, 6), generator=generator) for _ in range(steps)]
    return [(batch[:, :-1], batch[:, 1:]) for batch in tokens]


def train_alone(model, loss_fn, data, num_parts=1):
    """Ordinary training; added losses are means over `num_parts` parts of the batch."""
    extra_parameters = list(loss_fn.parameters()) if isinstance(loss_fn, nn.Module) else []
    optimizer = sgd([*model.parameters(), *extra_parameters])
    losses = []
    for batch, targets in data:
        optimizer.zero_grad()
        total = 0.0
        for rows, aims in zip(batch.chunk(num_parts), targets.chunk(num_parts), strict=True):
            with collect_losses() as extra:
                loss = loss_fn(model(rows), aims)
            loss = (loss + sum(extra)) / num_parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()


def compare(plan, model, loss_fn, data, num_parts=1):
    """Train by the plan and alone; losses and parameters are the same."""
    reference, reference_loss = copy.deepcopy((model, loss_fn))
    with Pipeline(plan, model, loss_fn, sgd) as pipeline:
        losses = [pipeline.step(*batch) for batch in data]
        state = pipeline.full_state_dict()
    alone, expected = share_from_first(
        lambda: train_alone(reference, reference_loss, data, num_parts)
    )
    assert losses == pytest.approx(alone, rel=1e-5)
    if pipeline.rank == 0:
        for name, value in expected.items():
            assert torch.allclose(state[name], value, rtol=1e-4, atol=1e-5), name
        if isinstance(reference_loss, nn.Module):
            for name, value in reference_loss.state_dict().items():
                assert torch.allclose(state[f"loss_fn.{name}"], value, rtol=1e-4), name


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Balanced(Layer):
    """Adds a loss of its own."""

    def forward(self, x):
        y = super().forward(x)
        add_loss(0.3 * y.square().mean())
        return y


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("shift", torch.tensor(0.1))

    def forward(self, output, targets):
        return mlp_loss(output * self.scale + self.shift, targets)


def scene_added_losses(rank):
    for recompute in (False, True):
        torch.manual_seed(1)
        plan = cut_plan(["0", "1", "2"], [0, 1, 2], [1, 2, 1], 2, 4, recompute=recompute)
        # Means of squares over equal parts: the mean over the batch, however it is divided.
        compare(plan, nn.Sequential(Balanced(), Balanced(), Balanced()), mlp_loss, make_rows())


def scene_loss_module(rank):
    torch.manual_seed(2)
    plan = cut_plan(["0", "1", "2"], [0, 2], [2, 2], 2, 4)
    compare(plan, nn.Sequential(Layer(), Layer(), Layer()), Scaled(), make_rows())


class Shared(TinyLanguageModel):
    """Re-entrant checkpoints inside of layers that share weights."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.feed = self.blocks[0].feed
            block.forward = self.run_inside(block)

    def run_inside(self, block):
        def forward(x):
            y = block.norm(x)
            x = x + block.attention(y, y, y, need_weights=False)[0]
            x = x + checkpoint(block.feed, x, use_reentrant=True)
            return x + checkpoint(block.feed, x, use_reentrant=True)

        return forward


def scene_reentrant_checkpoints(rank):
    for microbatches in (1, 2):
        torch.manual_seed(3)
        plan = cut_plan(LIST, [0, 2], [2, 2], microbatches, 4)
        model = Shared()
        data = make_tokens(4 * microbatches)
        torch.manual_seed(3)
        reference = Shared()
        with Pipeline(plan, model, token_loss, sgd) as pipeline:
            found = [pipeline.step(*batch) for batch in data]
        alone = share_from_first(lambda: train_alone(reference, token_loss, data)[0])  # noqa: B023
        assert found == pytest.approx(alone, rel=1e-5)


class Past(TinyLanguageModel):
    def forward(self, tokens):
        first = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first))


def scene_refusals(rank):
    """All ranks raise the same line, and nothing hangs."""
    plan = cut_plan(LIST, [0, 2, 4], [2, 1, 1], 2, 4)
    torch.manual_seed(4)
    start_s = time.monotonic()
    with (
        pytest.raises(RuntimeMismatchError, match="use values of other stages that no layer"),
        Pipeline(plan, Past(), token_loss, sgd) as pipeline,
    ):
        pipeline.step(*make_tokens()[0])
    assert time.monotonic() - start_s < 20
    with pytest.raises(RuntimeMismatchError, match="verify: is 'never'"):
        Pipeline(plan, Past(), token_loss, sgd, verify="never")
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeMismatchError, match=r"a parameter of shape \(3,\) that it was not"):
        Pipeline(plan, TinyLanguageModel(), token_loss, lambda found: sgd([*found, weight]))


class OnlyWhole(nn.Sequential):
    """Works as a chain of layers, but not as a model."""

    def forward(self, x):
        raise ValueError("not like this")


def scene_whole_model_raises(rank):
    plan = cut_plan(["0", "1"], [0, 1], [2, 2], 2, 4)
    with Pipeline(plan, OnlyWhole(Layer(), Layer()), mlp_loss, sgd) as pipeline:
        before = copy.deepcopy(pipeline.model.state_dict())
        with pytest.raises(RuntimeMismatchError, match=r"whole model raises on 2 rows.*not like"):
            pipeline.step(*make_rows()[0])
        for name, value in pipeline.model.state_dict().items():
            assert torch.equal(value, before[name]), name


def scene_off(rank):
    plan = cut_plan(list("01234"), [0, 2], [2, 2], 2, 4)
    torch.manual_seed(5)
    data = torch.randn(8, 12), torch.randn(8, 4)
    losses = []
    for verify in ("first-step", "off"):
        torch.manual_seed(5)
        with Pipeline(plan, make_mlp(), mlp_loss, sgd, verify=verify) as pipeline:
            held = pipeline._replica.held.rest.tensors
            assert bool(held) == (verify == "first-step" and pipeline.replica == 0)
            losses.append([pipeline.step(*data) for _ in range(2)])
            assert not pipeline._replica.held.rest.tensors
    assert losses[0] == losses[1]  # the comparison leaves no trace


def scene_loaded_checkpoints(rank):
    """A stage that was loaded differs from the whole model's; only the cut is compared."""
    plan = cut_plan(LIST, [0, 2], [2, 2], 2, 4)
    folder = share_from_first(tempfile.mkdtemp)
    for loads in (False, True):
        torch.manual_seed(6)
        with Pipeline(plan, TinyLanguageModel(tied=True), token_loss, sgd) as pipeline:
            if loads:
                assert pipeline.load(folder)
            pipeline.step(*make_tokens()[0])
            if not loads:
                pipeline.save(folder)


def scene_unequal_builds(rank):
    """Ranks that draw other weights are refused; else they train one model all the same."""
    plan = cut_plan(LIST, [0, 2], [2, 2], 2, 4)
    with torch.random.fork_rng():
        torch.manual_seed(100 + rank)
        model = TinyLanguageModel(tied=True)
    pipeline = Pipeline(plan, copy.deepcopy(model), token_loss, sgd)
    with pytest.raises(RuntimeMismatchError, match="has other values on rank 1"):
        pipeline.step(*make_tokens()[0])
    dist.barrier()
    pipeline.close()
    with Pipeline(plan, model, token_loss, sgd, verify="off") as pipeline:
        assert pipeline.step(*make_tokens()[0]) > 0


class Forgets(Layer):
    """Changes the batch in place, keeps its first rows in a global, has a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(2)

    def forward(self, x):
        y = super().forward(x.mul_(0.5))
        if "mean" not in FIRST:
            FIRST["mean"] = y.detach().mean(0)
        return y - FIRST["mean"] + torch.rand(6, generator=self.generator)


FIRST = {}


def scene_nothing_is_left_behind(rank):
    """The comparison puts back what it finds: training is that of a model that nobody compared."""
    data = make_rows()
    torch.manual_seed(6)
    FIRST.clear()
    reference = nn.Sequential(Forgets(), Layer())
    model = nn.Sequential(Forgets(), Layer())
    model.load_state_dict(reference.state_dict())
    with Pipeline(
        cut_plan(["0", "1"], [0, 1], [1, 1], 2, 4, num_devices=4), model, mlp_loss, sgd
    ) as p:
        losses = [p.step(*batch) for batch in data]
        p.full_state_dict()
    assert all(map(torch.equal, data[0], make_rows()[0]))
    FIRST.clear()
    assert losses == pytest.approx(train_alone(reference, mlp_loss, data, 2)[0], rel=1e-5)


def scene_schedulers(rank):
    """The scheduler of `scheduler_fn` steps after each update, and is saved."""
    lines = []
    folder = share_from_first(tempfile.mkdtemp)
    plan = cut_plan(list("01234"), [0, 2], [2, 2], 2, 4)
    rates = []
    for steps in (3, 5):
        with Pipeline(
            plan,
            make_mlp(),
            mlp_loss,
            sgd,
            scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            on_step=lambda result: lines.append((result.learning_rates[0], str(result))),
        ) as pipeline:
            pipeline.load(folder)
            while pipeline.num_steps < steps:
                pipeline.step(torch.ones(8, 12), torch.ones(8, 4), update=False)
                pipeline.step(torch.ones(8, 12), torch.ones(8, 4))
            pipeline.save(folder)
            rates.append(pipeline.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1 / 8, 0.1 / 32])
    expected = [0.1 / 2**step for step in range(5) for _ in range(2)]
    assert [rate for rate, _ in lines] == pytest.approx(expected)
    assert lines[-1][1].startswith("step 5  loss ")


def scene_refused_at_the_start(rank):
    plan = cut_plan(["0", "1"], [0, 1], [2, 2], 2, 4)
    model = nn.Sequential(Layer(), Layer())
    for optimizer_fn, problem in ((torch.optim.LBFGS, "LBFGS.step needs 'closure'"),):
        with pytest.raises(RuntimeMismatchError, match=problem):
            Pipeline(plan, model, mlp_loss, optimizer_fn)
    with pytest.raises(RuntimeMismatchError, match="another Pipeline has cut it"):
        Pipeline(plan, model, mlp_loss, sgd)
    model = nn.Sequential(Layer(), Layer())
    model[1].linear.weight = nn.Parameter(model[0].linear.weight.data)
    with pytest.raises(RuntimeMismatchError, match="different tensors in the same memory"):
        Pipeline(plan, model, mlp_loss, sgd)
    model = nn.Sequential(Layer(), Layer())
    model[0].linear.bias.register_hook(torch.sign)
    with pytest.raises(RuntimeMismatchError, match="has a hook that needs its whole gradient"):
        Pipeline(plan, model, mlp_loss, sgd)


SCENES = {name: scene for name, scene in sorted(globals().items()) if name.startswith("scene_")}


def play(rank):
    for scene in SCENES.values():
        scene(rank)
        torch.distributed.barrier()
    return list(SCENES)


def test_all_scenes():
    assert run_ranks(4, play, timeout_s=120)[0] == list(SCENES)
