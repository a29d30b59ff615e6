"""Limits on size hold for writing as for reading: what is written is read, all else is refused."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from instances import even_model, flat_cluster, hostile_plan
from pipeplan.checker import check
from pipeplan.cluster import Cluster, Device, HostGroup, expand_hosts
from pipeplan.documents import files, json_text, limits
from pipeplan.errors import ClusterError, InputError, PlanFileError, ProfileError
from pipeplan.pipeline import Plan, Schedule, Stage
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.schedules import fixed_codes
from pipeplan.validation import MAX_BLOCKS, MAX_DEVICES, MAX_LAYERS, require_plan_size

SCRIPT = """
import resource, sys, time
sys.path[:0] = {paths!r}
from test_sizes import *
start_s = time.process_time()
{body}
print(time.process_time() - start_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
"""


def measured(body: str, **names) -> tuple[float, float]:
    """Processor seconds and peak megabytes of a few lines, in a process of their own."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    script = SCRIPT.format(paths=paths, body=body.format(**names))
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    seconds, megabytes = done.stdout.split()
    return float(seconds), float(megabytes)


def long_plan(num_stages: int, num_microbatches: int) -> Plan:
    """One layer and one device a stage, under 1F1B."""
    codes = fixed_codes([num_stages - n for n in range(num_stages)], num_microbatches)
    return Plan(
        model=even_model(num_stages, 1.0, 2.0),
        cluster=flat_cluster(num_stages),
        microbatches=num_microbatches,
        stages=tuple(Stage(layers=range(n, n + 1), devices=(n,)) for n in range(num_stages)),
        schedule=Schedule.from_codes(codes.tolist()),
        planner="1f1b",
    )


# ------------------------------------------------------------------------------ plans


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "max_s", "max_mb"),
    [
        (26, 30_000, 10, 1000),
        pytest.param(64, 65_536, 60, 2000, marks=pytest.mark.full),
    ],
)
def test_long_plans_are_written_and_read(tmp_path, num_stages, num_microbatches, max_s, max_mb):
    path = tmp_path / "long.plan.json"
    seconds, megabytes = measured(
        "files.write_plan(long_plan({stages}, {microbatches}), {path!r})",
        stages=num_stages,
        microbatches=num_microbatches,
        path=str(path),
    )
    assert seconds < max_s
    assert megabytes < max_mb
    seconds, megabytes = measured(
        "made = files.read_plan({path!r})\n"
        "codes = fixed_codes([{stages} - n for n in range({stages})], {microbatches}).tolist()\n"
        "assert [list(order) for order in made.schedule.to_codes()] == codes",
        stages=num_stages,
        microbatches=num_microbatches,
        path=str(path),
    )
    assert seconds < max_s
    assert megabytes < max_mb


def test_the_number_of_blocks_is_limited():
    require_plan_size(64, 65_536)
    require_plan_size(76, 65_536)
    with pytest.raises(PlanFileError, match="77 stages make 10,092,544 blocks, more than the 10,0"):
        require_plan_size(77, 65_536)
    stages = tuple(Stage(layers=range(1), devices=(n,)) for n in range(77))
    with pytest.raises(PlanFileError, match="use fewer microbatches"):
        replace(long_plan(2, 4), stages=stages, microbatches=65_536)


def test_schedules_beyond_the_limits_are_refused_unread(tmp_path):
    document = json.loads(json_text.to_json(files.plan_document(long_plan(1, 1))))
    path = tmp_path / "p.json"
    text = json.dumps({**document, "schedule": "here"})
    order = '["F0"' + ',"B0"' * (MAX_BLOCKS // 2) + "]"
    path.write_text(text.replace('"here"', f"[{order}, {order}]"))
    with pytest.raises(PlanFileError, match="has more than the 10,000,000 blocks"):
        files.read_plan(path)
    orders = ",".join(['["F0"]'] * (MAX_DEVICES + 1))
    path.write_text(text.replace('"here"', f"[{orders}]"))
    with pytest.raises(PlanFileError, match="schedule: has more than 10,000 orders"):
        files.read_plan(path)


# ------------------------------------------------------- where the schedule is found

ORDERS = [["F0", "F1", "B0", "B1"]]


@pytest.mark.parametrize(
    "text",
    [
        '{"schedule": %s}',
        '{ "a" : 1, "schedule"\n:\t%s , "b": []}',
        '{"b": {"schedule": [["B9"]]}, "schedule": %s}',
        '{"b": [["F0"]], "c": "\\"schedule\\": [[", "schedule": %s}',
        '{"b": "schedule", "schedule": %s, "c": "schedule"}',
        '{"sch\\u0065dule": %s}',
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_the_schedule_is_found_wherever_it_stands(text, indent):
    data = (text % json.dumps(ORDERS, indent=indent)).encode()
    expected = json.loads(data)
    packed = json_text.parse_json(data, pack_schedule=True)
    schedule = packed.pop("schedule")
    if isinstance(schedule, json_text.PackedOrders):
        (order,) = schedule.orders
        assert bytes(order.letters) == b"FFBB"
        assert (order.microbatches.tolist(), order.stages) == ([0, 1, 0, 1], None)
    else:
        assert "\\u" in text
        assert schedule == ORDERS
    assert expected.pop("schedule") == ORDERS
    assert packed == expected


@pytest.mark.parametrize(
    "schedule",
    ['[["F0", 5]]', '[["F01"]]', '[["F0",]]', '["F0"]', '[["F0"]', "[[]]5", '[["f0"]]', "{}", "5"],
)
def test_what_is_not_made_of_blocks_is_left_alone(schedule):
    data = f'{{"schedule": {schedule}}}'.encode()
    try:
        expected = json.loads(data)
    except json.JSONDecodeError:
        with pytest.raises(json_text.NotJson):
            json_text.parse_json(data, pack_schedule=True)
    else:
        assert json_text.parse_json(data, pack_schedule=True) == expected


@pytest.mark.parametrize(
    "text",
    [
        '{"schedule": [["F0"],\n ["B0"]], "a" 1}',
        '{"schedule": [["F0"]], "a": tru}',
        '{"é": 1,\n"schedule": [\n["F0"]\n]\n, "é": }',
        '{"a" 1, "schedule": [["F0"]]}',
    ],
)
def test_mistakes_are_placed_as_without_taking_out_the_schedule(text):
    with pytest.raises(json_text.NotJson) as packed:
        json_text.parse_json(text.encode(), pack_schedule=True)
    with pytest.raises(json_text.NotJson) as plain:
        json_text.parse_json(text.encode())
    assert str(packed.value) == str(plain.value)


def test_two_schedules_are_refused():
    with pytest.raises(InputError, match="'schedule': stands twice"):
        json_text.parse_json(b'{"schedule": [["F0"]], "schedule": [["B0"]]}', pack_schedule=True)


# ----------------------------------------------------------------- models and clusters


def test_the_largest_model_is_written_and_read(tmp_path):
    layers = tuple(
        LayerProfile(
            name=f"a layer with a longer name {index}",
            forward_ms=1.2345678901234567e-05,
            backward_ms=1.2345678901234567e-05,
            output_bytes=1234567890.1234567,
            parameter_bytes=1234567890.1234567,
            gradient_bytes=2234567890.1234567,
            activation_bytes=3234567890.1234567,
            weight_grad_ms=1.1345678901234567e-05,
        )
        for index in range(MAX_LAYERS)
    )
    model = ModelProfile(name="large", microbatch_size=1, layers=layers)
    files.write_model(model, tmp_path / "m.json")
    assert files.read_model(tmp_path / "m.json") == model
    with pytest.raises(ProfileError, match="layers: 100,001 are more than the 100,000 supported"):
        replace(model, layers=(*layers, replace(layers[0], name="one more")))


@pytest.mark.parametrize(("count", "devices"), [(4096, 1), (2048, 2), (1, 4096), (512, 8)])
def test_the_largest_clusters_are_written_in_shorthand(tmp_path, count, devices):
    group = HostGroup(count=count, devices=devices, bandwidth_gb_per_s=100.0, speed=2.0)
    cluster = expand_hosts("large", [group], between_hosts_gb_per_s=1.25, latency_us=5.0)
    rows = list(cluster.bandwidth_gb_per_s[: min(4096, 8 * devices)])
    hosts = min(4096, 8 * devices) // devices
    assert len({id(row) for row in rows}) == (hosts if devices > 1 else 1)
    files.write_cluster(cluster, tmp_path / "c.json")
    assert (tmp_path / "c.json").stat().st_size < 1000
    assert files.read_cluster(tmp_path / "c.json") == cluster


def test_what_a_cluster_made_of_hosts_says_about_itself(tmp_path):
    cluster = expand_hosts("lone", [HostGroup(devices=1)])
    assert files.cluster_document(cluster) == {
        "format": "pipeplan.cluster/1",
        "name": "lone",
        "hosts": [{"devices": 1}],
    }
    changed = replace(cluster, name="other")
    assert "devices" in files.cluster_document(changed)


def random_matrix(num_devices: int) -> Cluster:
    """Bandwidths that take as many characters as any."""
    rng = random.Random(0)
    numbers = [rng.uniform(1e-6, 1e-5) for _ in range(9999)]
    return Cluster(
        name="full",
        devices=tuple(Device(name=f"d{index}") for index in range(num_devices)),
        bandwidth_gb_per_s=tuple(
            tuple(rng.choices(numbers, k=num_devices)) for _ in range(num_devices)
        ),
    )


def test_full_matrices_of_2048_devices_are_written_and_read(tmp_path):
    seconds, megabytes = measured(
        "cluster = random_matrix(2048)\n"
        "files.write_cluster(cluster, {path!r})\n"
        "assert files.read_cluster({path!r}) == cluster",
        path=str(tmp_path / "c.json"),
    )
    assert seconds < 30
    assert megabytes < 1000


def test_larger_matrices_are_refused_before_they_are_written(tmp_path):
    with pytest.raises(ClusterError, match="give the cluster in shorthand `hosts`"):
        files.write_cluster(flat_cluster(2050), tmp_path / "c.json")
    hosts = expand_hosts("h", [HostGroup(devices=2050, bandwidth_gb_per_s=1.0)])
    files.write_cluster(hosts, tmp_path / "c.json")
    full_latency = replace(flat_cluster(1500), latency_us=((1.0,) * 1500,) * 1500)
    with pytest.raises(ClusterError, match="4,500,000 numbers, more than the 4,200,000"):
        limits.require_writable(full_latency)


def test_what_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_JSON_TEXTS", 1000)
    plan = replace(long_plan(1, 1), options={"x": ["text"] * 1000})
    with pytest.raises(InputError, match="cannot be written: has more than 1,000 texts"):
        files.write_plan(plan, tmp_path / "p.json")
    half = replace(long_plan(1, 1), planner="\ud800")
    with pytest.raises(InputError, match="cannot be written: a name holds half a character"):
        files.write_plan(half, tmp_path / "p.json")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------ names


@pytest.mark.parametrize("seed", range(30))
def test_plans_with_hostile_names_come_back(tmp_path, seed):
    made = hostile_plan(random.Random(seed))
    files.write_plan(made, tmp_path / "p.json")
    assert files.read_plan(tmp_path / "p.json") == made
    verdict = check(made)
    assert verdict.ok, verdict.errors
    for message in verdict.warnings:
        assert len(message.splitlines()) == 1


# ------------------------------------------------------------------------------- page


def test_the_format_page_states_these_limits():
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    sizes = page[page.index("### Sizes") : page.index("## Model")]
    for size in (
        MAX_DEVICES,
        MAX_LAYERS,
        MAX_BLOCKS,
        limits.MAX_MATRIX_NUMBERS,
        limits.MAX_JSON_VALUES,
        limits.MAX_JSON_TEXTS,
        limits.MAX_JSON_CONTAINERS,
        limits.MAX_YAML_VALUES,
    ):
        assert f"{size:,}" in sizes
    for size in (limits.MAX_JSON_BYTES, limits.MAX_REST_BYTES, limits.MAX_YAML_BYTES):
        assert f"{size // 10**6} MB" in sizes
