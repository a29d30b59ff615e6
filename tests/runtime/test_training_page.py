"""The script of docs/training.md runs as it stands there."""

import os
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import pipeplan as pp  # noqa: E402
from command_line import run_command  # noqa: E402
from instances import flat_cluster  # noqa: E402
from pipeplan import runtime  # noqa: E402
from pipeplan.runtime import CheckpointError  # noqa: E402
from pipeplan.splitting import lay_out  # noqa: E402
from runtime.workers import run_ranks  # noqa: E402

ROOT = Path(__file__).parents[2]
SCRIPT, PLANNING = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs/training.md").read_text(), re.DOTALL | re.MULTILINE
)
SET_UP, TRAINING = SCRIPT.split("join_ranks()\n")
MODEL = TRAINING.partition("with Pipeline(")[0]


def test_the_script_is_short():
    assert len([line for line in SCRIPT.splitlines() if line.strip()]) <= 30


def run_script(rank, folder, num_steps):
    os.chdir(folder)
    script = SCRIPT.replace("join_ranks()\n", "")  # the ranks of tests are joined already
    names = {}
    script = script.replace("num_steps < 6", f"num_steps < {num_steps}")
    exec(compile(script, "docs/training.md", "exec"), names)  # noqa: S102
    pipeline = names["pipeline"]
    assert not any(torch.isnan(value).any() for value in pipeline.model.state_dict().values())
    return pipeline.num_steps, pipeline.scheduler.get_last_lr()


def test_the_script_trains_and_resumes(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    pp.write_cluster(flat_cluster(2, 0.05), "cluster.yaml")
    monkeypatch.setattr(runtime, "join_ranks", None)
    names = {}
    exec(compile(f"{SET_UP}\n{MODEL}\n{PLANNING}", "docs/training.md", "exec"), names)  # noqa: S102
    plan = pp.read_plan("gpt2.plan.json")
    assert [layer.name for layer in plan.model.layers] == list(lay_out(names["model"]).names)
    whole = tmp_path / "whole"
    whole.mkdir()
    for name in ("README.md", "gpt2.plan.json"):
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

    names["model"].load_state_dict(load_file(tmp_path / "model.safetensors"))
    absent = tmp_path / "absent"
    code, _, stderr = run_command(capfd, "export-checkpoint", absent, "-o", "x.safetensors")
    assert (code, stderr.partition(";")[0]) == (2, f"pipeplan: {absent}: does not exist")
    code, _, stderr = run_command(capfd, "export-checkpoint", tmp_path, "-o", "x.safetensors")
    assert (code, stderr) == (2, f"pipeplan: {tmp_path}: holds no checkpoint\n")


def test_exporting_needs_no_torch(tmp_path):
    import subprocess
    import sys

    script = (
        "import sys; sys.modules['torch'] = None; sys.modules['safetensors'] = None;"
        "from pipeplan.cli import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", script, "export-checkpoint", str(tmp_path), "-o", "x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"pipeplan: {tmp_path}: holds no checkpoint\n")
    assert issubclass(CheckpointError, runtime.RuntimeMismatchError)
