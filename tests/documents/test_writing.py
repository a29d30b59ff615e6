"""Writing: whatever kills the writer, the old file or the new one, and nothing beside it."""

import io
import os
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipeplan import zoo
from pipeplan.cluster import Cluster, Device
from pipeplan.commands.paths import require_paths
from pipeplan.documents import files, writing
from pipeplan.documents.writing import write_atomically
from pipeplan.errors import InputError, ProfileError
from pipeplan.planning.door import plan

KILLER = Path(__file__).with_name("kill_writers.py")


@pytest.mark.parametrize("num_kills", [50, pytest.param(200, marks=pytest.mark.full)])
def test_killed_writers_leave_the_old_file_or_the_new_one(tmp_path, num_kills):
    done = subprocess.run(
        [sys.executable, str(KILLER), str(tmp_path), str(num_kills)],
        env={**os.environ, "PYTHONPATH": str(KILLER.parents[1])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > num_kills / 4  # that many died while they wrote


# ------------------------------------------------------------------------------ parts


def part(folder: Path, kernel: str = "", age_s: float = 0.0) -> Path:
    """A part that a process left behind."""
    path = folder / f".pipeplan-{kernel or writing._kernel()}-0123456789abcdef.part"
    path.write_bytes(b"half of a docu")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_parts_of_dead_processes_are_removed(tmp_path):
    left = part(tmp_path)
    write_atomically(tmp_path / "new", b"x")
    assert os.listdir(tmp_path) == ["new"]
    assert not left.exists()


HOLD = """
import sys
from pipeplan.documents import writing
with open(sys.argv[1], "wb") as file:
    assert writing._try_lock(file.fileno())
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_parts_of_living_processes_stay(tmp_path):
    left = part(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, left],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writer:
        assert writer.stdout.readline() == b"locked\n"
        write_atomically(tmp_path / "new", b"x")
        assert left.exists()
        writer.stdin.close()
    write_atomically(tmp_path / "new", b"y")
    assert not left.exists()


def test_parts_of_other_machines_stay_for_a_day(tmp_path):
    recent = part(tmp_path, kernel="0" * 12, age_s=3600)
    old = part(tmp_path, kernel="1" * 12, age_s=2 * 24 * 3600)
    write_atomically(tmp_path / "new", b"x")
    assert recent.exists()
    assert not old.exists()


def test_other_files_are_never_removed(tmp_path):
    names = [".part", "x.part", ".pipeplan-notes", "pipeplan-x.part"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "target").write_bytes(b"")
    link = tmp_path / f".pipeplan-{writing._kernel()}-link.part"
    link.symlink_to("target")
    write_atomically(tmp_path / "new", b"x")
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "target", link.name, "new"])


def test_a_writer_whose_part_disappears_writes_again(tmp_path, monkeypatch):
    fsync, gone = os.fsync, []

    def lose_the_part(descriptor: int) -> None:
        fsync(descriptor)
        for path in tmp_path.glob(".*.part"):
            if len(gone) < 2:
                gone.append(path)
                path.unlink()

    monkeypatch.setattr(os, "fsync", lose_the_part)
    (tmp_path / "file").write_bytes(b"old")
    write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert len(gone) == 2


def test_many_writers_of_one_folder_do_not_disturb_each_other(tmp_path):
    problems: list[BaseException] = []

    def write_often(name: str) -> None:
        try:
            for number in range(50):
                write_atomically(tmp_path / name, f"{name}{number}".encode())
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=write_often, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        name: f"{name}49" for name in "abcd"
    }


def test_file_and_folder_are_synced(tmp_path, monkeypatch):
    fsync, synced = os.fsync, []

    def watch(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        synced.append((tmp_path / "new").exists())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    write_atomically(tmp_path / "new", b"x")
    assert synced == [False, False, True, True]  # the file before it is there, then its folder


def test_pipes_are_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_atomically(tmp_path / "pipe", b"through")
    reader.join()
    assert read == [b"through"]
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize("path", ["a\0b", "a\udcff\0"])
def test_names_that_cannot_be_are_refused(path):
    with pytest.raises(InputError, match="no file has such a name"):
        write_atomically(path, b"x")
    with pytest.raises(ProfileError, match="no file has such a name"):
        files.read_model(path)


# ------------------------------------------------------------------- standard streams


class Stream(io.TextIOWrapper):
    """A text stream over bytes, as stdin and stdout are."""

    def __init__(self, data: bytes = b"") -> None:
        super().__init__(io.BytesIO(data), encoding="ascii")


def test_the_standard_streams(monkeypatch):
    model = zoo.model("vgg19")
    out = Stream()
    monkeypatch.setattr(sys, "stdout", out)
    files.write_model(model, "-")
    written = out.buffer.getvalue()
    monkeypatch.setattr(sys, "stdin", Stream(written))
    assert files.read_model("-") == model


def test_yaml_on_the_standard_input(monkeypatch):
    text = (
        "format: pipeplan.cluster/1\nname: 'é'\n"
        "hosts: [{count: 2, devices: 2, bandwidth_gb_per_s: 12}]\nbetween_hosts_gb_per_s: 1.25\n"
    )
    monkeypatch.setattr(sys, "stdin", Stream(text.encode()))
    assert files.read_cluster("-").num_devices == 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "standard input: is empty"),
        (b'{"format": ', "standard input: is not JSON: Expecting value at line 1, column 12"),
        (b"a: [", "standard input: is not YAML"),
        (b"5", "standard input: format: is missing"),
        (b"{'format': 'pipeplan.model/1'}", "standard input: name: is missing"),
        (b'{"a": 1, "a": 2}', "standard input: 'a': stands twice"),
        (b"\xff", "standard input: is not UTF-8 text"),
    ],
)
def test_wrong_standard_input_is_refused(monkeypatch, data, message):
    monkeypatch.setattr(sys, "stdin", Stream(data))
    with pytest.raises(ProfileError) as caught:
        files.read_model("-")
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1


def test_a_closed_standard_input_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ProfileError, match="standard input: cannot be read"):
        files.read_model("-")


# ------------------------------------------------------------------------------ YAML


@pytest.mark.parametrize("name", ["\x85", "a\x7fb", "\ufffe", "\uffff", "\u2028", "\ufeff", "\x9f"])
def test_names_that_yaml_cannot_hold_as_they_are_come_back(tmp_path, name):
    model = replace(zoo.model("vgg19"), name=name)
    for suffix in ("json", "yaml"):
        path = tmp_path / f"model.{suffix}"
        files.write_model(model, path)
        assert files.read_model(path) == model


def test_yaml_that_could_not_be_read_again_is_not_written(tmp_path):
    cluster = Cluster(name="c", devices=(Device(name="d" * 2000),), bandwidth_gb_per_s=((0.0,),))
    made = plan(zoo.model("vgg19"), cluster, 2, "1f1b")
    files.write_plan(made, tmp_path / "plan.json")
    assert files.read_plan(tmp_path / "plan.json") == made
    with pytest.raises(InputError, match="write JSON"):
        files.write_plan(made, tmp_path / "plan.yaml")
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_path_that_ends_in_a_slash_is_no_file(tmp_path):
    with pytest.raises(InputError, match="Is a directory"):
        write_atomically(f"{tmp_path}/new/", b"x")
    with pytest.raises(InputError, match="Is a directory"):
        require_paths(outputs={"-o": f"{tmp_path}/new/"})
    assert not os.listdir(tmp_path)
