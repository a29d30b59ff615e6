"""What training by a plan means beyond plain layers: one group of four ranks runs all scenes."""

import copy
import tempfile
from collections import UserDict
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from pipeplan import write_plan  # noqa: E402
from pipeplan.runtime import Pipeline, RuntimeMismatchError, Whole  # noqa: E402
from pipeplan.runtime.exchange.contents import describe  # noqa: E402
from pipeplan.runtime.scaling import LossScaler  # noqa: E402
from runtime.samples import TinyLanguageModel, cut_plan, make_mlp, mlp_loss, token_loss  # noqa: E402
from runtime.workers import run_ranks, share_from_first  # noqa: E402

NUM_RANKS = 4
LANGUAGE_NAMES = ["before", "blocks.0", "blocks.1", "blocks.2", "behind"]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def train_alone(model, loss_fn, data, clip_norm=None, call=None):
    optimizer = sgd(model.parameters())
    losses = []
    for batch, targets in data:
        optimizer.zero_grad()
        loss = loss_fn(call(model, batch) if call else model(batch), targets)
        loss.backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def compare(plan, model, loss_fn, data, *, call=None, clip_norm=None, **options):
    """Train by the plan and alone; assert that losses and parameters are the same."""
    reference = copy.deepcopy(model)
    with Pipeline(plan, model, loss_fn, sgd, clip_norm=clip_norm, **options) as pipeline:
        losses = [pipeline.step(batch, targets) for batch, targets in data]
        state = pipeline.full_state_dict()
    if pipeline.rank == 0:
        alone, expected = train_alone(
            reference, options.get("alone_loss", loss_fn), data, clip_norm, call
        )
        assert losses == pytest.approx(alone, rel=1e-5)
        assert set(state) == set(expected)
        for name, value in expected.items():
            assert torch.allclose(state[name], value, rtol=1e-4, atol=1e-6), name
    return losses


class Pairs(nn.Module):
    """Carries a tuple: floats, whole numbers, and a mask."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.embed = nn.Embedding(9, 6)

    def forward(self, x, index, mask):
        y = torch.tanh(self.linear(x) + self.embed(index)) * mask.unsqueeze(1)
        return y, (index + 1) % 9, ~mask


class PairsModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({str(i): Pairs() for i in range(4)})

    def forward(self, *values):
        for part in self.parts.values():
            values = part(*values)
        return values


def scene_tuples(rank):
    torch.manual_seed(1)
    names = [f"parts.{i}" for i in range(4)]
    data = [
        ((torch.randn(9, 6), torch.randint(9, (9,)), torch.rand(9) < 0.7), torch.randn(9, 6))
        for _ in range(3)
    ]
    plan = cut_plan(names, [0, 1, 3], [1, 2, 1], 3, 3)
    compare(plan, PairsModel(), lambda out, t: mlp_loss(out[0], t), data, call=lambda m, b: m(*b))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, mask=None, scale=None):
        x = torch.tanh(self.linear(x)) * scale.sum()
        return x if mask is None else x * mask


class MaskedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Masked(), Masked(), Masked()

    def forward(self, x, mask, scale):
        for part in (self.a, self.b, self.c):
            x = part(x, mask=mask, scale=scale)
        return x


def scene_keywords(rank):
    torch.manual_seed(2)
    scale = torch.tensor([0.2, 0.7, 0.3])
    data = [
        (
            {
                "x": torch.randn(8, 6),
                "mask": (torch.rand(8, 6) < 0.5).float(),
                "scale": Whole(scale),
            },
            torch.randn(8, 6),
        )
        for _ in range(3)
    ]

    def call(model, batch):
        return model(batch["x"], batch["mask"], scale)

    plan = cut_plan(["a", "b", "c"], [0, 1, 2], [2, 1, 1], 2, 4)
    compare(plan, MaskedModel(), mlp_loss, data, call=call)


def scene_token_weights(rank):
    def loss_fn(output, targets):
        return nn.functional.cross_entropy(
            output.flatten(0, 1), targets.flatten(), ignore_index=-100
        )

    torch.manual_seed(3)
    data = []
    for _ in range(3):
        tokens = torch.randint(17, (8, 6))
        targets = tokens[:, 1:].clone()
        targets[torch.rand(8, 5) < 0.4] = -100
        targets[:3] = -100  # a replica, and a whole microbatch, without any token
        data.append((tokens[:, :-1], targets))
    plan = cut_plan(LANGUAGE_NAMES, [0, 2], [1, 2], 4, 2, num_devices=4)
    compare(
        plan,
        TinyLanguageModel(tied=True),
        loss_fn,
        data,
        loss_weight_fn=lambda targets: (targets != -100).sum(),
    )


def make_normed():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 4))


def scene_batch_norm(rank):
    """Each replica normalises over its rows of a microbatch; the first one's means are kept."""
    data = [(torch.randn(8, 5), torch.randn(8, 4)) for _ in range(2)]
    for recompute in (False, True):
        plan = cut_plan(["0", "1", "2", "3"], [0, 1, 2], [1, 2, 1], 2, 4, recompute=recompute)
        model = make_normed()
        with Pipeline(plan, model, mlp_loss, sgd) as pipeline:
            for batch in data:
                pipeline.step(*batch)
            state = pipeline.full_state_dict()
        if rank != 0:
            continue
        reference, first = make_normed(), nn.BatchNorm1d(6)
        optimizer = sgd(reference.parameters())
        for inputs, targets in data:
            optimizer.zero_grad()
            for start in (0, 4):
                x = reference[0](inputs[start : start + 4])
                halves = []
                for replica in (0, 1):
                    norm = reference[1] if replica else first
                    norm.weight, norm.bias = reference[1].weight, reference[1].bias
                    halves.append(norm(x[2 * replica : 2 * replica + 2]))
                y = reference[3](torch.relu(torch.cat(halves)))
                (mlp_loss(y, targets[start : start + 4]) / 2).backward()
            optimizer.step()
        for name, value in first.state_dict().items():
            assert torch.allclose(state[f"1.{name}"], value, rtol=1e-4), (recompute, name)
        assert torch.allclose(state["0.weight"], reference[0].weight, rtol=1e-4, atol=1e-6)


def make_normed_and_dropping():
    return nn.Sequential(*make_normed()[:3], nn.Sequential(nn.Dropout(), nn.Linear(6, 4)))


def scene_evaluation(rank):
    """An evaluation is the model's own in eval mode, and leaves training as it was."""
    data = [(torch.randn(8, 5), torch.randn(8, 4)) for _ in range(2)]
    plan = cut_plan(["0", "1", "2", "3"], [0, 1, 3], [1, 2, 1], 2, 4, schedule="pe")
    metrics = {"size": lambda output, targets: output.abs().mean()}
    runs = []
    for evaluates in (False, True):
        model = make_normed_and_dropping()
        with Pipeline(plan, model, mlp_loss, sgd, metrics=metrics) as pipeline:
            losses = [pipeline.step(*data[0])]
            if evaluates:
                loss, size = pipeline.evaluate(*data[1]), pipeline.metrics["size"]
                state = pipeline.full_state_dict()
                pipeline.evaluate(data[1][0][:5], data[1][1][:5])
            losses.append(pipeline.step(*data[1]))
            assert pipeline.model is None or all(m.training for m in pipeline.model.modules())
        runs.append(losses)
    assert runs[0] == runs[1]
    if rank == 0:
        reference = make_normed_and_dropping().eval()
        reference.load_state_dict(state)
        output = reference(data[1][0])
        assert loss == pytest.approx(mlp_loss(output, data[1][1]).item(), rel=1e-5)
        assert size == pytest.approx(output.abs().mean().item(), rel=1e-5)


def make_dropping():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5))


def scene_dropout(rank):
    data = [(torch.ones(8, 5), torch.zeros(8, 64)) for _ in range(3)]

    def losses(seed=0, **options):
        plan = cut_plan(["0", "1", "2", "3"], [0, 2], [2, 1], 2, 4, num_devices=4, **options)
        before = torch.random.get_rng_state()
        with Pipeline(plan, make_dropping(), mlp_loss, sgd, seed=seed) as pipeline:
            state_before = torch.random.get_rng_state()
            result = [pipeline.step(*batch) for batch in data]
            assert torch.equal(state_before, torch.random.get_rng_state())
            outputs = pipeline.full_state_dict()
        torch.random.set_rng_state(before)
        return result, outputs

    first, state = losses()
    again, state_again = losses()
    assert first == again
    assert losses(seed=1)[0] != first
    assert losses(recompute=True)[0] == first
    if rank == 0:
        assert all(torch.equal(state[name], state_again[name]) for name in state)


def scene_clip(rank):
    torch.manual_seed(6)
    data = []
    for _ in range(3):
        tokens = torch.randint(17, (6, 6))
        data.append((tokens[:, :-1], tokens[:, 1:]))
    plan = cut_plan(LANGUAGE_NAMES, [0, 1, 4], [1, 2, 1], 3, 2)
    compare(plan, TinyLanguageModel(tied=True), token_loss, data, clip_norm=0.3)


class CountCasts(TorchDispatchMode):
    """How often a square matrix is cast to bfloat16."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and output.dtype is torch.bfloat16:
            self.count += output.shape == (12, 12)
        return output


def scene_bf16(rank):
    torch.manual_seed(7)
    model = make_mlp()
    reference = copy.deepcopy(model)
    data = [(torch.randn(8, 12), torch.randn(8, 4)) for _ in range(4)]
    plans = [
        cut_plan(list("01234"), [0, 2], [2, 2], 2, 4),
        cut_plan(list("01234"), [0, 2], [2, 2], 2, 4, recompute=True),
    ]
    both = []
    for plan in plans:
        part = copy.deepcopy(model)
        with Pipeline(plan, part, mlp_loss, sgd, amp_dtype=torch.bfloat16) as pipeline:
            losses = [pipeline.step(*batch) for batch in data]
            sent = pipeline._replica.parts[0].exchange.forecasts[pipeline.stage]._of_key.values()
            lanes = [lane for step in sent for lane in (step.forward, step.backward)]
            forecasts = [forecast for lane in lanes for forecast in lane._of_slot.values()]
            dtypes = {kind.dtype for forecast in forecasts for kind in forecast.contents.kinds}
            assert dtypes == ({torch.bfloat16} if pipeline.stage == 0 else set())
            pipeline.step(*data[0])  # batch 4: ranks run the whole model behind it
            with CountCasts() as casts:
                pipeline.step(*data[0])
            if plan is plans[0]:  # not once more for each microbatch
                assert casts.count == 2
        both.append(losses)
    assert both[0] == pytest.approx(both[1], rel=1e-3)

    def alone():
        optimizer = sgd(reference.parameters())
        result = []
        for inputs, targets in data:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mlp_loss(reference(inputs), targets)
            loss.backward()
            optimizer.step()
            result.append(loss.item())
        return result

    assert losses == pytest.approx(share_from_first(alone), rel=0.02)


def scene_in_place(rank):
    """Layers that work in place at the start of a stage, with and without recomputation."""
    data = [(torch.randn(8, 12), torch.randn(8, 12)) for _ in range(2)]
    for recompute in (False, True):
        torch.manual_seed(6)
        act = nn.LeakyReLU(inplace=True)
        model = nn.Sequential(nn.Linear(12, 12), act, nn.Linear(12, 12), act)
        plan = cut_plan(list("0123"), [0, 1, 3], [1, 2, 1], 2, 4, recompute=recompute)
        compare(plan, model, mlp_loss, data)


def scene_own_dicts(rank):
    """A batch may be a library's own kind of dict."""
    plan = cut_plan(["before", "blocks.0", "blocks.1", "blocks.2", "behind"], [0, 2], [2, 2], 1, 4)
    torch.manual_seed(8)
    tokens, model = torch.randint(17, (4, 5)), TinyLanguageModel()
    expected = share_from_first(lambda: token_loss(model(tokens), tokens).item())
    with Pipeline(plan, model, token_loss, sgd) as pipeline:
        assert pipeline.step(UserDict(tokens=tokens), tokens) == pytest.approx(expected, rel=1e-5)


def scene_plan_file(rank):
    """A plan may be given by its file."""
    plan = cut_plan(list("01234"), [0, 2], [2, 2], 2, 4)
    with tempfile.TemporaryDirectory() as folder:
        write_plan(plan, Path(folder) / "mlp.plan.json")
        with Pipeline(Path(folder) / "mlp.plan.json", make_mlp(), mlp_loss, sgd) as pipeline:
            assert pipeline.plan.stages == plan.stages
            assert pipeline.step(torch.randn(8, 12), torch.randn(8, 4)) > 0


def scene_meta(rank):
    with torch.device("meta"):
        model = TinyLanguageModel(tied=True)

    def init_fn(module):
        for name, parameter in module.named_parameters():
            generator = torch.Generator().manual_seed(rank)  # replicas are made alike afterwards
            with torch.no_grad():
                parameter.normal_(std=0.1, generator=generator)
            assert not parameter.is_meta, name

    plan = cut_plan(LANGUAGE_NAMES, [0, 2], [2, 2], 2, 3)
    tokens = torch.randint(17, (6, 6), generator=torch.Generator().manual_seed(0))
    data = (tokens[:, :-1], tokens[:, 1:])
    with Pipeline(plan, model, token_loss, sgd, init_fn=init_fn) as pipeline:
        start = pipeline.full_state_dict()
        loss = pipeline.step(*data)
    if rank == 0:
        assert torch.equal(start["head.weight"], start["embed.weight"])
        whole = TinyLanguageModel(tied=True)
        whole.load_state_dict(start)
        assert loss == pytest.approx(token_loss(whole(data[0]), data[1]).item(), rel=1e-5)


def scene_none_and_sizes(rank):
    """Ranks in the middle give None, and the number of rows changes from step to step."""
    torch.manual_seed(8)
    model = make_mlp()
    reference = copy.deepcopy(model)
    plan = cut_plan(list("01234"), [0, 1, 3], [1, 2, 1], 2, 4)
    data = [(torch.randn(n, 12), torch.randn(n, 4)) for n in (8, 5, 8, 7)]
    with Pipeline(plan, model, mlp_loss, sgd) as pipeline:
        losses = []
        for inputs, targets in data:
            batch = inputs if pipeline.stage == 0 else None
            losses.append(pipeline.step(batch, targets if pipeline.stage == 2 else None))
    alone = share_from_first(lambda: train_alone(reference, mlp_loss, data)[0])
    assert losses == pytest.approx(alone, rel=1e-5)


def scene_metrics_and_buckets(rank):
    torch.manual_seed(9)
    plan = cut_plan(list("01234"), [0, 3], [2, 2], 2, 4)
    inputs, targets = torch.randn(8, 12), torch.randn(8, 4)
    model = make_mlp()
    reference = copy.deepcopy(model)
    with Pipeline(
        plan,
        model,
        mlp_loss,
        sgd,
        metrics={"mean": lambda output, _: output.mean()},
        bucket_bytes=500,
    ) as pipeline:
        pipeline.step(inputs, targets)
        inside = pipeline._replica.reducer.started_inside
        assert inside >= 2, inside
        assert pipeline.metrics["mean"] == pytest.approx(reference(inputs).mean().item(), abs=1e-6)
        assert pipeline.iteration_ms > 0


class Choosy(nn.Module):
    """Uses one of its two layers."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.used(x)


def scene_unused_parameters(rank):
    torch.manual_seed(10)
    plan = cut_plan(["0", "1"], [0, 1], [2, 2], 2, 4)
    with Pipeline(plan, nn.Sequential(Choosy(), Choosy()), mlp_loss, sgd) as pipeline:
        pipeline.step(torch.randn(8, 6), torch.randn(8, 6))
        for name, parameter in pipeline.model.named_parameters():
            assert (parameter.grad is None) == ("unused" in name), name


def scene_refusals(rank):
    plan = cut_plan(list("01234"), [0, 3], [1, 3], 2, 2)
    with Pipeline(plan, make_mlp(), mlp_loss, sgd) as pipeline:
        pass
    with pytest.raises(RuntimeMismatchError, match="batch: has no rows; leave out empty batches"):
        pipeline._steps.routers[pipeline.stage].route(0)
    with pytest.raises(RuntimeMismatchError, match=r"layers\[0\].name: 'zero' is no layer"):
        Pipeline(cut_plan(["zero", "1"], [0, 1], [2, 2], 1, 2), make_mlp(), mlp_loss, sgd)
    with pytest.raises(RuntimeMismatchError, match="ranks: 4 for a plan on 5 devices"):
        Pipeline(cut_plan(list("01234"), [0, 1], [3, 2], 1, 3), make_mlp(), mlp_loss, sgd)


SCENES = {name: scene for name, scene in sorted(globals().items()) if name.startswith("scene_")}


def play(rank):
    for scene in SCENES.values():
        scene(rank)
        torch.distributed.barrier()
    return list(SCENES)


def test_all_scenes():
    assert run_ranks(NUM_RANKS, play, timeout_s=120)[0] == list(SCENES)


@pytest.mark.parametrize("shape", [(), (8,), (1, 2, 5)])
def test_what_has_no_rows_cannot_cross_a_cut(shape):
    with pytest.raises(RuntimeMismatchError, match=r"for 4 rows; what replicas divide has the"):
        describe([torch.zeros(shape)], [False], ["tensor", 0], 4, stage=0)


def test_loss_scale_halves_on_overflow_and_grows_after_calm():
    scaler = LossScaler(enabled=True)
    start = scaler.scale
    assert not scaler.take(float("inf"))
    assert scaler.scale == start / 2
    assert all(scaler.take(1.0) for _ in range(2000))
    assert scaler.scale == start
