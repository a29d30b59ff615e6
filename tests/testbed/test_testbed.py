"""Plans that really run on an emulated cluster. Accuracy is a matter of benchmarks/testbed."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import pipeplan as pp
from command_line import run_command
from instances import flat_cluster
from pipeplan.cluster import HostGroup, expand_hosts
from pipeplan.cost import CostModel
from pipeplan.errors import InputError, RuntimeMismatchError
from pipeplan.group_schedules import group_orders
from pipeplan.pipeline import Plan, Schedule, Stage
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.replaying import simulate
from pipeplan.schedules import SCHEDULES
from pipeplan.testbed.abilities import find_abilities
from pipeplan.testbed.orders import Way
from pipeplan.testbed.showing import write_measured_page, write_measured_trace

torch = pytest.importorskip("torch")

from pipeplan.testbed.door import Testbed  # noqa: E402

FASTEST, SLOWEST = 0.7, 2.5
"""Generous: tests share the machine with each other."""
FOLDER = Path(__file__).parent


def make_plan(
    stages, cluster, *, rule="1f1b", num_microbatches=4, rows=4, megabytes=4.0, **fields
) -> Plan:
    """A plan of one layer a stage, whose iteration takes about a third of a second."""
    layers = tuple(
        LayerProfile(
            name=str(index),
            forward_ms=10.0 * stage.num_replicas,
            backward_ms=20.0 * stage.num_replicas,
            output_bytes=megabytes * 1e6,
            parameter_bytes=megabytes * 2e6,
            **fields,
        )
        for index, stage in enumerate(stages)
    )
    model = ModelProfile(name="small", microbatch_size=rows, layers=layers)
    run = SCHEDULES[rule](CostModel(model, cluster).pipeline_costs(stages), num_microbatches)
    return Plan(
        model=model,
        cluster=cluster,
        microbatches=num_microbatches,
        stages=stages,
        schedule=Schedule.from_codes(run.order_SM2),
        planner="by hand",
    )


@pytest.fixture(scope="module")
def testbed():
    with Testbed() as made:
        if made.way is not Way.NAMESPACES:
            pytest.skip(f"no network namespaces here: {made.note}")
        yield made


def require_plausible(measured):
    assert FASTEST < measured.measured_ms / measured.predicted_ms < SLOWEST
    assert len(measured.blocks) == 2 * measured.plan.num_stages * measured.plan.microbatches


def test_uneven_replicas_shares_recomputation_and_a_shared_card(testbed, tmp_path):
    cluster = expand_hosts(
        "cards",
        [HostGroup(count=2, devices=2, bandwidth_gb_per_s=1.0)],
        between_hosts_gb_per_s=0.5,
        uplink_gb_per_s=0.3,
        latency_us=100.0,
    )
    stages = (
        Stage(layers=range(1), devices=(0, 2, 3), shares=(0.5, 0.25, 0.25)),
        Stage(layers=range(1, 2), devices=(1,), recompute=True),
    )
    plan = make_plan(stages, cluster, rule="gpipe")
    measured = testbed.measure(plan, num_iterations=3, time_factor=1.0)
    require_plausible(measured)
    write_measured_page(measured, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Predicted and measured" in page
    assert page.count("Timeline of one iteration") >= 2
    write_measured_trace(measured, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ran = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert len(ran) == 4 * 2 * 4  # devices, kinds, microbatches


def test_several_stages_a_device_and_split_backwards(testbed, tmp_path):
    sets = [(0, 1), (2,), (2,), (1, 0)]
    stages = tuple(Stage(layers=range(n, n + 1), devices=each) for n, each in enumerate(sets))
    plan = make_plan(stages[:2], flat_cluster(3, 0.5))  # for its layers alone
    layers = [
        replace(plan.model.layers[0], name=str(n), weight_grad_ms=8.0) for n in range(len(stages))
    ]
    orders = group_orders("zb-v", stages, 4)
    plan = replace(
        plan,
        model=replace(plan.model, layers=tuple(layers)),
        stages=stages,
        schedule=Schedule.from_group_codes(orders),
    )
    measured = testbed.measure(plan, num_iterations=3, time_factor=1.0)
    assert FASTEST < measured.measured_ms / measured.predicted_ms < SLOWEST
    assert len(measured.blocks) == sum(map(len, orders)) == 3 * 4 * 4
    write_measured_page(measured, tmp_path / "page.html")
    write_measured_trace(measured, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ran = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert len(ran) == 3 * len(orders[0])  # three devices with two stages each


def test_gradients_are_summed_in_parts_while_they_are_computed(testbed):
    """All-reduces of 20 ms, beside last blocks of 20 ms. In four parts, three quarters hide."""
    layer = LayerProfile(
        name="a", forward_ms=20, backward_ms=40, output_bytes=1e4, parameter_bytes=10e6
    )
    model = ModelProfile(name="parts", microbatch_size=4, layers=(layer, replace(layer, name="b")))
    stages = tuple(
        Stage(layers=range(n, n + 1), devices=(2 * n, 2 * n + 1), gradient_buckets=4)
        for n in range(2)
    )
    plan = replace(make_plan(stages, flat_cluster(4, 0.5)), model=model)
    measured = testbed.measure(plan, num_iterations=3, time_factor=1.0)
    require_plausible(measured)
    whole = replace(plan, stages=tuple(replace(stage, gradient_buckets=1) for stage in stages))
    assert simulate(whole).iteration_ms - measured.predicted_ms == pytest.approx(15.0)


def test_the_command(testbed, capfd, tmp_path):
    plan = make_plan(
        (Stage(layers=range(1), devices=(0,)), Stage(layers=range(1, 2), devices=(1,))),
        flat_cluster(2, 0.5),
    )
    path = tmp_path / "small.plan.json"
    pp.write_plan(plan, path)
    code, out, err = run_command(capfd, "testbed", path, "--iterations", 2, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert len(document["iterations_ms"]) == 2
    assert FASTEST < document["measured_ms"] / document["predicted_ms"] < SLOWEST


def test_real_training_is_that_of_one_process(testbed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    monkeypatch.syspath_prepend(FOLDER)
    cluster = flat_cluster(3, 0.5)
    stages = (
        Stage(layers=range(2), devices=(0,)),
        Stage(layers=range(2, 3), devices=(1,)),
        Stage(layers=range(3, 4), devices=(2,)),
    )
    plan = make_plan(stages, cluster, num_microbatches=2)
    layer = plan.model.layers[0]
    layers = tuple(replace(layer, name=str(i), output_bytes=64.0 * 4) for i in range(4))
    plan = replace(plan, model=replace(plan.model, layers=layers))
    with Testbed() as own:  # a nursery that knows the folder of the model
        measured = own.measure(
            plan, num_iterations=2, time_factor=1.0, build="small_training:build_model"
        )
    sys.path.insert(0, str(FOLDER))
    import small_training

    model = small_training.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(4):
        batch, targets = small_training.make_batch(step, 8)
        loss = small_training.loss_fn(model(batch), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert measured.losses == pytest.approx(losses[2:], rel=1e-6)


def test_pacing_needs_no_privileges():
    plan = make_plan(
        (Stage(layers=range(1), devices=(0,)), Stage(layers=range(1, 2), devices=(1, 2))),
        flat_cluster(3, 0.2),
    )
    with Testbed(Way.PACING) as paced:
        measured = paced.measure(plan, num_iterations=2, time_factor=1.0)
        require_plausible(measured)
        shared = replace(flat_cluster(3, 0.2), uplink_gb_per_s=0.1)
        with pytest.raises(RuntimeMismatchError, match="has links that devices share"):
            paced.measure(replace(plan, cluster=shared))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"time_factor": math.nan}, "time_factor: is nan; give a finite number above 0"),
        ({"time_factor": -1.0}, "time_factor: is -1.0"),
        ({"build": "nowhere:build"}, "there is no module 'nowhere' here"),
        ({"build": "math"}, "--real: 'math'"),
        ({"build": "math:floor"}, "the module 'math' has no function 'loss_fn'"),
    ],
)
def test_wrong_options_are_refused_at_once(options, problem):
    plan = make_plan((Stage(layers=range(1), devices=(0,)),), flat_cluster(1, 1.0))
    with Testbed(Way.PACING) as testbed, pytest.raises(InputError, match=re.escape(problem)):
        testbed.measure(plan, **options)


def test_what_no_run_can_show_is_refused(testbed):
    stages = (Stage(layers=range(1), devices=(0,)), Stage(layers=range(1, 2), devices=(1,)))
    plan = make_plan(stages, flat_cluster(2), gradient_bytes=5e6)
    with pytest.raises(InputError, match="more gradient_bytes than output_bytes"):
        testbed.measure(plan)


def test_the_step_that_fails_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    found = find_abilities()
    assert found.way is Way.PACING
    assert found.failed_step.startswith(("veth: ", "network namespace: "))


def processes_of(parent_id):
    """The processes of a testbed that this process has started."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"pipeplan.testbed.nursery" in words and str(parent_id).encode() in words:
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("ranks_first", [True, False], ids=["running", "starting"])
def test_nothing_is_left_behind(testbed, tmp_path, number, ranks_first):
    plan = make_plan(
        (Stage(layers=range(1), devices=(0,)), Stage(layers=range(1, 2), devices=(1,))),
        flat_cluster(2, 0.5),
    )
    path = tmp_path / "small.plan.json"
    pp.write_plan(plan, path)
    namespaces = set(Path("/run/netns").glob("*"))
    command = [sys.executable, "-m", "pipeplan", "testbed", str(path), "--iterations", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        wanted, deadline_s = 4 if ranks_first else 1, time.monotonic() + 60
        while len(processes_of(parent.pid)) < wanted and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert len(processes_of(parent.pid)) >= wanted
        os.kill(parent.pid, number)
        parent.communicate(timeout=30)
        assert parent.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    if number == signal.SIGINT:
        assert processes_of(parent.pid) == []
    deadline_s = time.monotonic() + 5
    while processes_of(parent.pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert processes_of(parent.pid) == []
    assert set(Path("/run/netns").glob("*")) == namespaces
