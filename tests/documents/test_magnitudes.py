"""Every number has its limits in every reader and every constructor."""

import json
import math
import sys

import numpy as np
import pytest

from instances import even_model, flat_cluster
from pipeplan.cluster import Cluster, Device, HostGroup, expand_hosts
from pipeplan.documents import files
from pipeplan.errors import ClusterError, InputError, PlanFileError, ProfileError
from pipeplan.pipeline import Bound, BoundLimit, BoundScope, Plan, Prediction, Schedule, Stage
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.validation import number_text

LAYER = {"name": "l", "forward_ms": 1, "backward_ms": 2, "output_bytes": 1, "parameter_bytes": 1}
MODEL = {"format": "pipeplan.model/1", "name": "m", "microbatch_size": 1, "layers": [LAYER]}
DEVICES = {
    "format": "pipeplan.cluster/1",
    "name": "c",
    "devices": [{"name": "a"}, {"name": "b"}],
    "bandwidth_gb_per_s": [[0, 1], [1, 0]],
    "latency_us": [[0, 1], [1, 0]],
}
HOSTS = {
    "format": "pipeplan.cluster/1",
    "name": "c",
    "hosts": [{"count": 2, "devices": 2, "bandwidth_gb_per_s": 1}],
    "between_hosts_gb_per_s": 1,
    "latency_us": 0,
}
PLAN = {
    "format": "pipeplan.plan/1",
    "planner": "x",
    "model": MODEL,
    "cluster": HOSTS,
    "microbatches": 1,
    "stages": [{"layers": [0, 1], "devices": ["h0d0", "h0d1"], "shares": [0.5, 0.5]}],
    "schedule": [["F0", "B0"]],
}

TIME, LATENCY, BYTES = (1e-6, 1e12, True), (1e-3, 1e12, True), (1, 1e18, True)
BANDWIDTH, MEMORY, SPEED = (1e-6, 1e9, True), (1e-6, 1e9, True), (1e-3, 1e3, False)
RATIO, SHARE = (0, 1e3, True), (1e-6, 1, False)
NUMBERS = [
    (MODEL, ("layers", 0, "forward_ms"), TIME),
    (MODEL, ("layers", 0, "backward_ms"), TIME),
    (MODEL, ("layers", 0, "output_bytes"), BYTES),
    (MODEL, ("layers", 0, "gradient_bytes"), BYTES),
    (MODEL, ("layers", 0, "parameter_bytes"), BYTES),
    (MODEL, ("layers", 0, "activation_bytes"), BYTES),
    (MODEL, ("input_bytes",), BYTES),
    (MODEL, ("optimizer_bytes_per_parameter_byte",), RATIO),
    (DEVICES, ("devices", 1, "memory_gb"), MEMORY),
    (DEVICES, ("devices", 1, "speed"), SPEED),
    (DEVICES, ("bandwidth_gb_per_s", 1, 0), BANDWIDTH),
    (DEVICES, ("latency_us", 0, 1), LATENCY),
    (DEVICES, ("latency_us",), LATENCY),
    (HOSTS, ("hosts", 0, "memory_gb"), MEMORY),
    (HOSTS, ("hosts", 0, "speed"), SPEED),
    (HOSTS, ("hosts", 0, "bandwidth_gb_per_s"), BANDWIDTH),
    (HOSTS, ("between_hosts_gb_per_s",), BANDWIDTH),
    (HOSTS, ("latency_us",), LATENCY),
    (PLAN, ("stages", 0, "shares", 1), SHARE),
    (PLAN, ("model", "layers", 0, "forward_ms"), TIME),
    (PLAN, ("cluster", "between_hosts_gb_per_s"), BANDWIDTH),
]
WHOLE = [
    (MODEL, ("microbatch_size",), 10**9),
    (HOSTS, ("hosts", 0, "count"), None),
    (HOSTS, ("hosts", 0, "devices"), None),
    (PLAN, ("microbatches",), None),
]


def field(path: tuple) -> str:
    """The path as messages write it."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def read(folder, document, path, value):
    """What the reader makes of a document with another value at a path."""
    changed = json.loads(json.dumps(document))
    inner = changed
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    file = folder / "input.json"
    file.write_text(json.dumps(changed))
    kind = document["format"].split(".")[1].split("/")[0]
    return getattr(files, f"read_{kind}")(file)


def refused(folder, document, path, value, *parts) -> None:
    with pytest.raises(InputError) as caught:
        read(folder, document, path, value)
    message = str(caught.value)
    assert f"input.json: {field(path)}: " in message, message
    assert len(message.splitlines()) == 1
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("document", "path", "limits"), NUMBERS, ids=[field(path) for _, path, _ in NUMBERS]
)
def test_numbers_have_limits(tmp_path, document, path, limits):
    least, most, may_be_zero = limits
    read(tmp_path, document, path, most)
    if least:
        read(tmp_path, document, path, least)
        below = math.nextafter(least, 0)
        refused(tmp_path, document, path, below, f"is below {number_text(least)}, the least that")
        refused(tmp_path, document, path, 5e-324, "5e-324 is below")
    above = math.nextafter(most, math.inf)
    refused(tmp_path, document, path, above, f"is above {number_text(most)}, the most that")
    refused(tmp_path, document, path, 1e308, "1e+308 is above")
    refused(tmp_path, document, path, -1, "-1 is negative")
    refused(tmp_path, document, path, math.nan, "nan is not a finite number")
    refused(tmp_path, document, path, 10**4000, "is too large a number")
    if may_be_zero:
        read(tmp_path, document, path, 0)
    else:
        refused(tmp_path, document, path, 0, "0 is not above zero")


@pytest.mark.parametrize(
    ("document", "path", "most"), WHOLE, ids=[field(path) for _, path, _ in WHOLE]
)
def test_whole_numbers_have_limits(tmp_path, document, path, most):
    read(tmp_path, document, path, 1)
    if most:
        read(tmp_path, document, path, most)
    refused(tmp_path, document, path, 0, "0 is not at least 1")
    refused(tmp_path, document, path, -(10**4000), "a negative number of about 4,000 digits")
    refused(tmp_path, document, path, 10**9 + 1, "1000000001 is above ")
    refused(tmp_path, document, path, 10**4000, "a number of about 4,000 digits is above ")
    refused(tmp_path, document, path, 1.5, "1.5 is not a whole number")


def test_a_message_says_field_value_and_limit(tmp_path):
    refused(
        tmp_path,
        MODEL,
        ("layers", 0, "forward_ms"),
        1e20,
        "layers[0].forward_ms: 1e+20 is above 1e+12, the most that a time may be",
    )


def test_weight_gradients_are_a_part_of_the_backward(tmp_path):
    path = ("layers", 0, "weight_grad_ms")
    read(tmp_path, MODEL, path, 2)
    read(tmp_path, MODEL, path, 2 * (1 + 1e-10))  # rounded
    refused(tmp_path, MODEL, path, 2.1, "2.1 is above 2, the backward_ms that it is a part of")


# ----------------------------------------------------------------------- constructors

FINE = {
    "layer": lambda **f: LayerProfile(**{**LAYER, **f}),
    "model": lambda **f: ModelProfile(
        **{"name": "m", "microbatch_size": 1, "layers": even_model(2, 1, 2).layers, **f}
    ),
    "device": lambda **f: Device(**{"name": "d", **f}),
    "hosts": lambda **f: HostGroup(**{"devices": 2, "bandwidth_gb_per_s": 1.0, **f}),
    "cluster": lambda **f: flat_cluster(2, **f),
    "matrix": lambda **f: Cluster(name="c", devices=flat_cluster(2).devices, **f),
    "expanded": lambda **f: expand_hosts("c", [HostGroup(devices=1, count=2)], **f),
    "stage": lambda **f: Stage(**{"layers": range(1), "devices": (0, 1), **f}),
    "plan": lambda **f: small_plan(**f),
    "bound": lambda **f: Bound(**{"lower_bound_ms": 1.0, "scope": BoundScope.ANY, **f}),
    "figures": lambda **f: Prediction(
        **{"iteration_ms": 1.0, "bubble_fraction": 0.0, "peak_memory_gb": {}, **f}
    ),
}
WRONG = [
    ("layer", {"forward_ms": 1e13}, ProfileError, "forward_ms: 1e+13 is above 1e+12"),
    ("layer", {"forward_ms": 10**400}, ProfileError, "a number of about 400 digits is above"),
    ("layer", {"forward_ms": "1"}, ProfileError, "forward_ms: '1' is not a number"),
    ("layer", {"forward_ms": True}, ProfileError, "forward_ms: True is not a number"),
    ("layer", {"output_bytes": 0.5}, ProfileError, "output_bytes: 0.5 is below 1"),
    ("layer", {"gradient_bytes": np.float64(1e19)}, ProfileError, "gradient_bytes: 1e+19 is ab"),
    ("layer", {"activation_bytes": -1}, ProfileError, "activation_bytes: -1 is negative"),
    ("layer", {"weight_grad_ms": 3.0}, ProfileError, "weight_grad_ms: 3 is above 2"),
    ("model", {"microbatch_size": 10**10}, ProfileError, "microbatch_size: 10000000000 is above"),
    ("model", {"microbatch_size": 1.0}, ProfileError, "microbatch_size: 1 is not a whole number"),
    ("model", {"input_bytes": math.inf}, ProfileError, "input_bytes: inf is not a finite number"),
    ("model", {"optimizer_bytes_per_parameter_byte": 1001}, ProfileError, "1001 is above 1000"),
    ("model", {"tied": (("0",),)}, ProfileError, "tied[0]: has to name at least two layers"),
    ("model", {"tied": (("0", "0"),)}, ProfileError, "tied[0]: has to name at least two layers"),
    ("model", {"tied": (("0", "x"),)}, ProfileError, "tied[0][1]: 'x' is no layer's name"),
    ("device", {"speed": 0}, ClusterError, "speed: 0 is not above zero"),
    ("device", {"speed": 1e-320}, ClusterError, "speed: 1e-320 is below 0.001"),
    ("device", {"memory_gb": 1e10}, ClusterError, "memory_gb: 1e+10 is above 1e+09"),
    ("hosts", {"count": 10**5000}, ClusterError, "count: a number of about 5,000 digits"),
    ("hosts", {"bandwidth_gb_per_s": 1e308}, ClusterError, "bandwidth_gb_per_s: 1e+308 is above"),
    ("hosts", {"speed": 2000}, ClusterError, "speed: 2000 is above 1000"),
    ("cluster", {"bandwidth_gb_per_s": 1e-9}, ClusterError, "_per_s[0][1]: 1e-09 is below 1e-06"),
    ("cluster", {"latency_us": 1e-9}, ClusterError, "latency_us: 1e-09 is below 0.001"),
    (
        "matrix",
        {"bandwidth_gb_per_s": ((0.0, 1.0), (True, 0.0))},
        ClusterError,
        "bandwidth_gb_per_s[1][0]: True is not a number",
    ),
    (
        "matrix",
        {"bandwidth_gb_per_s": ((0.0, 10**400), (1.0, 0.0))},
        ClusterError,
        "bandwidth_gb_per_s[0][1]: a number of about 400 digits",
    ),
    ("expanded", {"between_hosts_gb_per_s": 2e9}, ClusterError, "between_hosts_gb_per_s: 2e+09 is"),
    ("stage", {"shares": (0.5, 1e-9)}, InputError, "shares[1]: 1e-09 is below 1e-06"),
    ("stage", {"shares": (1.0, 0.0)}, InputError, "shares[1]: 0 is not above zero"),
    ("stage", {"shares": (1.0,)}, InputError, "shares: has 1 for 2 devices"),
    ("stage", {"devices": (0, 0)}, InputError, "devices: one stands twice"),
    ("stage", {"devices": (0, -1)}, InputError, "devices: -1 is negative"),
    ("plan", {"microbatches": 0}, PlanFileError, "microbatches: 0 is not at least 1"),
    ("plan", {"microbatches": 65_537}, PlanFileError, "microbatches: 65537 is above 65536"),
    ("plan", {"seed": -1}, InputError, "a seed is a whole number from 0 to 2**64 - 1"),
    ("plan", {"seed": 2**64}, InputError, "seed: 18446744073709551616 is above"),
    ("plan", {"seed": 0.5}, InputError, "seed: 0.5 is not a whole number; a seed is"),
    ("bound", {"lower_bound_ms": math.nan}, PlanFileError, "lower_bound_ms: nan is not a finite"),
    ("bound", {"limits": (BoundLimit.MEMORY,) * 2}, PlanFileError, "bound_limits: one stands twi"),
    ("figures", {"iteration_ms": math.inf}, PlanFileError, "iteration_ms: inf is not a finite"),
    ("figures", {"bubble_fraction": math.nan}, PlanFileError, "bubble_fraction: nan is not a f"),
    ("figures", {"peak_memory_gb": {"d": -1}}, PlanFileError, "peak_memory_gb['d']: -1 is negat"),
    ("figures", {"schedule_guarantee_ms": -1}, PlanFileError, "schedule_guarantee_ms: -1 is neg"),
]


def small_plan(**fields) -> Plan:
    return Plan(
        **{
            "model": even_model(1, 1, 2),
            "cluster": flat_cluster(2),
            "microbatches": 1,
            "stages": (Stage(layers=range(1), devices=(0, 1)),),
            "schedule": Schedule.from_codes([[0, -1]]),
            "planner": "x",
            **fields,
        }
    )


@pytest.mark.parametrize(("kind", "fields", "error", "message"), WRONG)
def test_constructors_hold_the_limits(kind, fields, error, message):
    with pytest.raises(error) as caught:
        FINE[kind](**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("layer", {"forward_ms": 0, "output_bytes": np.float32(7), "parameter_bytes": np.int64(3)}),
        ("model", {"tied": (("0", "1"),)}),
        ("device", {"memory_gb": 0, "speed": 1e3}),
        ("cluster", {"bandwidth_gb_per_s": 0.0, "latency_us": 1e12}),
        ("plan", {"seed": 2**64 - 1, "microbatches": 65_536}),
        ("bound", {"lower_bound_ms": 1e300, "limits": tuple(BoundLimit)}),
        ("figures", {"iteration_ms": 1e300, "bubble_fraction": -1e-17}),
    ],
)
def test_what_lies_within_the_limits_is_taken(kind, fields):
    made = FINE[kind](**fields)
    assert repr(made)


def test_numbers_of_numpy_are_written_as_numbers(tmp_path):
    layer = FINE["layer"](output_bytes=np.float32(7), parameter_bytes=np.int64(3))
    model = FINE["model"](layers=(layer,))
    files.write_model(model, tmp_path / "m.json")
    assert files.read_model(tmp_path / "m.json") == model


@pytest.mark.parametrize(
    "number", [1, -1, 0.1, 1e-320, 1e308, 10**21, -(10**5000), 123456789.5], ids=list("12345678")
)
def test_numbers_are_told_in_few_characters(number):
    text = number_text(number)
    assert len(text) < 50
    if not isinstance(number, int):
        assert float(text) == pytest.approx(number, rel=1e-5)


# ------------------------------------------------------------------------- new fields


def test_tied_layers_come_back(tmp_path):
    second = {**LAYER, "name": "k"}
    document = {**MODEL, "layers": [LAYER, second], "tied": [["k", "l"]]}
    model = read(tmp_path, document, ("name",), "m")
    assert model.tied == (("k", "l"),)
    files.write_model(model, tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == document
    files.write_model(FINE["model"](tied=(("0", "1"),)), tmp_path / "made.json")
    assert files.read_model(tmp_path / "made.json").tied == (("0", "1"),)
    with pytest.raises(ProfileError, match=r"tied\[0\]\[1\]: 'x' is no layer's name"):
        read(tmp_path, document, ("tied",), [["k", "x"]])


FIGURES = {"iteration_ms": 1, "bubble_fraction": 0, "peak_memory_gb": {}}
BOUND = {**FIGURES, "lower_bound_ms": 1, "bound_scope": "any"}


@pytest.mark.parametrize("limits", [[], ["memory"], ["constraints", "whole-samples"]])
def test_limits_of_a_bound_come_back(tmp_path, limits):
    made = read(tmp_path, PLAN, ("predicted",), {**BOUND, "bound_limits": limits})
    assert made.bound.limits == tuple(limits)
    files.write_plan(made, tmp_path / "again.json")
    assert files.read_plan(tmp_path / "again.json") == made
    written = json.loads((tmp_path / "again.json").read_text())["predicted"]
    assert ("bound_limits" in written) == bool(limits)


@pytest.mark.parametrize(
    ("predicted", "message"),
    [
        ({**BOUND, "bound_limits": ["x"]}, 'bound_limits[0]: "x" is none of whole-samples, mem'),
        ({**BOUND, "bound_limits": "memory"}, 'bound_limits: "memory" is text, not a list'),
        ({**BOUND, "bound_limits": ["memory"] * 2}, "predicted.bound_limits: one stands twice"),
        ({**FIGURES, "bound_limits": ["memory"]}, "predicted.bound_limits: are those of a bound"),
    ],
)
def test_wrong_limits_of_a_bound_are_refused(tmp_path, predicted, message):
    with pytest.raises(PlanFileError) as caught:
        read(tmp_path, PLAN, ("predicted",), predicted)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("document", "path"),
    [
        (PLAN, ("shard_optimizer",)),
        (PLAN, ("stages", 0, "gradient_buckets")),
    ],
)
def test_fields_without_an_effect_are_refused(tmp_path, document, path):
    refused(tmp_path, document, path, 1, "is not part of 'pipeplan.plan/1'")


def test_predicted_figures_only_have_to_be_finite(tmp_path):
    huge = {**FIGURES, "iteration_ms": 1e300, "peak_memory_gb": {"h0d0": 1e-300}}
    assert read(tmp_path, PLAN, ("predicted",), huge).iteration_ms == 1e300
    with pytest.raises(PlanFileError, match=r"predicted\.iteration_ms: .* is too large a number"):
        read(tmp_path, PLAN, ("predicted",), {**FIGURES, "iteration_ms": 10**400})


def test_recursion_is_not_what_ends_deep_options(tmp_path):
    deep: dict = {}
    for _ in range(sys.getrecursionlimit() * 2):
        deep = {"a": deep}
    with pytest.raises(PlanFileError, match="options: is nested deeper than a file may be"):
        files.write_plan(small_plan(options=deep), tmp_path / "p.json")
    with pytest.raises(PlanFileError, match="options: holds a number that is not finite"):
        files.write_plan(small_plan(options={"a": math.nan}), tmp_path / "p.json")
