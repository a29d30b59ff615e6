"""What training scripts need, against ordinary training; four ranks run all scenes."""

import copy
import math
import re
import tempfile
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

from pipeplan.runtime import (  # noqa: E402
    CheckpointError,
    NonFiniteLossError,
    Pipeline,
    RuntimeMismatchError,
)
from pipeplan.runtime.checkpoints.exporting import export_checkpoint  # noqa: E402
from runtime.samples import TinyLanguageModel, cut_plan, make_mlp, mlp_loss, token_loss  # noqa: E402
from runtime.workers import Ranks, run_ranks, share_from_first  # noqa: E402

NUM_RANKS = 4
NAMES = ["before", "blocks.0", "blocks.1", "blocks.2", "behind"]
MLP_NAMES = list("01234")
PLANS = {
    "wide": lambda: cut_plan(NAMES, [0, 2, 4], [1, 2, 1], 2, 4),
    "narrow": lambda: cut_plan(NAMES, [0, 1], [1, 2], 2, 4, num_devices=4),
}


def language_model(*, tied=True):
    torch.manual_seed(0)
    return TinyLanguageModel(tied=tied).double()


def tokens(step, rows=8):
    found = torch.randint(17, (rows, 6), generator=torch.Generator().manual_seed(step))
    return found[:, :-1].clone(), found[:, 1:].clone()


def numbers(step, rows=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(rows, 12, generator=generator, dtype=dtype)
    return inputs, torch.randn(rows, 4, generator=generator, dtype=dtype)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def groups_of(name, parameter):
    """No decay for vectors, and a smaller rate for the embedding (which the head shares)."""
    if name == "embed.weight":
        return {"lr": 3e-3}
    return {"weight_decay": 0.0} if parameter.ndim < 2 else {}


def same_state(pipeline, expected, tolerance=1e-10):
    """Whether the pipeline's model is that of ordinary training, on rank 0."""
    state = pipeline.full_state_dict()
    if state is not None:
        for name, value in expected.items():
            assert torch.allclose(state[name], value, rtol=tolerance, atol=tolerance), name


def folder():
    return share_from_first(lambda: tempfile.mkdtemp(prefix="pipeplan-test-"))


def scene_groups_and_schedulers(rank):
    """Groups by name with tied weights, a schedule, a resumption under another plan."""
    saved = folder()

    def schedule(optimizer):
        warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        rest = lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return lr_scheduler.SequentialLR(optimizer, [warm, rest], [3])

    def alone():
        model = language_model()
        split = {}
        for name, parameter in model.named_parameters():
            options = groups_of(name, parameter)
            split.setdefault(str(options), {"params": [], **options})["params"].append(parameter)
        optimizer = adamw(list(split.values()))
        scheduler = schedule(optimizer)
        losses = []
        for step in range(8):
            optimizer.zero_grad()
            loss = token_loss(model(tokens(step)[0]), tokens(step)[1])
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        return losses, scheduler.get_last_lr(), model.state_dict()

    losses, results = [], []
    with Pipeline(
        PLANS["wide"](), language_model(), token_loss, adamw, param_groups_fn=groups_of
    ) as pipeline:
        scheduler = schedule(pipeline.optimizer)
        pipeline.track(scheduler=scheduler)
        for step in range(4):
            losses.append(pipeline.step(*tokens(step)))
            scheduler.step()
        torch.manual_seed(99)
        pipeline.save(saved, state={"epoch": 2, "best": torch.tensor(0.5)})
        drawn = torch.rand(3)
    torch.manual_seed(rank)  # load brings the generator back
    with Pipeline(
        PLANS["narrow"](),
        language_model(),
        token_loss,
        adamw,
        param_groups_fn=groups_of,
        on_step=results.append,
    ) as pipeline:
        assert pipeline.loaded_state == {}
        assert pipeline.load(saved)
        assert torch.equal(torch.rand(3), drawn)
        assert pipeline.loaded_state == {"epoch": 2, "best": torch.tensor(0.5)}
        assert (pipeline.num_steps, pipeline.num_batches, pipeline.num_rows) == (4, 4, 32)
        scheduler = schedule(pipeline.optimizer)  # after load: its state waits for it
        pipeline.track(scheduler=scheduler)
        for step in range(4, 8):
            losses.append(pipeline.step(*tokens(step)))
            scheduler.step()
        expected, rates, state = share_from_first(alone)
        assert losses == pytest.approx(expected, rel=1e-11)
        assert scheduler.get_last_lr() == pytest.approx(rates, rel=1e-12)
        assert len(rates) == 3
        assert pipeline.stage >= 0 or rank == 3  # rank 3 has no stage, but all else
        same_state(pipeline, state)
    assert [result.step for result in results] == [5, 6, 7, 8]
    assert [result.loss for result in results] == losses[4:]
    assert all(len(result.learning_rates) == 3 and result.is_update for result in results)
    with (
        Pipeline(PLANS["narrow"](), language_model(), token_loss, adamw) as pipeline,
        pytest.raises(CheckpointError, match="had different settings, but are both in"),
    ):
        pipeline.load(saved)


def accumulate_alone(model, batches, loss_fn, optimizer_fn, clip_norm=None, num_groups=3):
    """Ordinary training on each group of batches as one large batch."""
    optimizer = optimizer_fn(model.parameters())
    norms = []
    for start in range(0, len(batches), num_groups):
        group = batches[start : start + num_groups]
        inputs, targets = (torch.cat(parts) for parts in zip(*group, strict=True))
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        if clip_norm:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item())
        optimizer.step()
    return model.state_dict(), norms


def scene_accumulation(rank):
    """Three batches of different sizes are one batch of all their rows; tied weights, replicas."""
    batches = [tokens(step, rows) for step, rows in enumerate((8, 4, 12, 6, 8, 4))]
    expected, norms = share_from_first(
        lambda: accumulate_alone(language_model(), batches, token_loss, adamw, clip_norm=0.3)
    )
    results = []
    with Pipeline(
        PLANS["wide"](),
        language_model(),
        token_loss,
        adamw,
        clip_norm=0.3,
        on_step=results.append,
    ) as pipeline:
        for index, batch in enumerate(batches):
            if index == 1:
                with pytest.raises(
                    RuntimeMismatchError, match="save after a step with update=True"
                ):
                    pipeline.save("nowhere")
            loss = pipeline.step(*batch, update=index % 3 == 2)
            if index == 0:  # each loss is that of its own batch; evaluation changes nothing
                assert pipeline.evaluate(*batch) == pytest.approx(loss, rel=1e-12)
                alone = token_loss(language_model()(batch[0]), batch[1]).item()
                assert loss == pytest.approx(alone, rel=1e-12)
        same_state(pipeline, expected)
        assert (pipeline.num_steps, pipeline.num_batches, pipeline.num_rows) == (2, 6, 42)
    assert [result.step for result in results] == [1, 1, 1, 2, 2, 2]
    assert [result.is_update for result in results] == [False, False, True] * 2
    found = [result.gradient_norm for result in results if result.is_update]
    assert found == pytest.approx(norms, rel=1e-9)
    assert all(norm > 0.3 for norm in found)  # it did clip


def masked_loss(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-1)


def scene_accumulation_by_tokens(rank):
    """The mean over all tokens that count; one batch has none, and it may be the first."""
    batches = [tokens(step) for step in range(4)]
    for index, (_, targets) in enumerate(batches):
        targets[
            torch.rand(targets.shape, generator=torch.Generator().manual_seed(index)) < 0.6
        ] = -1
    for empty in (0, 1):
        group = [batches[index] for index in range(3)]
        group[empty] = (group[empty][0], torch.full_like(group[empty][1], -1))
        expected, _ = share_from_first(
            lambda group=group: accumulate_alone(language_model(), group, masked_loss, adamw)
        )
        with Pipeline(
            PLANS["wide"](),
            language_model(),
            masked_loss,
            adamw,
            loss_weight_fn=lambda targets: (targets != -1).sum(),
        ) as pipeline:
            for index, batch in enumerate(group):
                pipeline.step(*batch, update=index == 2)
            same_state(pipeline, expected)


def scene_accumulation_in_float16(rank):
    """With a loss scale: an overflow skips the group, and the scale is the same for all of it."""
    plan = cut_plan(MLP_NAMES, [0, 2], [2, 2], 2, 4)
    torch.manual_seed(1)
    model = make_mlp()
    reference = copy.deepcopy(model)
    batches = [numbers(step, dtype=torch.float32) for step in range(4)]
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    expected, norms = share_from_first(
        lambda: accumulate_alone(reference, batches, mlp_loss, sgd, clip_norm=0.5, num_groups=2)
    )
    with Pipeline(
        plan, model, mlp_loss, sgd, clip_norm=0.5, amp_dtype=torch.float16, on_nan="raise"
    ) as pipeline:
        before = pipeline.full_state_dict()
        pipeline.loss_scale = 2.0**40  # more than float16 holds
        pipeline.step(*batches[0], update=False)
        pipeline.step(*batches[1])
        assert pipeline.is_skipped
        assert pipeline.loss_scale == 2.0**39
        after = pipeline.full_state_dict()
        if rank == 0:
            assert all(torch.equal(after[name], value) for name, value in before.items())
        pipeline.loss_scale = 2.0**10
        for index, batch in enumerate(batches):
            pipeline.step(*batch, update=index % 2 == 1)
        assert pipeline.loss_scale == 2.0**10
        assert not pipeline.is_skipped
        assert pipeline.gradient_norm == pytest.approx(norms[-1], rel=0.02)
        same_state(pipeline, expected, tolerance=2e-3)
        saved = folder()
        pipeline.save(saved)
    with Pipeline(plan, make_mlp(), mlp_loss, sgd, amp_dtype=torch.float16) as pipeline:
        pipeline.load(saved)
        assert pipeline.loss_scale == 2.0**10
        assert pipeline._updater.scaler.num_calm_steps == 2


def scene_nan(rank):
    """A NaN in one row: one microbatch of one replica. All ranks react alike."""
    plan = cut_plan(MLP_NAMES, [0, 2], [2, 2], 2, 4)
    torch.manual_seed(1)
    models = [make_mlp().double()]
    models += [copy.deepcopy(models[0]) for _ in range(4)]
    bad = numbers(1)
    bad[0][5, 3] = math.nan

    def alone():
        model = models[3]
        optimizer = adamw(model.parameters())
        for step in (0, 2):
            optimizer.zero_grad()
            mlp_loss(model(numbers(step)[0]), numbers(step)[1]).backward()
            optimizer.step()
        return model.state_dict()

    expected = share_from_first(alone)
    results = []
    with Pipeline(
        plan, models[0], mlp_loss, adamw, on_nan="skip", on_step=results.append
    ) as pipeline:
        pipeline.step(*numbers(0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert math.isnan(pipeline.step(*bad))
            # NaN in the middle of a group: the whole group is skipped, also its good batches.
            for index, batch in enumerate((numbers(7), bad, numbers(8))):
                pipeline.step(*batch, update=index == 2)
        texts = [str(warning.message) for warning in caught]
        skipped = [f"step {n}: the loss is nan; the step is skipped" for n in (2, 3)]
        assert texts == (skipped if rank == 0 else [])
        pipeline.step(*numbers(2))
        same_state(pipeline, expected)
        assert pipeline.num_steps == 4
    assert [result.is_skipped for result in results] == [False, True, False, False, True, False]
    with Pipeline(plan, models[1], mlp_loss, adamw, on_nan="raise") as pipeline:
        pipeline.step(*numbers(0))
        with pytest.raises(NonFiniteLossError, match="step 2: the loss is nan"):
            pipeline.step(*bad)
        pipeline.step(*numbers(2))  # all ranks raised, so all may go on
        same_state(pipeline, expected)
    with Pipeline(plan, models[2], mlp_loss, adamw) as pipeline:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                pipeline.step(*bad)
        assert len(caught) == (rank == 0)  # the beginning of a row of them
        state = pipeline.full_state_dict()
        assert rank or all(value.isnan().any() for value in state.values())
    with pytest.raises(RuntimeMismatchError, match="on_nan: 'ignore' is not one of"):
        Pipeline(plan, models[4], mlp_loss, adamw, on_nan="ignore")


class Root(nn.Module):
    """A finite loss whose gradient is not."""

    def forward(self, x):
        return x.abs().sqrt()


def scene_gradients_that_are_not_finite(rank):
    plan = cut_plan(list("012"), [0, 1, 2], [1, 1, 2], 1, 4)
    model = nn.Sequential(nn.Linear(12, 4), Root(), nn.Identity()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with Pipeline(plan, model, mlp_loss, adamw, on_nan="raise") as pipeline:
        with pytest.raises(NonFiniteLossError, match=r"step 1: the norm of gradients is (nan|inf)"):
            pipeline.step(*numbers(0, 4))
        state = pipeline.full_state_dict()
        assert rank or not any(value.any() for value in state.values())


def scene_statistics_of_the_first_replica(rank):
    """Running means differ from replica to replica; those of the first one are saved."""
    plan = cut_plan(list("012"), [0, 1], [1, 3], 1, 6)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    saved = folder()
    with Pipeline(plan, copy.deepcopy(model), mlp_loss, adamw) as pipeline:
        for step in range(3):
            pipeline.step(*numbers(step, 6))
        own = {}
        if pipeline.stage == 1:
            own = {name: value.clone() for name, value in pipeline.model.named_buffers()}
        pipeline.save(saved)
        everyone = [None] * NUM_RANKS
        dist.all_gather_object(everyone, own)
        if rank == 0:
            means = [found["1.running_mean"] for found in everyone[1:]]
            assert not torch.equal(means[0], means[1])
    with Pipeline(plan, model, mlp_loss, adamw) as pipeline:
        pipeline.load(saved)
        if pipeline.stage == 1:
            for name, value in pipeline.model.named_buffers():
                assert torch.equal(value, everyone[1][name]), name
    output = Path(saved) / "model.safetensors"
    share_from_first(lambda: export_checkpoint(Path(saved), output).num_tensors)
    torch.manual_seed(rank)
    fresh = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    with Pipeline(plan, fresh, mlp_loss, adamw) as again:
        again.load_weights(output)
        state = again.full_state_dict()
        if rank == 0:
            assert torch.equal(state["1.running_mean"], everyone[1]["1.running_mean"])


def scene_weights_of_a_model_without_values(rank):
    """A model on the meta device gets its values from a file; each rank reads its part."""
    from safetensors.torch import save_file

    path = Path(folder()) / "model.safetensors"
    model = language_model()
    values = {name: v.clone() for name, v in model.state_dict().items() if name != "head.weight"}
    share_from_first(lambda: save_file(values, path))  # tied weights stand there once
    with torch.device("meta"):
        empty = TinyLanguageModel(tied=True).double()

    def fill(part):
        for parameter in part.parameters():
            nn.init.constant_(parameter, 7.0)

    with Pipeline(PLANS["wide"](), empty, token_loss, adamw, init_fn=fill) as pipeline:
        pipeline.load_weights(path)
        assert pipeline.evaluate(*tokens(3)) == pytest.approx(
            token_loss(model(tokens(3)[0]), tokens(3)[1]).item(), rel=1e-12
        )
        left = {name: value for name, value in values.items() if "blocks.1" not in name}
        share_from_first(lambda: save_file(left, path))
        with pytest.raises(CheckpointError, match=r"has no 'blocks\.1"):
            pipeline.load_weights(path)


def scene_compiled_blocks(rank):
    """`block.compile()` before the pipeline takes the model: the same numbers, the same names."""
    expected = share_from_first(
        lambda: accumulate_alone(
            language_model(), [tokens(0), tokens(1)], token_loss, adamw, num_groups=1
        )
    )[0]
    model = language_model()
    for block in model.blocks:
        block.compile(backend="eager")
    with (
        Pipeline(PLANS["wide"](), model, token_loss, adamw) as pipeline,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "The .grad attribute")  # torch's compiler looks for it
        for step in range(2):
            pipeline.step(*tokens(step))
        same_state(pipeline, expected)


def scene_tracking(rank):
    plan = cut_plan(MLP_NAMES, [0, 2], [2, 2], 1, 4)
    saved = folder()
    torch.manual_seed(1)
    model = make_mlp()
    with Pipeline(plan, copy.deepcopy(model), mlp_loss, adamw) as pipeline:
        plateau = lr_scheduler.ReduceLROnPlateau(pipeline.optimizer)
        steps = lr_scheduler.MultiStepLR(pipeline.optimizer, [1, 3])
        pipeline.track(plateau=plateau, steps=steps)
        with pytest.raises(RuntimeMismatchError, match="plateau: something is tracked"):
            pipeline.track(plateau=plateau)
        with pytest.raises(RuntimeMismatchError, match="other: a dict cannot be tracked"):
            pipeline.track(other={})
        pipeline.step(*numbers(0, 4, torch.float32))
        steps.step()
        pipeline.save(saved)
        before = (plateau.state_dict(), steps.state_dict())
    with Pipeline(plan, copy.deepcopy(model), mlp_loss, adamw) as pipeline:
        pipeline.load(saved)
        again = lr_scheduler.MultiStepLR(pipeline.optimizer, [1, 3])
        pipeline.track(steps=again)
        assert again.state_dict() == before[1]
        assert again.milestones.elements  # a Counter came back as one
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipeline.step(*numbers(0, 4, torch.float32))
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == (rank == 0)
        assert not rank or not texts
        assert rank or "the state of 'plateau', which nothing tracks" in texts[0]
    with Pipeline(plan, copy.deepcopy(model), mlp_loss, adamw) as pipeline:
        pipeline.track(loader=lr_scheduler.ConstantLR(pipeline.optimizer))
        with pytest.raises(CheckpointError, match="has no state of 'loader'"):
            pipeline.load(saved)

    def own_groups(parameters):
        groups = [parameters] if rank == 0 else [[parameter] for parameter in parameters]
        return torch.optim.SGD([{"params": group} for group in groups], lr=0.1)

    with Pipeline(plan, model, mlp_loss, own_groups) as pipeline:
        pipeline.track(schedule=lr_scheduler.ConstantLR(pipeline.optimizer))
        with pytest.raises(CheckpointError, match="optimizer: has 1 groups on rank 0"):
            pipeline.save(saved)


def scene_errors_of_one_rank(rank):
    """One rank cannot write, or reads a damaged tensor: all raise the same line, and go on."""
    plan = cut_plan(MLP_NAMES, [0, 1, 2, 3], [1] * 4, 1, 4)
    saved = Path(folder())
    torch.manual_seed(1)
    with Pipeline(plan, make_mlp(), mlp_loss, adamw) as pipeline:
        pipeline.step(*numbers(0, 4, torch.float32))
        pipeline.save(saved)
        pipeline.step(*numbers(1, 4, torch.float32))
        if rank == 2:  # as if a layer had got something that no file can hold
            pipeline.model.register_buffer("odd", torch.ones(1, dtype=torch.complex128))
        with pytest.raises(CheckpointError, match=r"'model\.odd': has the type torch.complex128"):
            pipeline.save(saved)
        if rank == 2:
            del pipeline.model.odd
        newest = pipeline.save(saved)
        if rank == 0:
            file = newest / "stage-003.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + b"\x55")
        dist.barrier()
        before = pipeline.full_state_dict()
        offered = re.escape(str(saved / "step-00000001"))
        with pytest.raises(CheckpointError, match=rf"stage-003.*differs.*--resume-from {offered}"):
            pipeline.load(saved)
        after = pipeline.full_state_dict()
        assert rank or all(torch.equal(after[name], value) for name, value in before.items())
        assert pipeline.num_steps == 2
        assert pipeline.load(saved / "step-00000001")
        assert pipeline.num_steps == 1
        pipeline.step(*numbers(1, 4, torch.float32))
        final = pipeline.full_state_dict()
        assert rank or all(torch.equal(final[name], value) for name, value in before.items())


def play(rank):
    for name, scene in list(globals().items()):
        if name.startswith("scene_"):
            try:
                scene(rank)
            except BaseException as error:
                error.add_note(f"in {name}")
                raise


def test_all_scenes():
    run_ranks(NUM_RANKS, play, timeout_s=300)


def disagree(rank):
    """One rank updates, the other keeps its gradients."""
    plan = cut_plan(MLP_NAMES, [0, 2], [1, 1], 2, 4)
    torch.manual_seed(1)
    with Pipeline(plan, make_mlp().double(), mlp_loss, adamw) as pipeline:
        pipeline.step(*numbers(0), update=rank != 1)


def test_ranks_that_disagree_on_the_update_are_refused(tmp_path):
    with Ranks(2, disagree, stderr=tmp_path / "stderr") as ranks:
        assert ranks.wait(60) == [1, 1]
        said = (tmp_path / "stderr").read_text() + ranks.error(0) + ranks.error(1)
    assert "rank 1 is in accumulation step 0, but rank 0 in training step 0" in said


def test_groups_are_made_of_plain_options():
    from pipeplan.runtime.optimizers import make_optimizer, plan_groups

    model = make_mlp()
    for found, reason in (
        (None, "gave None for '0.0.weight'; it has to give the options"),
        ({"params": []}, "gave {'params': \\[\\]}"),
        ({"lr": torch.ones(1)}, "is a tensor; give plain numbers"),
        ({"lr": print}, "is a builtins.builtin_function_or_method"),
    ):
        with pytest.raises(RuntimeMismatchError, match=f"param_groups_fn: .*{reason}"):
            plan_groups(model, None, lambda name, parameter, found=found: found)
    with pytest.raises(RuntimeMismatchError, match="optimizer_fn: returned a list"):
        make_optimizer(list, {}, None)
    with pytest.raises(RuntimeMismatchError, match=r"already; .* lambda parameters: SGD\(param"):
        make_optimizer(torch.optim.SGD(model.parameters()), {}, None)
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.Muon):
        optimizer = make_optimizer(lambda found, kind=kind: kind(found, lr=0.1), {}, None)
        optimizer.step()
        assert len(optimizer.param_groups) == 1
