"""Damaged and hostile checkpoints: each is refused in one line, and changes nothing."""

import contextlib
import errno
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import signal
import threading

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as torch_checkpoint  # noqa: E402

from pipeplan.errors import CheckpointError  # noqa: E402
from pipeplan.runtime.checkpoints import saving  # noqa: E402
from pipeplan.runtime.checkpoints.descriptions import Progress  # noqa: E402
from pipeplan.runtime.checkpoints.exporting import export_checkpoint  # noqa: E402
from pipeplan.runtime.checkpoints.folders import locked, newest_checkpoint  # noqa: E402
from pipeplan.runtime.checkpoints.loading import load_checkpoint  # noqa: E402
from pipeplan.runtime.checkpoints.saving import Extras, TrainingState, save_checkpoint  # noqa: E402
from pipeplan.runtime.checkpoints.weights import load_weights  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def alone():
    """A process group of this process only."""
    form_group()
    yield
    dist.destroy_process_group()


def form_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def tiny_state(number, width=2, **options):
    model = torch.nn.Linear(width, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    names = {name: name for name, _ in model.named_parameters()}
    return TrainingState(model=model, optimizer=optimizer, first_name_of=names)


def save(folder, number, training=None, since=None, **extras):
    progress = Progress(num_steps=number, loss_scale=1.0)
    chosen = training or tiny_state(number)
    return save_checkpoint(chosen, progress, folder, 3, Extras(**extras), since)


def values(state):
    tensors = [*state.model.state_dict().values()]
    tensors += [t for slots in state.optimizer.state.values() for t in slots.values()]
    settings = [{k: v for k, v in g.items() if k != "params"} for g in state.optimizer.param_groups]
    return [tensor.tolist() for tensor in tensors], settings


def refused(path, *, state=None, **options):
    """The line with which the checkpoint is refused; the state stays as it was."""
    state = state or tiny_state(-1)
    before, seed = values(state), torch.get_rng_state().tolist()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(state, path, **options)
    assert values(state) == before
    assert torch.get_rng_state().tolist() == seed
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 900
    return message


def rewrite(path, change):
    """Change the description, with a right checksum: as an attacker would."""
    file = path / "pipeplan.json"
    document = json.loads(file.read_text())
    content = {k: v for k, v in document.items() if k not in ("format", "sha256")}
    change(content)
    rest = json.dumps(content)[1:].encode()
    head = f'{{"format": "pipeplan.checkpoint/2", "sha256": "{hashlib.sha256(rest).hexdigest()}",\n'
    file.write_bytes(head.encode() + rest)


# ---------------------------------------------------------------------------- flipped bits


def test_every_flipped_bit_is_found(tmp_path):
    """One bit in each byte of each file; a file's bytes that nobody needs would be found, too."""
    path = save(tmp_path, 4, state_of := tiny_state(4), state={"epoch": 1, "ema": torch.ones(3)})
    assert len(list(path.iterdir())) == 3
    rng = random.Random(0)
    where = set()
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        positions = range(len(whole))
        if len(whole) > 2000:  # of the state of the generator, and of the long JSON, a part
            positions = sorted({*range(150), *rng.sample(positions, 150), len(whole) - 1})
        for position in positions:
            damaged = bytearray(whole)
            damaged[position] ^= 1 << rng.randrange(8)
            file.write_bytes(damaged)
            message = refused(path, state=state_of)
            assert str(path) in message, (file.name, position, message)
            where.add(message.split(": ")[0])
        file.write_bytes(whole)
    assert {str(file) for file in path.iterdir()} <= where
    assert load_checkpoint(tiny_state(-1), path) is not None


def test_a_damaged_tensor_is_named_and_the_one_before_is_offered(tmp_path):
    first, second, third = (save(tmp_path, number) for number in (2, 4, 6))
    file = third / "stage-000.safetensors"
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes(whole)
    message = refused(tmp_path)
    assert message.startswith(f"{file}: \"optimizer.weight['step']\"")
    assert "its checksum differs" in message
    assert message.endswith(f"with --resume-from {second}")
    (second / "pipeplan.json").write_text("{}")
    assert refused(tmp_path).endswith(f"with --resume-from {first}")
    assert refused(second).endswith(f"with --resume-from {first}")
    assert load_checkpoint(tiny_state(-1), first).progress.num_steps == 2
    shutil.rmtree(first)
    assert refused(tmp_path).endswith("there is no checkpoint before it")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100])
def test_truncated_files_are_named(tmp_path, size):
    path = save(tmp_path, 4)
    for name in ("stage-000.safetensors", "state.safetensors", "pipeplan.json"):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole[:size])
        assert str(path / name) in refused(path)
        (path / name).write_bytes(whole[:-1])
        assert str(path / name) in refused(path)
        (path / name).write_bytes(whole + b"\0")
        assert str(path / name) in refused(path)
        (path / name).unlink()
        assert "No such file" in refused(path) or name == "pipeplan.json"
        (path / name).write_bytes(whole)


def test_swapped_files_are_found(tmp_path):
    first, second = save(tmp_path, 2), save(tmp_path, 4)
    for name in ("stage-000.safetensors", "pipeplan.json"):
        shutil.copy(first / name, tmp_path / "kept")
        shutil.copy(second / name, first / name)
        assert str(first) in refused(first)
        shutil.copy(tmp_path / "kept", first / name)
    # All files of another step: sound, but the folder says another step than its content.
    shutil.rmtree(first)
    shutil.copytree(second, first)
    assert "holds step 4; give the folder the name step-00000004" in refused(first)
    shutil.copytree(second, tmp_path / "best")
    assert load_checkpoint(tiny_state(-1), tmp_path / "best").progress.num_steps == 4


# ---------------------------------------------------------------------------- hostile content


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def write_first_format(folder, number):
    """A checkpoint as pipeplan wrote it before: torch's, with pickled metadata."""
    state = tiny_state(number)
    tensors = {f"model.{n}": t for n, t in state.model.state_dict().items()}
    for name, parameter in state.model.named_parameters():
        for slot, value in state.optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{slot}"] = value
    path = folder / f"step-{number:08d}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        torch_checkpoint.save(tensors, checkpoint_id=path)
    settings = {name: {"lr": 0.25, "betas": [0.5, 0.6]} for name in ("weight", "bias")}
    document = {"format": "pipeplan.checkpoint/1", "steps": number, "loss_scale": 8.0}
    (path / "pipeplan.json").write_text(json.dumps({**document, "settings": settings}))
    return path, state


def test_the_first_format_needs_trust(tmp_path):
    path, saved = write_first_format(tmp_path, 5)
    metadata = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    message = refused(tmp_path)
    assert "can run any code when it is read" in message
    assert "trust=True" in message
    assert not (tmp_path / "owned").exists()
    (path / ".metadata").write_bytes(metadata)
    state = tiny_state(-1)
    with pytest.warns(UserWarning, match="is read with pickle"):
        loaded = load_checkpoint(state, tmp_path, trust=True)
    assert loaded.progress == Progress(num_steps=5, loss_scale=8.0, num_batches=5)
    assert values(state)[0] == values(saved)[0]
    group = state.optimizer.param_groups[0]
    assert (group["lr"], group["betas"]) == (0.25, (0.5, 0.6))


def test_pickles_in_a_new_checkpoint_are_not_read(tmp_path):
    path = save(tmp_path, 4)
    evil = pickle.dumps(Evil(tmp_path / "owned"))
    (path / ".metadata").write_bytes(evil)
    (path / "__0_0.distcp").write_bytes(evil)
    assert load_checkpoint(tiny_state(-1), path, trust=True) is not None
    for name in ("pipeplan.json", "stage-000.safetensors", "state.safetensors"):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(evil)
        refused(path, trust=True)
        (path / name).write_bytes(whole)
    assert not (tmp_path / "owned").exists()


def set_at(*keys, value):
    def change(document):
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


def rename_file(name):
    def change(document):
        document["files"][name] = document["files"].pop("state.safetensors")
        for record in document["tensors"].values():
            if record[0] == "state.safetensors":
                record[0] = name

    return change


CHANGES = {
    "path out of the folder": (rename_file("../state.safetensors"), "is no file of a checkpoint"),
    "absolute path": (rename_file("/etc/passwd"), "is no file of a checkpoint"),
    "null in a name": (rename_file("stage-000\0.safetensors"), "is no file of a checkpoint"),
    "file that is not there": (rename_file("stage-007.safetensors"), "No such file"),
    "no files": (set_at("files", value={}), "is not a description"),
    "list of files": (set_at("files", value=[]), "is not a description"),
    "steps as a text": (set_at("progress", "num_steps", value="4"), "is not a description"),
    "negative steps": (set_at("progress", "num_steps", value=-4), "is not a description"),
    "steps without end": (set_at("progress", "num_steps", value=10**300), "is not a description"),
    "infinite scale": (set_at("progress", "loss_scale", value=1e400), "is not JSON"),
    "scale of 0": (set_at("progress", "loss_scale", value=0), "is not a description"),
    "scale of a huge number": (set_at("progress", "loss_scale", value=10**400), "description"),
    "unknown field": (set_at("progress", "run", value="rm"), "is not a description"),
    "no optimizer": (set_at("optimizer", value={}), "its description is not of a checkpoint"),
    "states of a list": (set_at("optimizer", "states", value=[1]), "is not of a checkpoint"),
    "parameters as a setting": (
        set_at("optimizer", "settings", value=[{"params": []}]),
        "is not of a checkpoint",
    ),
    "settings of a list": (set_at("optimizer", "settings", value=[[1]]), "is not of a checkpoint"),
    "state of a number": (set_at("optimizer", "states", "weight", value=7), "is not of a checkp"),
    "settings that are missing": (set_at("optimizer", "settings", value=[]), "is not of a checkp"),
    "unknown mark": (set_at("state", value={"$call": "os.system"}), "is not of a checkpoint"),
    "two marks": (set_at("state", value={"$tuple": [], "$dict": []}), "is not of a checkpoint"),
    "unhashable key": (set_at("state", value={"$dict": [[[], 1]]}), "is not of a checkpoint"),
    "tensor that is not there": (set_at("state", value={"$tensor": "x"}), "is not of a checkpoint"),
    "tensor by a list": (set_at("state", value={"$tensor": []}), "is not of a checkpoint"),
    "state that is no dict": (set_at("state", value=[1]), "is not of a checkpoint"),
    "random state": (set_at("random", value=[1, 2]), "is not of a checkpoint"),
    "random state of zeros": (set_at("random", value={"$tensor": "model.bias"}), "is not of a ch"),
    "deep state": (
        set_at("state", value=json.loads("[" * 900 + "]" * 900)),
        "is not of a checkpoint",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_forged_descriptions_are_refused(tmp_path, case):
    """The checksum is right: it protects against damage, not against an attacker."""
    change, reason = CHANGES[case]
    path = save(tmp_path, 4)
    rewrite(path, change)
    message = refused(path)
    assert reason in message
    assert message.startswith(str(path))


def test_links_and_pipes_in_a_checkpoint_are_refused(tmp_path):
    path = save(tmp_path, 4)
    for name in ("stage-000.safetensors", "pipeplan.json"):
        (path / name).rename(tmp_path / name)
        (path / name).symlink_to(tmp_path / name)
        assert "is a link" in refused(path)
        (path / name).unlink()
        os.mkfifo(path / name)
        assert "is not a regular file" in refused(path)
        (path / name).unlink()
        (tmp_path / name).rename(path / name)
    assert load_checkpoint(tiny_state(-1), path) is not None


def test_other_models_and_optimizers_are_refused(tmp_path):
    path = save(tmp_path, 4)
    assert "'model.weight' has the shape [2, 2], the model's has [2, 3]" in refused(
        path, state=tiny_state(1, width=3)
    )
    other = tiny_state(1)
    other.model.double()
    assert "has the type torch.float32, the model's has torch.float64" in refused(path, state=other)
    other = tiny_state(1)
    other.model.register_buffer("more", torch.ones(1))
    assert "has no 'more'; it is of another model" in refused(path, state=other)
    other = tiny_state(1)
    del other.model.bias
    assert "holds 'bias', which the model does not have" in refused(path, state=other)
    model = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    names = {name: name for name, _ in model.named_parameters()}
    state = TrainingState(model=model, optimizer=sgd, first_name_of=names)
    assert "its optimizer is 'AdamW', now it is 'SGD'" in refused(path, state=state)


def test_groups_that_were_apart_are_not_joined(tmp_path):
    state = tiny_state(3)
    weight, bias = state.model.parameters()
    state.optimizer.param_groups[0]["params"] = [weight]
    state.optimizer.add_param_group({"params": [bias], "lr": 0.5})
    path = save(tmp_path, 3, state)
    assert "'weight' and 'bias' had different settings" in refused(path)


# ---------------------------------------------------------------------------- what is saved


def test_user_state_comes_back_as_it_was(tmp_path):
    from collections import Counter

    state = {
        "epoch": 3,
        "best": float("inf"),
        "nan": float("nan"),
        "names": ["a", None, True],
        "pair": (1, (2.5, "x")),
        5: {"$tensor": "no tensor", (1, 2): -0.0},
        "seen": Counter({3: 2}),
        "large": 1 << 4000,
        "ema": {"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "n": torch.tensor(7)},
        "half a pair": "\ud800",
    }
    save(tmp_path, 2, state=state)
    loaded = load_checkpoint(tiny_state(0), tmp_path).state
    ema, expected_ema = loaded.pop("ema"), state.pop("ema")
    for name, tensor in expected_ema.items():
        assert torch.equal(ema[name], tensor)
        assert ema[name].dtype == tensor.dtype
    assert repr(loaded) == repr(state)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"a": {"b": [0, object()]}}, r"state\['a'\]\['b'\]\[1\]: is a builtins.object"),
        ({"f": print}, r"state\['f'\]: is a builtins.builtin_function_or_method"),
        ({"s": {1, 2}}, r"state\['s'\]: is a builtins.set"),
        ({"d": torch.float32}, r"state\['d'\]: is a torch.dtype"),
        ({"p": Evil("x")}, r"state\['p'\]: is a .*Evil"),
        ({"i": 1 << 5000}, r"state\['i'\]: is an integer of 5,001 bits"),
        ({"z": torch.ones(1, dtype=torch.complex128)}, "complex128"),
        ({torch.ones(1): 1}, "state: has a tensor as a key"),
    ],
)
def test_other_kinds_of_state_are_refused_by_name(tmp_path, value, reason):
    with pytest.raises(CheckpointError, match=reason):
        save(tmp_path, 2, state=value)
    assert list(tmp_path.iterdir()) == []


def test_state_that_holds_itself_is_refused(tmp_path):
    ring = {}
    ring["me"] = ring
    with pytest.raises(CheckpointError, match="nested deeper than 50 levels"):
        save(tmp_path, 2, state=ring)


def test_an_optimizer_with_code_in_its_settings_is_refused(tmp_path):
    state = tiny_state(1)
    state.optimizer.param_groups[0]["hook"] = lambda: None
    with pytest.raises(CheckpointError, match=r"group 0 on stage 0\['hook'\]: is a builtins.func"):
        save(tmp_path, 2, state)


def test_a_run_that_went_back_is_the_newest(tmp_path):
    """Else a later load would take the checkpoint that was given up."""
    for number in (2, 4, 6):
        save(tmp_path, number)
    assert load_checkpoint(tiny_state(0), tmp_path / "step-00000002").progress.num_steps == 2
    save(tmp_path, 3)
    assert newest_checkpoint(tmp_path).name == "step-00000003"
    names = sorted(path.name for path in tmp_path.iterdir())
    kept = ["step-00000002", "step-00000003"]
    assert names == ["set-aside.step-00000004", "set-aside.step-00000006", *kept]
    assert load_checkpoint(tiny_state(0), tmp_path / "set-aside.step-00000006") is not None


def test_going_back_keeps_the_checkpoint_that_training_came_from(tmp_path):
    """A later one that is damaged must not take its place among those that are kept."""
    for number in (2, 4, 6):
        save(tmp_path, number)
    save(tmp_path, 8, since=2)
    names = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step"))
    assert names == ["step-00000002", "step-00000008"]
    save(tmp_path, 9, since=8)
    assert newest_checkpoint(tmp_path).name == "step-00000009"
    assert (tmp_path / "step-00000002").exists()


def test_names_that_only_look_like_checkpoints(tmp_path):
    save(tmp_path, 4)
    (tmp_path / "step-00000099").write_text("a file")
    (tmp_path / "step-0000000x").mkdir()
    assert newest_checkpoint(tmp_path).name == "step-00000004"
    (tmp_path / "step-00000098").mkdir()
    before = f"continue from the one before with --resume-from {tmp_path / 'step-00000004'}"
    for path in (tmp_path, tmp_path / "step-00000098"):
        said = refused(path)
        assert said.endswith(before)
        assert "pipeplan.json: cannot be read" in said or "has no pipeplan.json; it is no" in said


# ---------------------------------------------------------------------------- writing


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    """A limit on the size of files fails like a full disk: at any byte of any file."""
    save(tmp_path, 2)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    sizes = [file.stat().st_size for file in (tmp_path / "step-00000002").iterdir()]
    try:
        for limit in (0, 1, 100, *(size - 1 for size in sizes)):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
            with pytest.raises(
                CheckpointError, match=f"cannot be written: {os.strerror(errno.EFBIG)}"
            ):
                save(tmp_path, 4)
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
            assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
            assert load_checkpoint(tiny_state(0), tmp_path).progress.num_steps == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    save(tmp_path, 4)
    assert newest_checkpoint(tmp_path).name == "step-00000004"


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/checkpoints"):
        with pytest.raises(CheckpointError, match="cannot be used: "):
            save(tmp_path / folder, 2)


def test_two_runs_do_not_save_into_one_folder_at_once(tmp_path):
    save(tmp_path, 2)
    with locked(tmp_path), pytest.raises(CheckpointError, match="another run is saving here"):
        save(tmp_path, 4)
    save(tmp_path, 4)
    assert newest_checkpoint(tmp_path).name == "step-00000004"


def test_a_kill_at_every_call_of_the_system_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """The process dies at its n-th write, sync, rename or removal, for every n."""
    save(tmp_path, 2)
    for mark in range(1000):
        dist.destroy_process_group()  # its threads do not survive a fork
        child = os.fork()
        form_group()
        if child == 0:
            left = [mark]
            for owner, name in (
                (os, "fsync"),
                (os, "rename"),
                (os, "unlink"),
                (os, "rmdir"),
                (saving, "write_tensor_file"),
                (saving, "write_description"),
                (saving, "put_in_place"),
                (saving, "remove_surplus"),
            ):
                monkeypatch.setattr(owner, name, dying(getattr(owner, name), left))
            code = 1
            try:
                save(tmp_path, 4)
                code = 0
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        state = tiny_state(0)
        assert load_checkpoint(state, tmp_path).progress.num_steps in (2, 4)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        shutil.rmtree(tmp_path / "step-00000004", ignore_errors=True)
    assert mark > 8
    assert newest_checkpoint(tmp_path).name == "step-00000004"


def dying(original, left):
    def run(*args, **kwargs):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return original(*args, **kwargs)

    return run


def test_links_are_removed_and_never_followed(tmp_path):
    """A link in the place of a leftover or of an old checkpoint must not empty its target."""
    outside, folder = tmp_path / "outside", tmp_path / "saved"
    outside.mkdir()
    (outside / "precious").write_text("stays")
    folder.mkdir()
    (folder / ".step-00000001.partial").symlink_to(outside)
    (folder / ".step-00000004.partial").symlink_to(outside)
    (folder / "step-00000001").symlink_to(outside)
    for number in (2, 3, 4):
        save(folder, number)
    assert (outside / "precious").read_text() == "stays"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"step-{number:08d}" for number in (2, 3, 4)
    ]


# ---------------------------------------------------------------------------- one file


def test_exported_weights_load_everywhere(tmp_path):
    from safetensors.torch import load_file

    saved = tiny_state(4)
    path = save(tmp_path / "saved", 4, saved)
    output = tmp_path / "model.safetensors"
    done = export_checkpoint(tmp_path / "saved", output)
    assert (done.checkpoint, done.num_steps, done.num_tensors, done.num_bytes) == (path, 4, 2, 24)
    for name, tensor in load_file(output).items():
        assert torch.equal(tensor, saved.model.state_dict()[name])
    state = tiny_state(0)
    optimizer = values(state)[1]
    load_weights(state, [output])
    assert values(state)[0][:2] == values(saved)[0][:2]
    assert values(state)[1] == optimizer


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    first, second = save(tmp_path / "saved", 2), save(tmp_path / "saved", 4)
    file = second / "stage-000.safetensors"
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])
    position = start + header["model.bias"]["data_offsets"][0]
    file.write_bytes(whole[:position] + bytes([whole[position] ^ 64]) + whole[position + 1 :])
    output = tmp_path / "model.safetensors"
    with pytest.raises(
        CheckpointError, match=f"'model.bias': its checksum.*the one before, {first}"
    ):
        export_checkpoint(tmp_path / "saved", output)
    assert not output.exists()
    with pytest.raises(CheckpointError, match="lies in the checkpoint"):
        export_checkpoint(first, first / "state.safetensors")
    with pytest.raises(CheckpointError, match="none: does not exist; give the folder"):
        export_checkpoint(tmp_path / "none", output)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty: holds no checkpoint"):
        export_checkpoint(tmp_path / "empty", output)
    with pytest.raises(CheckpointError, match="safetensors: is a file; give the folder"):
        export_checkpoint(first / "state.safetensors", output)
    old, _ = write_first_format(tmp_path / "old", 3)
    with pytest.raises(CheckpointError, match=r"checkpoint/1.*load and save it again first"):
        export_checkpoint(old, output)


def weights(path, **tensors):
    from safetensors.torch import save_file

    save_file(tensors, path)
    return path


def test_weights_of_another_model_are_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    right = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}

    def refused_weights(*paths, **options):
        state = tiny_state(0)
        before = values(state)
        with pytest.raises(CheckpointError) as caught:
            load_weights(state, paths, **options)
        assert values(state) == before
        return str(caught.value)

    assert f"{path}: has no 'bias'" in refused_weights(weights(path, weight=right["weight"]))
    assert "the files: has no 'weight'" in refused_weights()
    more = weights(path, **right, more=torch.ones(1))
    assert f"{path}: holds 'more', which the model does not have" in refused_weights(more)
    wide = weights(path, weight=torch.ones(2, 3), bias=right["bias"])
    assert "'weight' has the shape [2, 3]" in refused_weights(wide, cast=True)
    half = weights(path, **{name: t.half() for name, t in right.items()})
    assert "torch.float16, the model's has torch.float32" in refused_weights(half)
    assert "give cast=True" in refused_weights(half)
    whole = weights(path, **{name: t.long() for name, t in right.items()})
    assert "torch.int64" in refused_weights(whole, cast=True)
    weights(path, **right)
    assert "holds 'bias', as" in refused_weights(path, path)
    state = tiny_state(0)
    load_weights(state, [weights(path, **{name: t.half() for name, t in right.items()})], cast=True)
    assert state.model.weight.tolist() == right["weight"].tolist()
    first = weights(tmp_path / "1.safetensors", weight=right["weight"] * 2)
    load_weights(state, [first, weights(tmp_path / "2.safetensors", bias=right["bias"])])
    assert state.model.weight.tolist() == (right["weight"] * 2).tolist()


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(3, 2)
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_stand_under_any_name(tmp_path):
    model = Tied()
    names = dict.fromkeys(("embed.weight", "head.weight"), "embed.weight")
    state = TrainingState(model=model, optimizer=None, first_name_of=names)
    value = torch.full((3, 2), 5.0)
    for name in names:
        with torch.no_grad():
            model.embed.weight.zero_()
        load_weights(state, [weights(tmp_path / "w.safetensors", **{name: value})])
        assert model.head.weight.tolist() == value.tolist()
    both = weights(
        tmp_path / "w.safetensors", **{"embed.weight": value, "head.weight": value.clone()}
    )
    load_weights(state, [both])
    torn = {"embed.weight": value, "head.weight": value + 1}
    with pytest.raises(
        CheckpointError, match=r"'embed\.weight' and 'head\.weight' differ, but are one"
    ):
        load_weights(state, [weights(tmp_path / "w.safetensors", **torn)])


def test_saving_while_another_thread_reads(tmp_path):
    """A reader beside the writer gets a whole checkpoint, or says that it is gone."""
    save(tmp_path, 1)
    results = []

    def export():
        for _ in range(20):
            with contextlib.suppress(CheckpointError):
                results.append(export_checkpoint(tmp_path, tmp_path / "m.safetensors").num_steps)

    thread = threading.Thread(target=export)
    thread.start()
    for number in range(2, 12):
        save(tmp_path, number)
    thread.join()
    assert results == sorted(results)
    assert results
