"""The page on measuring: its four commands and its script with `auto`, as they stand there."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import pipeplan as pp
from command_line import run_command
from runtime.test_run import torchrun

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "measuring.md"


@pytest.fixture
def examples(tmp_path, monkeypatch):
    for name in ("text_model.py", "text.txt"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def four_commands(page):
    (block,) = re.findall(r"```\n(pipeplan profile text_model.*?)```", page.read_text(), re.DOTALL)
    return [shlex.split(line) for line in block.strip().splitlines()]


def test_from_a_model_to_training(examples, capfd):
    profile, discover, plan, run = four_commands(PAGE)
    for words in (profile, discover, plan):
        code, _, err = run_command(capfd, *words[1:], "-q")
        assert code == 0, err
    model = pp.read_model("text.model.json")
    assert [layer.name for layer in model.layers][:2] == ["before", "blocks.0"]
    assert model.tied == (("before", "behind"),)
    done = torchrun(int(run[2]), *run[3:], cwd=examples)
    assert done.returncode == 0, done.stderr
    assert "step    3  loss" in done.stdout
    code, out, err = run_command(capfd, "calibrate", "text.plan.json", "trace.json", "-q")
    assert (code, err) == (0, "")
    assert "A step took" in out


def test_one_line_of_a_script(examples):
    """The first start measures; `test_auto` starts again."""
    (script,) = re.findall(r"```python\n(# train_auto.py.*?)```", PAGE.read_text(), re.DOTALL)
    (examples / "train_auto.py").write_text(script)
    first = torchrun(2, "train_auto.py", cwd=examples)
    assert first.returncode == 0, first.stderr
    assert "measures the links between all ranks" in first.stderr
    assert len(re.findall(r"rank \d: loss", first.stdout)) == 2
    assert pp.read_plan("pipeplan-auto/plan.json").cluster.num_devices == 2
    arguments = ("-m", "pipeplan.run", "--auto", "text_model:build_model", "--global-batch", 16)
    wrong = subprocess.run(
        [sys.executable, *map(str, arguments[:3]), "a.plan.json", "text_model:build_model"],
        env={"RANK": "0", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert wrong.returncode == 2
    assert "'a.plan.json' and --auto exclude each other" in wrong.stderr
