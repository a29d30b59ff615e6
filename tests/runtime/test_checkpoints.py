"""A run that goes on under another plan is the run that was never interrupted."""

import contextlib
import copy
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pipeplan.runtime import Pipeline, RuntimeMismatchError  # noqa: E402
from pipeplan.runtime.checkpoints import newest_checkpoint, put_in_place  # noqa: E402
from runtime.samples import TinyLanguageModel, cut_plan, token_loss  # noqa: E402
from runtime.workers import run_ranks, share_from_first  # noqa: E402

NAMES = ["before", "blocks.0", "blocks.1", "blocks.2", "behind"]
NUM_RANKS = 4


def make_optimizer(parameters):
    # AdamW, since it has state; a large epsilon, since it would blow up rounding of zeros.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(17, (8, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def resume(rank, folder):
    torch.manual_seed(0)
    model = TinyLanguageModel(tied=True)
    reference, second, other = (copy.deepcopy(model) for _ in range(3))
    before = cut_plan(NAMES, [0, 2, 4], [1, 2, 1], 2, 4)
    behind = cut_plan(NAMES, [0, 1], [1, 3], 2, 4)
    losses = []
    with Pipeline(before, model, token_loss, make_optimizer) as pipeline:
        assert not pipeline.load(folder)
        losses += [pipeline.step(*batch(step)) for step in range(4)]
        if pipeline.optimizer is not None:
            pipeline.optimizer.param_groups[0]["lr"] = 3e-3
        pipeline.save(folder)
    with Pipeline(behind, second, token_loss, make_optimizer) as pipeline:
        assert pipeline.load(folder)
        assert pipeline.num_steps == 4
        losses += [pipeline.step(*batch(step)) for step in range(4, 8)]
        for _ in range(3):
            pipeline.save(folder, keep=2)
            pipeline.step(*batch(9))
        state = pipeline.full_state_dict()
    names = sorted(path.name for path in newest_checkpoint(folder).parent.iterdir())
    assert names == ["step-00000009", "step-00000010"], names

    def alone():
        optimizer = make_optimizer(reference.parameters())
        result = []
        for step in (*range(8), 9, 9, 9):
            if step == 4:
                optimizer.param_groups[0]["lr"] = 3e-3
            optimizer.zero_grad()
            inputs, targets = batch(step)
            loss = token_loss(reference(inputs), targets)
            loss.backward()
            optimizer.step()
            result.append(loss.item())
        return result[:8], reference.state_dict()

    expected, expected_state = share_from_first(alone)
    assert losses == pytest.approx(expected, rel=1e-5)
    if rank == 0:
        for name, value in expected_state.items():
            assert torch.allclose(state[name], value, rtol=1e-3, atol=1e-5), name
    wrong = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    plan = cut_plan(list("0123"), [0, 1, 2, 3], [1] * 4, 1, 4)
    with (
        Pipeline(plan, wrong, token_loss, make_optimizer) as pipeline,
        pytest.raises(RuntimeMismatchError, match="it is of another model"),
    ):
        pipeline.load(folder)
    del other


def test_resume_under_another_plan(tmp_path):
    run_ranks(NUM_RANKS, resume, tmp_path)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_replacing_a_checkpoint_never_loses_both(tmp_path, monkeypatch, fails_at):
    """Whichever rename or removal is the last one that happens, one of the two can be loaded."""
    final, partial = tmp_path / "step-00000004", tmp_path / ".step-00000004.partial"
    for folder, text in ((final, "old"), (partial, "new")):
        folder.mkdir()
        (folder / "which").write_text(text)
    steps = iter(range(1, 10))

    def interrupted(original):
        def run(*args, **kwargs):
            if next(steps) == fails_at:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        return run

    monkeypatch.setattr(Path, "rename", interrupted(Path.rename))
    monkeypatch.setattr(shutil, "rmtree", interrupted(shutil.rmtree))
    with contextlib.suppress(KeyboardInterrupt):
        put_in_place(partial, final)
    assert (newest_checkpoint(tmp_path) / "which").read_text() in ("old", "new")


def test_unfinished_checkpoint_is_not_seen(tmp_path):
    (tmp_path / ".step-00000005.partial").mkdir()
    (tmp_path / "step-00000003").mkdir()
    assert newest_checkpoint(tmp_path).name == "step-00000003"
    assert newest_checkpoint(tmp_path / "none") is None
