"""Inputs and outputs of commands: refused before the work where they clash; `-` is a stream."""

import io
import json
import os
from pathlib import Path

import pytest

from command_line import run_command
from pipeplan import zoo
from pipeplan.commands import paths, progress
from pipeplan.documents import files
from pipeplan.planning import door, inputs

BAD_NAME = "\x1b[31m[b]x[b]:cat:\u202e"


@pytest.fixture
def run(capfd, monkeypatch, tmp_path):
    """Runs the command line in an empty folder with bytes as standard input."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "QUIET_S", 1000.0)  # however busy the machine is

    def run(*arguments: object, given: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
        return run_command(capfd, *arguments)

    return run


@pytest.fixture
def plan_file(tmp_path) -> Path:
    made = door.plan(zoo.model("vgg19"), zoo.cluster("4x2-10g-no-shared-card"), 2, "spp")
    files.write_plan(made, tmp_path / "p.json")
    files.write_model(made.model, tmp_path / "m.json")
    files.write_cluster(made.cluster, tmp_path / "c.json")
    os.link(tmp_path / "p.json", tmp_path / "hard.json")
    (tmp_path / "soft.svg").symlink_to("p.json")
    (tmp_path / "folder").mkdir()
    return tmp_path / "p.json"


@pytest.fixture
def no_work(monkeypatch):
    """Fails as soon as anything is read or planned."""

    def work(*_, **__):
        raise AssertionError("the work has begun")

    monkeypatch.setattr(door, "plan", work)
    monkeypatch.setattr(files, "read_plan", work)
    monkeypatch.setattr(inputs, "read_model", work)
    monkeypatch.setattr(inputs, "read_cluster", work)


@pytest.mark.parametrize(
    ("arguments", "first", "second"),
    [
        (["report", "p.json", "-o", "p.json"], "-o: 'p.json'", "PLAN ('p.json')"),
        (["report", "p.json", "-o", "folder/../p.json"], "-o: 'folder/../p.json'", "PLAN"),
        (["trace", "p.json", "-o", "hard.json"], "-o: 'hard.json'", "PLAN ('p.json')"),
        (["plot", "p.json", "-o", "soft.svg"], "-o: 'soft.svg'", "PLAN ('p.json')"),
        (["plan", "m.json", "c.json", "-o", "m.json"], "-o: 'm.json'", "MODEL ('m.json')"),
        (["plan", "m.json", "c.json", "-o", "./c.json"], "-o: './c.json'", "CLUSTER ('c.json')"),
        (["compare", "m.json", "4x2-10g", "--report", "m.json"], "--report: 'm.json'", "MODEL"),
        (["plan", "vgg19", "4x2-10g", "-o", "x", "--report", "./x"], "--report: './x'", "-o ('x')"),
        (["plan", "vgg19", "4x2-10g", "-o", "-", "--report", "-"], "--report: '-'", "-o ('-')"),
        (["sweep", "s.csv", "-o", "s.csv"], "-o: 's.csv'", "SPEC ('s.csv')"),
        (["sweep", "s.csv.journal", "-o", "s.csv"], "its journal: 's.csv.journal'", "SPEC"),
        (["plan", "-", "-"], "CLUSTER: '-' is standard input", "MODEL"),
        (["plan", "vgg19", "4x2-10g", "-o", "-", "--json"], "--json: standard output", "'-'"),
        (["compare", "vgg19", "4x2-10g", "--report", "-", "--json"], "--json: standard", "'-'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_clashes_are_refused_before_the_work(
    run, plan_file, no_work, tmp_path, arguments, first, second
):
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(f"pipeplan: {first}")
    assert second in err
    now = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert now == before


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("nowhere/x", "nowhere/x: cannot be written: No such file or directory"),
        ("p.json/x", "p.json/x: cannot be written: Not a directory"),
        ("folder", "directory"),
        ("x" * 5000, "cannot be written"),
    ],
    ids=["nowhere", "in a file", "a folder", "long"],
)
def test_outputs_that_cannot_be_are_refused_before_the_work(
    run, plan_file, no_work, output, reason
):
    for arguments in (["plan", "vgg19", "4x2-10g"], ["report", "p.json"], ["trace", "p.json"]):
        code, out, err = run(*arguments, "-o", output)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1
        assert len(err) < 1000
        assert reason in err


def test_a_folder_without_permission_is_refused_before_the_work(run, no_work, monkeypatch):
    monkeypatch.setattr(paths.os, "access", lambda path, mode: False)  # whoever runs the tests
    code, _, err = run("plan", "vgg19", "4x2-10g", "-o", "x.json")
    assert (code, err) == (2, "pipeplan: x.json: cannot be written: Permission denied\n")


def test_a_name_of_the_zoo_is_no_file(run, tmp_path):
    assert run("plan", "vgg19", "4x2-10g", "-m", 2, "--planner", "1f1b", "-o", "vgg19")[0] == 0
    assert files.read_plan(tmp_path / "vgg19").microbatches == 2


def test_the_null_device_takes_any_number_of_outputs(run):
    options = ("-o", os.devnull, "--report", os.devnull, "--planner", "1f1b", "-m", 2)
    assert run("plan", "vgg19", "4x2-10g", *options)[0] == 0


# --------------------------------------------------------------------- standard streams


def test_each_input_may_come_from_standard_input(run, plan_file, tmp_path):
    short = ("-m", 2, "--planner", "spp", "-o")
    plan = ("plan", "-", "c.json", *short, "a.json")
    assert run(*plan, given=(tmp_path / "m.json").read_bytes())[0] == 0
    plan = ("plan", "m.json", "-", *short, "b.json")
    assert run(*plan, given=(tmp_path / "c.json").read_bytes())[0] == 0
    assert (tmp_path / "a.json").read_bytes() == plan_file.read_bytes()
    assert (tmp_path / "b.json").read_bytes() == plan_file.read_bytes()
    given = plan_file.read_bytes()
    assert run("check", "-", given=given) == (0, "-: valid\n", "")
    assert run("simulate", "-", given=given) == run("simulate", "p.json")


def test_a_sweep_from_standard_input_finds_files_in_the_working_directory(run, plan_file):
    pytest.importorskip("joblib")
    spec = {
        "format": "pipeplan.sweep/1",
        "models": ["m.json"],
        "clusters": ["4x2-10g"],
        "microbatches": [2],
        "planners": ["spp"],
    }
    sweep = ("sweep", "-", "-o", "r.csv", "--jobs", 1)
    assert run(*sweep, given=json.dumps(spec).encode()) == (0, "", "pipeplan: r.csv: 1 rows\n")
    code, _, err = run(*sweep, given=json.dumps({**spec, "models": ["-"]}).encode())
    assert (code, len(err.splitlines())) == (2, 1)
    assert "'-' is standard input, which a sweep cannot use" in err


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "vgg19", "4x2-10g", "-m", "2", "--planner", "spp"],
        ["report", "p.json"],
        ["trace", "p.json"],
        ["zoo", "vgg19"],
    ],
    ids=lambda command: command[0],
)
def test_standard_output_holds_the_document_alone(run, plan_file, tmp_path, command):
    assert run(*command, "-o", "file")[0] == 0
    code, out, err = run(*command, "-o", "-")
    assert (code, err) == (0, "")
    assert out.encode() == (tmp_path / "file").read_bytes()


def test_pictures_and_pages_on_standard_output(run, plan_file):
    assert run("plot", "p.json", "-o", "-")[1].startswith("<svg")
    short = ("-m", 2, "--planners", "spp,1f1b", "--report", "-")
    code, out, err = run("compare", "vgg19", "4x2-10g", *short)
    assert (code, err) == (0, "")
    assert out.startswith("<!DOCTYPE html>")
    assert out.rstrip().endswith("</html>")


def test_a_sweep_needs_a_file(run):
    code, out, err = run("sweep", "s.json", "-o", "-")
    assert (code, out) == (2, "")
    assert "name a .csv or .parquet file" in err


# ------------------------------------------------------------------------ hostile names


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", f"{BAD_NAME}.json"],
        ["plan", BAD_NAME, "4x2-10g"],
        ["plan", "vgg19", "4x2-10g", "-o", f"{BAD_NAME}/x"],
        ["plan", "vgg19", "4x2-10g", "--planner", BAD_NAME],
        ["compare", "vgg19", "4x2-10g", "--planners", BAD_NAME],
        ["sweep", f"{BAD_NAME}.json", "-o", "r.csv"],
        ["sweep", "s.json", "-o", f"r.{BAD_NAME}"],
        ["plot", "p.json", "-o", f"r.{BAD_NAME}"],
        ["zoo", BAD_NAME],
        [BAD_NAME],
        ["plan", f"--{BAD_NAME}"],
    ],
    ids=lambda arguments: f"{arguments[0]!a} {len(arguments)}",
)
def test_names_in_messages_cannot_command_the_terminal(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.endswith("\n")
    assert err[:-1].isprintable(), err
    assert "[b]x[b]:cat:" in err


def test_file_names_in_results_cannot_command_the_terminal(run, plan_file, tmp_path):
    hostile = tmp_path / f"{BAD_NAME}.json"
    hostile.write_bytes(plan_file.read_bytes())
    code, out, err = run("check", hostile.name)
    assert (code, err) == (0, "")
    assert out == "?[31m[b]x[b]:cat:?.json: valid\n"
    code, out, err = run("demo", "-o", BAD_NAME)
    assert (code, err) == (0, "")
    assert all(c == "\n" or c.isprintable() for c in out)


def test_a_failing_sweep_s_lines_cannot_command_the_terminal(run, tmp_path):
    pytest.importorskip("joblib")
    (tmp_path / f"{BAD_NAME}.json").write_text(json.dumps({"format": BAD_NAME}))
    spec = tmp_path / "s.json"
    document = {
        "format": "pipeplan.sweep/1",
        "models": [f"{BAD_NAME}.json"],
        "clusters": ["4x2-10g"],
        "microbatches": [2],
        "planners": ["spp"],
    }
    for changes in ({}, {"models": [BAD_NAME]}, {"planners": [BAD_NAME]}, {BAD_NAME: 1}):
        spec.write_text(json.dumps({**document, **changes}))
        code, out, err = run("sweep", spec, "-o", f"{BAD_NAME}.csv")
        assert (code, out) == (2, "")
        assert err[:-1].isprintable(), err


def test_messages_are_cut_where_they_quote_something_long(run):
    for arguments in (["plan", "x" * 5000, "4x2-10g"], ["zoo", "random-8", "--seed", "9" * 4000]):
        code, _, err = run(*arguments)
        assert code == 2
        assert len(err) < 700
