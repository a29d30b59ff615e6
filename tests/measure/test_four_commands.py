"""profile, discover, plan, torchrun: the four commands of the README, one after another."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from command_line import run_command
from pipeplan.documents.files import read_cluster, read_plan
from runtime.workers import few_at_once, free_port

HERE = Path(__file__).parent
BATCHES = """
def make_batch(step, rows):
    torch.manual_seed(step)
    return torch.randn(rows, 8), torch.zeros(rows, 4)
"""


def test_from_a_model_to_training(tmp_path, monkeypatch, capfd):
    shutil.copy(HERE / "sample_models.py", tmp_path / "four_models.py")
    with open(tmp_path / "four_models.py", "a") as file:
        file.write(BATCHES)
    monkeypatch.chdir(tmp_path)
    profile = ("four_models:build", "--batch", "four_models:example_batch", "--repeats", 2)
    assert run_command(capfd, "profile", *profile, "-o", "my.model.json", "-q")[0] == 0
    code, out, _ = run_command(capfd, "discover", "--processes", 2, "-o", "here.cluster.json")
    assert (code, out) == (0, "here.cluster.json: 2 devices on 1 host, 1.5 to 1.5 GB/s\n")
    files = ("my.model.json", "here.cluster.json")
    assert run_command(capfd, "plan", *files, "-m", 2, "--stages", 2, "-o", "my.plan.json")[0] == 0
    hosts = {device.host for device in read_cluster("here.cluster.json").devices}
    assert hosts == {os.uname().nodename}  # the runtime finds its ranks by it
    assert read_plan("my.plan.json").num_stages == 2
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", "{port}", "-m", "pipeplan.run", "my.plan.json"]
    with few_at_once():
        ended = subprocess.run(
            [part.format(port=free_port()) for part in command]
            + ["four_models:build", "--steps", "2"],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=280,
        )
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[:2] for line in ended.stdout.splitlines()] == [
        ["step", "1"],
        ["step", "2"],
    ]
