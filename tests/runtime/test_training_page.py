"""The three files of docs/training.md run as they stand there."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import pipeplan as pp  # noqa: E402
from command_line import run_command  # noqa: E402
from pipeplan import runtime  # noqa: E402
from pipeplan.runtime import CheckpointError  # noqa: E402
from pipeplan.splitting import lay_out  # noqa: E402
from runtime.workers import run_ranks  # noqa: E402

ROOT = Path(__file__).parents[2]
MODEL, PLANNING, SCRIPT = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs/training.md").read_text(), re.DOTALL | re.MULTILINE
)


def test_the_script_is_short():
    assert len([line for line in (MODEL + SCRIPT).splitlines() if line.strip()]) <= 36


def run_script(rank, folder, num_steps):
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    script = SCRIPT.replace("join_ranks()\n", "")  # the ranks of tests are joined already
    names = {}
    script = script.replace("num_steps < 6", f"num_steps < {num_steps}")
    exec(compile(script, "docs/training.md", "exec"), names)  # noqa: S102
    pipeline = names["pipeline"]
    assert not any(torch.isnan(value).any() for value in pipeline.model.state_dict().values())
    return pipeline.num_steps, pipeline.scheduler.get_last_lr()


def test_the_script_trains_and_resumes(tmp_path, capfd):
    (tmp_path / "gpt2.py").write_text(MODEL)
    (tmp_path / "plan.py").write_text(PLANNING)
    planned = subprocess.run(
        [sys.executable, "plan.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert (planned.returncode, planned.stdout) == (0, ""), planned.stderr
    model = runpy.run_path(str(tmp_path / "gpt2.py"))["build"]()
    plan = pp.read_plan(tmp_path / "gpt2.plan.json")
    assert [layer.name for layer in plan.model.layers] == list(lay_out(model).names)
    whole = tmp_path / "whole"
    whole.mkdir()
    for name in ("gpt2.py", "gpt2.plan.json"):
        (whole / name).write_bytes((tmp_path / name).read_bytes())
    first = run_ranks(2, run_script, tmp_path, 3)
    assert [steps for steps, _ in first] == [3, 3]
    resumed, at_once = run_ranks(2, run_script, tmp_path, 6), run_ranks(2, run_script, whole, 6)
    assert resumed == at_once
    exported = []
    for folder in (tmp_path, whole):
        output = folder / "model.safetensors"
        code, stdout, stderr = run_command(
            capfd, "export-checkpoint", folder / "checkpoints", "-o", output
        )
        assert (code, stderr) == (0, "")
        assert stdout.endswith("MB, after step 6\n")
        exported.append(output.read_bytes())
    assert exported[0] == exported[1]  # a resumed run is the run that was never interrupted
    from safetensors.torch import load_file

    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    absent = tmp_path / "absent"
    code, _, stderr = run_command(capfd, "export-checkpoint", absent, "-o", "x.safetensors")
    assert (code, stderr.partition(";")[0]) == (2, f"pipeplan: {absent}: does not exist")
    code, _, stderr = run_command(capfd, "export-checkpoint", tmp_path, "-o", "x.safetensors")
    assert (code, stderr) == (2, f"pipeplan: {tmp_path}: holds no checkpoint\n")


def test_exporting_needs_no_torch(tmp_path):
    script = (
        "import sys; sys.modules['torch'] = None; sys.modules['safetensors'] = None;"
        "from pipeplan.cli import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", script, "export-checkpoint", str(tmp_path), "-o", "x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"pipeplan: {tmp_path}: holds no checkpoint\n")
    assert issubclass(CheckpointError, runtime.RuntimeMismatchError)
