"""Runs of changed clusters and models, made by the simulator: calibrating finds the change."""

import json
from dataclasses import replace

import pytest

import pipeplan as pp
from command_line import run_command
from instances import flat_cluster
from pipeplan.calibration.door import calibrate
from pipeplan.calibration.findings import Subject
from pipeplan.calibration.measured_run import Span, make_run, read_run
from pipeplan.cost import CostModel
from pipeplan.errors import InputError
from pipeplan.pipeline import Kind, Stage
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.replaying import replay_plan, simulate
from pipeplan.runtime.tracing import Event, RankTrace, write_trace
from pipeplan.schedules import SCHEDULES

NUM_LAYERS, NUM_DEVICES = 8, 4


def model_of(forward_ms=4.0, backward_ms=8.0, output_bytes=1e6):
    layers = tuple(
        LayerProfile(
            name=f"layer{i}",
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            output_bytes=output_bytes,
            parameter_bytes=1e5,
        )
        for i in range(NUM_LAYERS)
    )
    return ModelProfile(name="sample", microbatch_size=4, layers=layers)


def plan_of(stages=None, model=None, cluster=None, microbatches=8):
    """Two layers a stage, one device a stage, unless it is said otherwise."""
    model, cluster = model or model_of(), cluster or flat_cluster(NUM_DEVICES, 1.0)
    stages = stages or [
        Stage(layers=range(2 * i, 2 * i + 2), devices=(i,)) for i in range(NUM_DEVICES)
    ]
    run = SCHEDULES["1f1b"](CostModel(model, cluster).pipeline_costs(stages), microbatches)
    made = pp.Plan(
        model=model,
        cluster=cluster,
        microbatches=microbatches,
        stages=tuple(stages),
        schedule=pp.Schedule.from_codes(run.order_SM2.tolist()),
        planner="best",
    )
    return replay_plan(made).plan


def with_truth(plan, *, model=None, speeds=None, slower_link=None):
    """The same plan with the inputs as they really are."""
    cluster = plan.cluster
    devices = tuple(
        replace(device, speed=(speeds or {}).get(i, device.speed))
        for i, device in enumerate(cluster.devices)
    )
    matrix = [list(row) for row in cluster.bandwidth_gb_per_s]
    for a, b in [slower_link, slower_link[::-1]] if slower_link else []:
        matrix[a][b] /= 2
    truth = replace(
        cluster, devices=devices, bandwidth_gb_per_s=tuple(tuple(row) for row in matrix)
    )
    return replay_plan(replace(plan, model=model or plan.model, cluster=truth, predicted=None)).plan


def spans_of(truth, offsets_ms=None):
    """What devices would do; a fast replica ends its blocks earlier than its stage."""
    cost, timeline = CostModel(truth.model, truth.cluster), simulate(truth)
    for number, (stage, blocks) in enumerate(zip(truth.stages, timeline.blocks, strict=True)):
        own = {
            Kind.FORWARD: cost.device_forward_ms(stage),
            Kind.BACKWARD: cost.device_backward_ms(stage),
        }
        for position, device in enumerate(stage.devices):
            shift = (offsets_ms or {}).get(device, 0.0)
            for timed in blocks:
                start_ms = timed.start_ms + shift
                name = f"{timed.block.kind}{timed.block.microbatch}"
                assert timed.block.stage == number
                length_ms = own[timed.block.kind][position]
                yield Span(device, name, start_ms, start_ms + length_ms)


def found_in(plan, truth, **options):
    return calibrate(plan, make_run(plan, spans_of(truth, **options)))


def test_a_slow_device_is_named_with_its_speed():
    plan = plan_of()
    truth = with_truth(plan, speeds={2: 0.6})
    found = found_in(plan, truth)
    (finding,) = found.findings
    assert finding.subject is Subject.DEVICE
    assert finding.words == "d2 computes 40% slower than predicted: its speed is 0.6"
    assert found.cluster.devices[2].speed == pytest.approx(0.6)
    assert found.kept.iteration_ms == pytest.approx(truth.iteration_ms)
    assert found.measured_ms == pytest.approx(truth.iteration_ms)
    assert found.predicted_ms == plan.iteration_ms
    assert found.replanned.iteration_ms < 0.9 * found.kept.iteration_ms
    assert found.gain > 0.1
    assert pp.check(found.replanned).ok


def test_one_of_two_devices_is_slow():
    """Of two that differ, the one that is as predicted counts as right."""
    stages = [Stage(layers=range(4), devices=(0,)), Stage(layers=range(4, 8), devices=(1,))]
    plan = plan_of(stages)
    (finding,) = found_in(plan, with_truth(plan, speeds={0: 0.5})).findings
    assert (finding.devices, finding.speed) == ((0,), pytest.approx(0.5))


def test_a_slow_replica():
    stages = [Stage(layers=range(4), devices=(0, 1)), Stage(layers=range(4, 8), devices=(2, 3))]
    plan = plan_of(stages)
    found = found_in(plan, with_truth(plan, speeds={1: 0.5}))
    (finding,) = found.findings
    assert (finding.subject, finding.devices) == (Subject.DEVICE, (1,))
    assert found.cluster.devices[1].speed == pytest.approx(0.5)


def test_all_layers_take_longer_and_one_device_more_so():
    plan = plan_of()
    truth = with_truth(plan, model=model_of(5.2, 10.4), speeds={1: 0.5})
    found = found_in(plan, truth)
    general, device = found.findings
    assert general.words == "all layers take 1.30 times as long as the profile says"
    assert (device.devices, device.speed) == ((1,), pytest.approx(0.5))
    assert found.model.layers[0].backward_ms == pytest.approx(10.4)
    assert found.kept.iteration_ms == pytest.approx(truth.iteration_ms)


def test_layers_whose_backwards_are_slow():
    plan = plan_of()
    slow = (
        replace(plan.model.layers[2], backward_ms=20.0),
        replace(plan.model.layers[3], backward_ms=20.0),
    )
    model = replace(plan.model, layers=(*plan.model.layers[:2], *slow, *plan.model.layers[4:]))
    found = found_in(plan, with_truth(plan, model=model))
    (finding,) = found.findings
    assert (finding.subject, finding.layers) == (Subject.LAYERS, (2, 3))
    assert (finding.factor, finding.backward_factor) == pytest.approx((1.0, 2.5))
    assert "layer2 to layer3" in finding.words
    assert found.model.layers[2].backward_ms == pytest.approx(20.0)
    assert found.cluster == plan.cluster


@pytest.mark.parametrize("offset_ms", [0.0, 3.0, -5.0])
def test_a_slow_link_whatever_the_clocks_show(offset_ms):
    """Devices 2 and 3 have another clock."""
    plan = plan_of(model=model_of(output_bytes=4e6))
    truth = with_truth(plan, slower_link=(1, 2))
    found = found_in(plan, truth, offsets_ms={2: offset_ms, 3: offset_ms})
    (finding,) = found.findings
    assert (finding.subject, finding.devices, finding.receivers) == (Subject.LINK, (1,), (2,))
    assert finding.factor == pytest.approx(2.0, rel=0.05)
    assert found.cluster.bandwidth_gb_per_s[1][2] == pytest.approx(0.5, rel=0.05)
    assert found.cluster.bandwidth_gb_per_s[0][1] == 1.0
    if not offset_ms:
        assert found.kept.iteration_ms == pytest.approx(truth.iteration_ms, rel=0.01)


def test_transfers_that_are_late():
    """Next to nothing is sent, but each transfer takes 2 ms."""
    plan = plan_of(model=model_of(output_bytes=1.0))
    cluster = replace(plan.cluster, latency_us=2000.0)
    truth = replay_plan(replace(plan, cluster=cluster, predicted=None)).plan
    found = found_in(plan, truth)
    assert [finding.subject for finding in found.findings] == [Subject.LINK] * 3
    assert "they come later" in found.findings[0].words
    for a, b in ((0, 1), (1, 0), (2, 3)):
        assert found.cluster.latency_us[a][b] == pytest.approx(2000.0, rel=0.01)
    assert found.kept.iteration_ms == pytest.approx(truth.iteration_ms, rel=0.01)


def test_nothing_is_found_where_nothing_differs():
    plan = plan_of()
    found = found_in(plan, plan)
    assert found.findings == ()
    assert (found.model, found.cluster) == (plan.model, plan.cluster)
    assert found.kept.iteration_ms == plan.iteration_ms


def trace_file(path, plan, truth):
    """The trace as the runtime writes it."""
    spans = list(spans_of(truth))
    traces = []
    for rank, device in enumerate(sorted({span.device for span in spans})):
        stage = next(n for n, s in enumerate(plan.stages) if device in s.devices)
        events = [
            Event(
                span.name,
                "forward" if span.name[0] == "F" else "backward",
                span.start_ms / 1e3,
                span.end_ms / 1e3,
            )
            for span in spans
            if span.device == device
        ]
        events.append(Event("F0", "wait", 0.0, 0.0))
        traces.append(
            RankTrace(
                rank=rank,
                stages=(stage,),
                replica=plan.stages[stage].devices.index(device),
                zero_s=0.0,
                start_s=0.0,
                events=tuple(events),
            )
        )
    write_trace(plan, traces, path)


def test_the_command_writes_a_better_plan(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_of()
    pp.write_plan(plan, "old.plan.json")
    trace_file("trace.json", plan, with_truth(plan, speeds={2: 0.6}))
    code, out, err = run_command(
        capfd,
        "calibrate",
        "old.plan.json",
        "trace.json",
        "-o",
        "new.plan.json",
        "--cluster",
        "new.cluster.json",
        "--model",
        "new.model.json",
        "-q",
    )
    assert (code, err) == (0, "")
    assert "d2 computes 40% slower than predicted" in out
    assert "A new plan would take" in out
    new = pp.read_plan("new.plan.json")
    assert pp.check(new).ok
    assert new.cluster.devices[2].speed == pytest.approx(0.6, rel=1e-6)
    assert pp.read_cluster("new.cluster.json").devices[2].speed == new.cluster.devices[2].speed
    assert pp.read_model("new.model.json").num_layers == NUM_LAYERS
    code, out, _ = run_command(capfd, "calibrate", "old.plan.json", "trace.json", "--json", "-q")
    figures = json.loads(out)
    assert figures["speeds"]["d2"] == pytest.approx(0.6, rel=1e-6)
    assert figures["replanned_ms"] is None


def test_traces_of_other_plans_are_refused(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan, other = plan_of(), plan_of(microbatches=9)
    pp.write_plan(plan, "old.plan.json")
    trace_file("other.json", other, other)
    with pytest.raises(InputError, match=r"other.json: the trace has a block F8 of device 0"):
        read_run("other.json", plan)
    trace_file("short.json", plan, plan)
    with pytest.raises(InputError, match=r"short.json: the trace lacks 0F8"):
        read_run("short.json", other)
    for name, text in {
        "empty.json": "{}",
        "list.json": "[]",
        "odd.json": '{"traceEvents": [{"ph": "M", "name": "thread_name", "pid": 0, "tid": 1,'
        ' "args": {"name": "ran"}}, {"ph": "X", "pid": 0, "tid": 1, "ts": "x"}]}',
    }.items():
        (tmp_path / name).write_text(text)
        code, out, err = run_command(capfd, "calibrate", "old.plan.json", name, "-q")
        assert (code, out) == (2, "")
        assert err.startswith(f"pipeplan: {name}: ")
        assert err.count("\n") == 1


def test_a_trace_without_lengths_measures_nothing():
    plan = plan_of()
    points = [span._replace(end_ms=span.start_ms) for span in spans_of(plan)]
    with pytest.raises(InputError, match="all blocks of the trace have length 0"):
        make_run(plan, points)


def test_a_predicted_trace_is_no_run(tmp_path):
    plan = plan_of()
    pp.write_trace(plan, tmp_path / "trace.json")
    with pytest.raises(InputError, match="no track 'ran', so it is not of a run"):
        read_run(tmp_path / "trace.json", plan)
