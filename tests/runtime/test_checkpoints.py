"""A run that goes on under another plan is the run that was never interrupted."""

import contextlib
import copy
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pipeplan.runtime import Pipeline, RuntimeMismatchError  # noqa: E402
from pipeplan.runtime.checkpoints import folders  # noqa: E402
from pipeplan.runtime.checkpoints.descriptions import Progress  # noqa: E402
from pipeplan.runtime.checkpoints.folders import newest_checkpoint, put_in_place  # noqa: E402
from pipeplan.runtime.checkpoints.loading import load_checkpoint  # noqa: E402
from pipeplan.runtime.checkpoints.saving import TrainingState, save_checkpoint  # noqa: E402
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


def test_leftovers_of_dead_processes_go_with_the_next_save(tmp_path):
    write(tmp_path, 3)
    for name in (".step-00000001.partial", ".step-00000003.replaced", ".step-00000002.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("left")
    write(tmp_path, 4)
    # Of the second step only the replaced one was left; it became the oldest of three.
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000003", "step-00000004"]
    assert read(tmp_path) == 4


def test_a_checkpoint_left_between_two_renames_gets_its_name_back(tmp_path):
    write(tmp_path, 2)
    (tmp_path / "step-00000002").rename(tmp_path / ".step-00000002.replaced")
    assert read(tmp_path) == 2
    write(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_folders_are_synced_before_and_after_the_rename(tmp_path, monkeypatch):
    synced = []
    sync = folders.sync_folder
    monkeypatch.setattr(
        folders,
        "sync_folder",
        lambda folder: (
            synced.append((folder.name, (tmp_path / "step-00000002").exists())) or sync(folder)
        ),
    )
    write(tmp_path, 2)
    assert synced == [(".step-00000002.partial", False), (tmp_path.name, True)]


@contextlib.contextmanager
def alone():
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def tiny_state(number):
    """A model and an optimizer whose tensors all hold this number."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)
    names = {name: name for name, _ in model.named_parameters()}
    return TrainingState(model=model, optimizer=optimizer, first_name_of=names)


def write(folder, number):
    with alone():
        save(folder, number)


def save(folder, number, num_steps=None):
    progress = Progress(num_steps=num_steps or number, loss_scale=float(number))
    save_checkpoint(tiny_state(number), progress, folder, keep=2)


def read(folder):
    """The number that all of the newest checkpoint holds; it fails if parts of it differ."""
    state = tiny_state(-1)
    with alone():
        progress = load_checkpoint(state, folder).progress
    tensors = [
        *state.model.parameters(),
        *(slots["momentum_buffer"] for slots in state.optimizer.state.values()),
    ]
    found = {value for tensor in tensors for value in tensor.flatten().tolist()}
    assert found == {progress.loss_scale}
    return int(progress.loss_scale)


def save_forever(folder, ready):
    """Writes checkpoint after checkpoint, each step twice, until it is killed."""
    with alone():
        for number in range(1, 100_000):
            save(folder, number, num_steps=(number + 1) // 2)
            os.write(ready, number.to_bytes(4, "big"))


@pytest.mark.parametrize("num_kills", [50, pytest.param(200, marks=pytest.mark.full)])
def test_a_killed_writer_leaves_the_old_or_the_new_checkpoint(tmp_path, num_kills):
    rng = random.Random(num_kills)
    leftovers = 0
    for kill in range(num_kills):
        folder = tmp_path / str(kill)
        receiving, sending = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                save_forever(folder, sending)
            finally:
                os._exit(1)
        os.close(sending)
        with open(receiving, "rb", buffering=0) as done:
            written = int.from_bytes(done.read(4), "big")
            time.sleep(rng.uniform(0, 0.04))
            os.kill(child, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
            while number := done.read(4):
                written = int.from_bytes(number, "big")
        leftovers += any(path.name.startswith(".") for path in folder.iterdir())
        assert read(folder) in (written, written + 1)
        assert newest_checkpoint(folder) is not None
        write(folder, 200_000)
        hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert not hidden
    assert leftovers > num_kills / 4  # most kills did come while something was being written
