"""What `pipeplan.run` does with a plan that has more replicas than rows, and after Ctrl-C."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys

import pytest

from instances import even_model, flat_cluster
from pipeplan.documents.files import write_plan
from pipeplan.errors import InputError
from pipeplan.planning.door import plan
from pipeplan.run import _runnable


def test_plans_that_cannot_run_are_planned_anew(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    model, cluster = even_model(8, 1, 2), flat_cluster(4)  # one row in a microbatch
    too_wide = plan(model, cluster, 4, "data-parallel")
    anew = _runnable(too_wide, as_is=False)
    assert {stage.num_replicas for stage in anew.stages} == {1}
    assert "has 4 replicas, more than a microbatch has rows (1)" in capsys.readouterr().err
    assert _runnable(anew, as_is=True) is anew
    with pytest.raises(InputError, match="plan without --divisible, or leave out --as-is"):
        _runnable(too_wide, as_is=True)


SLOW_MODEL = """
import time, sys
import torch
from torch import nn

def build():
    if "slow_build" in sys.argv[-1]:
        print("step 0", flush=True)
        time.sleep(600)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

slow_build = build

def make_batch(step, rows):
    return torch.ones(rows, 4), torch.ones(rows, 4)

def loss_fn(output, targets):
    time.sleep(0.05)
    return nn.functional.mse_loss(output, targets)
"""


@pytest.mark.parametrize(
    ("build", "line"),
    [
        ("build", "pipeplan: rank 0 (stage 0 on d0) was interrupted; all ranks end\n"),
        ("slow_build", "pipeplan: interrupted\n"),
    ],
)
def test_ctrl_c_exits_with_130_and_one_line(tmp_path, build, line):
    pytest.importorskip("torch")
    (tmp_path / "slow_model.py").write_text(SLOW_MODEL)
    model = dataclasses.replace(even_model(2, 1, 2), microbatch_size=2)
    layers = tuple(
        dataclasses.replace(layer, name=str(index)) for index, layer in enumerate(model.layers)
    )
    made = plan(dataclasses.replace(model, layers=layers), flat_cluster(1), 2)
    write_plan(made, tmp_path / "plan.json")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments = ["plan.json", "--steps", "100000", f"slow_model:{build}"]
    with subprocess.Popen(
        [sys.executable, "-m", "pipeplan.run", *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", **ranks},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout.readline().startswith("step")
        started.send_signal(signal.SIGINT)
        _, said = started.communicate(timeout=30)
    assert (started.returncode, said) == (130, line)
