"""Planners and schedules of other packages: the documented example, and packages that misbehave."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pipeplan.checker import check
from pipeplan.documents.files import read_plan

PROJECT = Path(__file__).parents[1]
IMPORTS = """
from dataclasses import replace
import numpy as np
from pipeplan import Bound, Stage
from pipeplan.pipeline import BoundScope
from pipeplan.planning.baselines import BASELINES
from pipeplan.schedules import SCHEDULES
"""


def install(folder: Path, code: str, entry_points: dict[str, dict[str, str]]) -> None:
    """Put a module and its metadata into a folder, as an installer would."""
    (folder / "my_planners.py").write_text(code)
    metadata = folder / "my_planners-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-planners\nVersion: 1.0\n")
    lines = []
    for group, functions in entry_points.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in functions.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


def install_function(folder: Path, body: str, kind: str = "planners") -> None:
    """A package of one function, `mine`."""
    code = f"{IMPORTS}\ndef mine(*given):\n    {body}\n"
    install(folder, code, {f"pipeplan.{kind}": {"mine": "my_planners:mine"}})


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process whose path has the folder."""
    return subprocess.run(
        [sys.executable, "-m", "pipeplan", *arguments],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def plan(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "plan", "vgg19", "4x2-10g", "-m", "4", *options)


@pytest.fixture
def example(tmp_path):
    """The package that CONTRIBUTING.md shows, installed."""
    blocks = re.findall(
        "```(toml|python)\n(.*?)```", (PROJECT / "CONTRIBUTING.md").read_text(), re.S
    )
    texts = dict(blocks)
    assert len(blocks) == len(texts) == 2
    install(tmp_path, texts["python"], tomllib.loads(texts["toml"])["project"]["entry-points"])
    return tmp_path


class TestExample:
    def test_a_planner(self, example):
        done = plan(example, "--planner", "mine", "-o", str(example / "p.json"))
        assert (done.returncode, done.stderr) == (0, "")
        made = read_plan(example / "p.json")
        assert made.planner == "mine"
        assert [stage.devices for stage in made.stages] == [(0,), (1,)]
        assert check(made).ok

    def test_a_schedule(self, example):
        done = plan(example, "--planner", "mine", "--schedule", "mine", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        document = json.loads(done.stdout)
        assert document["options"]["schedule"] == "mine"
        orders = document["schedule"]
        assert orders[0][:3] == ["F0", "F1", "B0"]
        assert orders[1][:2] == ["F0", "B0"]
        assert document["predicted"]["schedule_guarantee_ms"] is None

    def test_comparisons_and_messages_know_it(self, example):
        chosen = ("--planners", "mine,gpipe", "--json", "-m", "4")
        done = run(example, "compare", "vgg19", "4x2-10g", *chosen)
        assert {row["planner"] for row in json.loads(done.stdout)["rows"]} == {"mine", "gpipe"}
        unknown = plan(example, "--planner", "qqqqqq")
        assert unknown.returncode == 2
        assert ", mine" in unknown.stderr

    def test_no_plan_is_exit_code_3(self, example):
        one = {"name": "one", "devices": [{"name": "d"}], "bandwidth_gb_per_s": [[0]]}
        (example / "c.json").write_text(json.dumps({"format": "pipeplan.cluster/1", **one}))
        done = run(example, "plan", "vgg19", str(example / "c.json"), "--planner", "mine")
        assert done.returncode == 3
        assert done.stderr == (
            "pipeplan: mine: needs two layers and two devices; use planner 'best'\n"
        )


def test_a_planner_s_own_time_is_ignored(tmp_path):
    install_function(
        tmp_path,
        "return replace(BASELINES['gpipe'](*given), iteration_ms=1.0, notes={'by': 'hand'})",
    )
    done = plan(tmp_path, "--planner", "mine", "--json")
    truth = plan(tmp_path, "--planner", "gpipe", "--json")
    assert (done.returncode, done.stderr) == (0, truth.stderr)
    made, right = json.loads(done.stdout), json.loads(truth.stdout)
    assert made["predicted"] == right["predicted"]
    assert made["options"]["by"] == "hand"


GPIPE = "draft = BASELINES['gpipe'](*given); "
WRONG_PLANNERS = {
    "raises": ("1 / 0", ["'mine' failed (ZeroDivisionError: division by zero)"]),
    "ends the process": ("raise SystemExit(0)", ["'mine' failed (SystemExit: 0)"]),
    "two lines": ("raise ValueError('a\\n\\x1b[2Jb')", ["'mine' failed (ValueError: a ?[2Jb)"]),
    "gives nothing": ("pass", ["a NoneType instead of a Draft"]),
    "no such stage": ("Stage(layers=range(0), devices=(0,))", ["'mine' failed", "layers"]),
    "no such device": (
        f"{GPIPE}return replace(draft, stages=(Stage(layers=range(24), devices=(99,)),))",
        ["'mine' made a plan that is not valid: stages[0].devices: there is no device 99"],
    ),
    "leaves layers out": (
        f"{GPIPE}return replace(draft, stages=draft.stages[:-1], codes=draft.codes[:-1])",
        ["'mine' made a plan that is not valid: stages: cover"],
    ),
    "leaves blocks out": (
        f"{GPIPE}return replace(draft, codes=draft.codes[:, 1:])",
        ["'mine' made a plan that is not valid: schedule[0]: does not hold every block"],
    ),
    "deadlocks": (
        f"{GPIPE}c = draft.codes.copy(); c[0] = [0, -1, 1, -2, 2, -3, 3, -4];"
        " return replace(draft, codes=c)",
        ["schedule: deadlocks"],
    ),
    "codes are no numbers": (f"{GPIPE}return replace(draft, codes='abc')", ["'mine' failed"]),
    "bound above its time": (
        f"{GPIPE}b = Bound(lower_bound_ms=1e6, scope=BoundScope.ANY);"
        " return replace(draft, bound=b)",
        ["'mine' made a plan that is not valid: predicted.lower_bound_ms"],
    ),
    "false guarantee": (
        f"{GPIPE}return replace(draft, schedule_guarantee_ms=1.0)",
        ["'mine' made a plan that is not valid: predicted.schedule_guarantee_ms"],
    ),
    "notes that no file can hold": (
        f"{GPIPE}return replace(draft, notes={{'x': object()}})",
        ["options"],
    ),
}


@pytest.mark.parametrize("name", WRONG_PLANNERS)
def test_a_wrong_planner_is_refused_in_one_line(tmp_path, name):
    body, parts = WRONG_PLANNERS[name]
    install_function(tmp_path, body)
    refused(plan(tmp_path, "--planner", "mine", "-o", str(tmp_path / "p.json")), *parts)
    assert not (tmp_path / "p.json").exists()


WRONG_SCHEDULES = {
    "raises": ("1 / 0", ["schedule: 'mine' failed (ZeroDivisionError: division by zero)"]),
    "gives nothing": ("pass", ["schedule: 'mine' failed (AttributeError"]),
    "leaves blocks out": (
        "run = SCHEDULES['gpipe'](*given); return replace(run, order_SM2=run.order_SM2[:, 1:])",
        ["schedule: 'mine' made a plan that is not valid: schedule[0]: does not hold every block"],
    ),
}


@pytest.mark.parametrize("name", WRONG_SCHEDULES)
def test_a_wrong_schedule_is_refused_in_one_line(tmp_path, name):
    body, parts = WRONG_SCHEDULES[name]
    install_function(tmp_path, body, "schedules")
    refused(plan(tmp_path, "--planner", "gpipe", "--schedule", "mine"), *parts)


@pytest.mark.parametrize("kind", ["planner", "schedule"])
def test_a_package_that_cannot_be_imported_is_named(tmp_path, kind):
    install(
        tmp_path,
        "import no_such_package",
        {f"pipeplan.{kind}s": {"mine": "my_planners:mine"}},
    )
    refused(
        plan(tmp_path, f"--{kind}", "mine"),
        f"{kind}: 'mine' of 'my_planners:mine' cannot be loaded"
        " (ModuleNotFoundError: No module named 'no_such_package');"
        " mend or uninstall that package",
    )
    assert plan(tmp_path, "--planner", "gpipe").returncode == 0


def test_our_own_names_win(tmp_path):
    install(tmp_path, "1 / 0", {"pipeplan.planners": {"gpipe": "my_planners:mine"}})
    assert plan(tmp_path, "--planner", "gpipe").returncode == 0


def refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """One line on stderr with all of the parts, and exit code 2."""
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("pipeplan: ")
    assert done.stderr.count("\n") == 1
    assert done.stderr[:-1].isprintable()
    for part in parts:
        assert part in done.stderr


def test_a_broken_package_takes_one_row_of_a_comparison(tmp_path):
    install_function(tmp_path, "raise ValueError('boom')")
    command = ("compare", "vgg19", "4x2-10g", "-m", "4", "--effort", "0.1", "--json")
    done = run(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    rows = {row["planner"]: row for row in json.loads(done.stdout)["rows"]}
    assert "boom" in rows["mine"]["infeasible_reason"]
    assert rows["gpipe"]["iteration_ms"] > 0
    refused(run(tmp_path, *command, "--planners", "gpipe,mine"), "planner: 'mine' failed", "boom")
