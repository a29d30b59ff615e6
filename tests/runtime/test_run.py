"""`python -m pipeplan.run` and the examples, started as people start them."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import pipeplan as pp
from instances import flat_cluster
from one_stage import plan as plan_plainly
from pipeplan.profile import LayerProfile, ModelProfile
from runtime.workers import few_at_once

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(num_ranks, *arguments, cwd, **environment):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    with few_at_once():
        return subprocess.run(
            [*command, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )


def text_plan(tmp_path):
    names = ["before", *(f"blocks.{i}" for i in range(6)), "behind"]
    layers = tuple(
        LayerProfile(
            name=name, forward_ms=4, backward_ms=8, output_bytes=196_608, parameter_bytes=4e5
        )
        for name in names
    )
    profile = ModelProfile(name="text", microbatch_size=2, layers=layers)
    plan = plan_plainly(profile, flat_cluster(2, 0.05), microbatches=4)
    pp.write_plan(plan, tmp_path / "text.plan.json")
    return plan


def run_arguments(tmp_path):
    text_plan(tmp_path)
    arguments = ("-m", "pipeplan.run", tmp_path / "text.plan.json", "text_model:build_model")
    options = ("--checkpoint", tmp_path / "saved", "--trace", tmp_path / "trace.json")
    return arguments, options


def check_trace(events, num_devices, num_microbatches):
    """Every device has all its blocks, predicted and as they ran; no two of a track overlap."""
    tracks = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for device in range(num_devices):
        for track in (0, 1):
            names = [event["name"] for event in tracks[device, track]]
            blocks = {f"{kind}{m}" for kind in "FB" for m in range(num_microbatches)}
            assert blocks <= set(names), f"device {device}, track {track}: {names}"
    for track in tracks.values():
        track.sort(key=lambda event: event["ts"])
        for event, following in itertools.pairwise(track):
            assert event["ts"] + event["dur"] <= following["ts"] + 0.002
    assert min(event["ts"] for event in itertools.chain(*tracks.values())) >= 0


def test_run_trains_and_writes_a_trace(tmp_path):
    arguments, options = run_arguments(tmp_path)
    done = torchrun(2, *arguments, "--steps", "3", *options, cwd=EXAMPLES)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["step", str(i)] for i in (1, 2, 3)]
    assert "(predicted" in lines[0]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    check_trace(events, num_devices=2, num_microbatches=4)


def find_rank(rank, mark):
    """The process of a rank, by the variables that it inherits."""
    wanted = {f"RANK={rank}".encode(), f"MARK={mark}".encode()}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted <= set(path.read_bytes().split(b"\0")):
                return int(path.parent.name)
    raise AssertionError(f"there is no rank {rank}")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds ranks by /proc")
@pytest.mark.parametrize(
    ("victim", "number", "what"),
    [
        (1, signal.SIGKILL, "rank 1 (stage 1 on d1) died"),
        pytest.param(0, signal.SIGKILL, "rank 0 (stage 0 on d0) died", marks=pytest.mark.full),
        pytest.param(1, signal.SIGINT, "rank 1 (stage 1 on d1) was", marks=pytest.mark.full),
    ],
)
def test_torchrun_says_which_rank_ended(tmp_path, victim, number, what):
    (arguments, _), mark = run_arguments(tmp_path), str(tmp_path)
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *arguments)
    with (
        few_at_once(),
        open(tmp_path / "stderr", "w") as stderr,
        subprocess.Popen(
            [*map(str, command), "--steps", "100000"],
            cwd=EXAMPLES,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MARK": mark},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as started,
    ):
        for _ in range(3):  # steps that are done
            assert started.stdout.readline().startswith("step")
        os.kill(find_rank(victim, mark), number)
        began = time.monotonic()
        started.stdout.read()
        assert started.wait(timeout=60) != 0
    assert time.monotonic() - began < 30
    text = (tmp_path / "stderr").read_text()
    lines = [line for line in text.splitlines() if line.startswith("pipeplan:")]
    assert len(lines) == 1, text
    assert lines[0].startswith(f"pipeplan: {what}")
    with pytest.raises(AssertionError, match="there is no rank"):
        find_rank(1 - victim, mark)


@pytest.mark.full
def test_run_goes_on_from_its_checkpoint(tmp_path):
    arguments, options = run_arguments(tmp_path)
    torchrun(2, *arguments, "--steps", "3", *options, cwd=EXAMPLES)
    more = torchrun(2, *arguments, "--steps", "4", *options, cwd=EXAMPLES)
    assert more.stdout.startswith("goes on after step 3\nstep    4")
    damaged = tmp_path / "saved" / "step-00000004" / "stage-001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x99")
    refused = torchrun(2, *arguments, "--steps", "5", *options, cwd=EXAMPLES)
    before = tmp_path / "saved" / "step-00000003"
    said = [line for line in refused.stderr.splitlines() if line.startswith("pipeplan:")]
    assert len(said) == 1
    assert said[0].startswith(f"pipeplan: {damaged}: ")
    assert said[0].endswith(f"--resume-from {before}")
    resume = (*arguments, "--steps", "4", *options, "--resume-from", before)
    again = torchrun(2, *resume, cwd=EXAMPLES)
    assert (
        again.stdout.split(" ms")[0].rsplit(" ", 1)[0]
        == more.stdout.split(" ms")[0].rsplit(" ", 1)[0]
    )


@pytest.mark.full
def test_mistakes_take_one_line(tmp_path):
    text_plan(tmp_path)
    run = ("-m", "pipeplan.run", tmp_path / "text.plan.json")
    done = torchrun(2, *run, "text_model:nothing", cwd=EXAMPLES)
    said = [line for line in done.stderr.splitlines() if line.startswith("pipeplan:")]
    assert said == [
        "pipeplan: 'text_model:nothing': the module 'text_model' has no function 'nothing'"
    ]
    plan = pp.read_plan(tmp_path / "text.plan.json")
    wide = (pp.Stage(layers=range(len(plan.model.layers)), devices=(0, 1)),)
    narrow = dataclasses.replace(plan.model, microbatch_size=1)
    schedule = pp.Schedule(plan.schedule.orders[:1])
    wide_plan = dataclasses.replace(plan, model=narrow, stages=wide, schedule=schedule)
    pp.write_plan(wide_plan, tmp_path / "wide.plan.json")
    run = ("-m", "pipeplan.run", tmp_path / "wide.plan.json", "text_model:build_model")
    done = torchrun(2, *run, "--as-is", cwd=EXAMPLES)
    said = [line for line in done.stderr.splitlines() if line.startswith("pipeplan:")]
    assert said == [
        "pipeplan: stages[0]: has 2 replicas, more than a microbatch has rows (1); plan without"
        " --divisible, or leave out --as-is"
    ]
    alone = subprocess.run(
        [sys.executable, "-m", "pipeplan.run", "plan.json", "text_model:build_model"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert alone.returncode == 2
    assert alone.stderr.startswith("pipeplan: ranks: start this with torchrun")


@pytest.mark.full
def test_example_trains(tmp_path):
    done = torchrun(4, EXAMPLES / "train_text.py", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines()]
    assert losses[-1] < losses[0]
    assert (tmp_path / "train_text.trace.json").exists()


@pytest.mark.full
def test_losing_a_device_leads_to_a_new_plan(tmp_path):
    done = torchrun(
        3,
        *("--max-restarts", "2", EXAMPLES / "elastic" / "train.py"),
        cwd=tmp_path,
        LOSE_AT="5:1",
        STEPS="7",
        CHECKPOINTS=str(tmp_path / "saved"),
    )
    assert done.returncode == 0, done.stderr
    plans = [line for line in done.stdout.splitlines() if line.startswith("plan:")]
    assert len(plans) == 2
    assert plans[1].endswith("after step 4")
    steps = [line for line in done.stdout.splitlines() if line.startswith("step   5")]
    assert len(set(steps)) == 1, steps
