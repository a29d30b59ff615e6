"""The three formats: what is read comes back, and what cannot be is refused in one line."""

import copy
import json
import os
import random
import re
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from instances import random_cluster, random_model
from pipeplan import zoo
from pipeplan.checker import check
from pipeplan.cluster import Cluster, Device, Duplex
from pipeplan.documents import files, syntax
from pipeplan.errors import ClusterError, InputError, PlanFileError, ProfileError
from pipeplan.pipeline import Bound, BoundLimit, BoundScope, Stage
from pipeplan.planning.door import plan

MODEL = {
    "format": "pipeplan.model/1",
    "name": "small",
    "microbatch_size": 4,
    "layers": [
        {
            "name": "first",
            "forward_ms": 1,
            "backward_ms": 2.5,
            "output_bytes": 1000,
            "parameter_bytes": 4e6,
        },
        {
            "name": "second",
            "forward_ms": 1.5,
            "backward_ms": 3,
            "output_bytes": 10,
            "gradient_bytes": 0,
            "parameter_bytes": 0,
            "activation_bytes": 77,
            "weight_grad_ms": 1,
        },
    ],
}
CLUSTER = {
    "format": "pipeplan.cluster/1",
    "name": "pair",
    "devices": [{"name": "a", "speed": 2.0}, {"name": "b", "host": "h", "memory_gb": 16}],
    "bandwidth_gb_per_s": [[0, 1.5], [2, 0]],
}
HOSTS = {
    "format": "pipeplan.cluster/1",
    "name": "short",
    "hosts": [{"count": 2, "devices": 2, "bandwidth_gb_per_s": 12, "memory_gb": 16}],
    "between_hosts_gb_per_s": 1.25,
}
READERS = {
    "model": (files.read_model, ProfileError, MODEL),
    "cluster": (files.read_cluster, ClusterError, CLUSTER),
    "hosts": (files.read_cluster, ClusterError, HOSTS),
    "plan": (files.read_plan, PlanFileError, None),
}
SECONDS = 2.0


@pytest.fixture(scope="module")
def plan_document(tmp_path_factory) -> dict:
    """A plan made from files, its cluster in shorthand."""
    folder = tmp_path_factory.mktemp("plan")
    model = files.read_model(saved(folder, MODEL))
    cluster = files.read_cluster(saved(folder, HOSTS))
    made = files.plan_document(plan(model, cluster, microbatches=3, planner="spp"))
    return json.loads(syntax.to_json(made))


@pytest.fixture
def documents(plan_document) -> dict[str, dict]:
    """A valid document of each kind, free to be changed."""
    valid = {kind: document for kind, (_, _, document) in READERS.items()}
    return copy.deepcopy({**valid, "plan": plan_document})


def saved(folder: Path, document, suffix: str = ".json") -> Path:
    path = folder / f"input{suffix}"
    text = json.dumps(document) if suffix == ".json" else yaml.safe_dump(document, sort_keys=False)
    path.write_text(text)
    return path


def changed(document: dict, path: tuple, value) -> dict:
    """The document with another value, or (...) without one, at a path of keys and indices."""
    result = copy.deepcopy(document)
    inner = result
    for step in path[:-1]:
        inner = inner[step]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return result


@contextmanager
def refused(error: type[InputError], *parts: str):
    """One short line with all of `parts`, soon."""
    start_s = time.process_time()  # not what others do on the same machine meanwhile
    with pytest.raises(error) as caught:
        yield
    assert time.process_time() - start_s < SECONDS
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 700
    for part in parts:
        assert part in message, message


# ------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".YML"])
@pytest.mark.parametrize("kind", ["model", "cluster", "hosts"])
def test_inputs_come_back_in_the_form_they_were_given(tmp_path, kind, suffix):
    read, _, document = READERS[kind]
    write = files.write_model if kind == "model" else files.write_cluster
    first = read(saved(tmp_path, document, suffix))
    write(first, tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == document
    assert list(json.loads((tmp_path / "again.json").read_text())) == list(document)
    assert read(tmp_path / "again.json") == first


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_plans_come_back_with_their_inputs(tmp_path, plan_document, suffix):
    first = files.read_plan(saved(tmp_path, plan_document, suffix))
    assert first.model == files.read_model(saved(tmp_path, MODEL))
    assert first.cluster == files.read_cluster(saved(tmp_path, HOSTS))
    files.write_plan(first, tmp_path / "again.plan.json")
    again = json.loads((tmp_path / "again.plan.json").read_text())
    assert again == plan_document
    assert again["model"] == MODEL
    assert again["cluster"] == HOSTS
    assert files.read_plan(tmp_path / "again.plan.json") == first


def test_every_optional_field_of_a_plan_comes_back(tmp_path, plan_document):
    made = files.read_plan(saved(tmp_path, plan_document))
    full = replace(
        made,
        stages=(Stage(layers=range(2), devices=(1, 0), shares=(0.25, 0.75), recompute=True),),
        schedule=type(made.schedule)(made.schedule.orders[:1]),
        predicted=replace(
            made.predicted,
            schedule_guarantee_ms=None,
            bound=Bound(
                lower_bound_ms=1.5,
                scope=BoundScope.ANY,
                limits=(BoundLimit.MEMORY, BoundLimit.WHOLE_SAMPLES),
            ),
        ),
        options={"deep": {"list": [1, None, "x"]}, "ratio": 0.5},
        seed=2**64 - 1,
        version="9",
    )
    files.write_plan(full, tmp_path / "p.json")
    assert files.read_plan(tmp_path / "p.json") == full
    by_hand = replace(made, predicted=None)
    files.write_plan(by_hand, tmp_path / "p.json")
    assert files.read_plan(tmp_path / "p.json") == by_hand


@pytest.mark.parametrize("seed", range(10))
def test_inputs_made_in_python_come_back(tmp_path, seed):
    rng = random.Random(seed)
    model, cluster = random_model(rng, 5), random_cluster(rng, 4, gaps=True)
    files.write_model(model, tmp_path / "m.json")
    files.write_cluster(cluster, tmp_path / "c.json")
    assert files.read_model(tmp_path / "m.json") == model
    assert files.read_cluster(tmp_path / "c.json") == cluster


@pytest.mark.parametrize("name", zoo.CLUSTER_NAMES)
def test_clusters_of_the_zoo_come_back(tmp_path, name):
    files.write_cluster(zoo.cluster(name), tmp_path / "c.json")
    assert files.read_cluster(tmp_path / "c.json") == zoo.cluster(name)


@pytest.mark.parametrize("name", zoo.MODEL_NAMES)
def test_models_of_the_zoo_come_back(tmp_path, name):
    files.write_model(zoo.model(name), tmp_path / "m.json")
    assert files.read_model(tmp_path / "m.json") == zoo.model(name)


def test_a_changed_input_forgets_the_file_it_came_from(tmp_path):
    cluster = replace(files.read_cluster(saved(tmp_path, HOSTS)), name="other")
    files.write_cluster(cluster, tmp_path / "c.json")
    assert files.read_cluster(tmp_path / "c.json").name == "other"


def test_defaults_are_settled_on_reading(tmp_path):
    model = files.read_model(saved(tmp_path, MODEL))
    first = model.layers[0]
    assert (first.gradient_bytes, first.activation_bytes) == (1000, 1000)
    assert first.weight_grad_ms is None
    assert (model.input_bytes, model.optimizer_bytes_per_parameter_byte) == (0, 3)
    cluster = files.read_cluster(saved(tmp_path, CLUSTER))
    a, b = cluster.devices
    assert (a.host, a.memory_gb, a.speed, b.host, b.speed) == ("a", None, 2, "h", 1)
    assert (cluster.latency_us, cluster.duplex) == (0, "full")


def test_the_largest_numbers_come_back(tmp_path):
    document = changed(MODEL, ("layers", 0, "parameter_bytes"), 10**18)
    model = files.read_model(saved(tmp_path, document))
    assert model.layers[0].parameter_bytes == 1e18
    files.write_model(model, tmp_path / "m.json")
    assert json.loads((tmp_path / "m.json").read_text()) == document


# -------------------------------------------------------------------------- shorthand


def test_hosts_are_expanded_in_file_order(tmp_path):
    document = {
        **HOSTS,
        "hosts": [
            {"devices": 1, "speed": 0.5},
            {"count": 2, "devices": 2, "bandwidth_gb_per_s": 12, "memory_gb": 16},
            {"devices": 3, "bandwidth_gb_per_s": 100},
        ],
        "latency_us": 5,
        "duplex": "half",
    }
    cluster = files.read_cluster(saved(tmp_path, document))
    names = ["h0d0", "h1d0", "h1d1", "h2d0", "h2d1", "h3d0", "h3d1", "h3d2"]
    assert [device.name for device in cluster.devices] == names
    assert [device.host for device in cluster.devices] == [name[:2] for name in names]
    assert [device.memory_gb for device in cluster.devices] == [None, *[16] * 4, *[None] * 3]
    assert [device.speed for device in cluster.devices] == [0.5, *[1] * 7]
    assert (cluster.latency_us, cluster.duplex) == (5, "half")
    inside = {"h1": 12, "h2": 12, "h3": 100}
    for u, row in enumerate(cluster.bandwidth_gb_per_s):
        for v, bandwidth in enumerate(row):
            if u != v:
                same_host = names[u][:2] == names[v][:2]
                assert bandwidth == (inside[names[u][:2]] if same_host else 1.25)


def test_one_host_needs_no_bandwidth_between_hosts(tmp_path):
    document = changed(HOSTS, ("between_hosts_gb_per_s",), ...)
    document["hosts"] = [{"devices": 1}]
    assert files.read_cluster(saved(tmp_path, document)).num_devices == 1


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("between_hosts_gb_per_s",), ..., "between_hosts_gb_per_s: is missing; 2 hosts"),
        (("hosts", 0, "devices"), ..., "hosts[0].devices: is missing"),
        (("hosts", 0, "bandwidth_gb_per_s"), ..., "hosts[0].bandwidth_gb_per_s: is missing"),
        (("hosts", 0, "count"), 0, "hosts[0].count: 0 is not at least 1"),
        (("hosts", 0, "devices"), -1, "hosts[0].devices: -1 is not at least 1"),
        (("hosts", 0, "devices"), 1.5, "hosts[0].devices: 1.5 is not a whole number"),
        (("hosts", 0, "count"), 10**9, "2000000000 are more than"),
        (("hosts", 0, "speed"), 0, "hosts[0].speed: 0 is not above zero"),
        (("hosts", 0, "counts"), 1, "hosts[0].counts: is no known field; did you mean 'count'?"),
        (("hosts",), [], "hosts: is empty"),
        (("devices",), [], "devices: stands beside hosts"),
        (("bandwidth_gb_per_s",), [[1]], "bandwidth_gb_per_s: stands beside hosts"),
        (("latency_us",), [[0]], "latency_us: has 1 rows for 4 devices"),
    ],
)
def test_wrong_shorthand_is_refused(tmp_path, path, value, message):
    with refused(ClusterError, message):
        files.read_cluster(saved(tmp_path, changed(HOSTS, path, value)))


# --------------------------------------------------------------------- wrong contents

WRONG = [
    ("model", ("layers", 1, "forward_ms"), -1, "layers[1].forward_ms: -1 is negative"),
    ("model", ("layers", 0, "forward_ms"), float("nan"), "layers[0].forward_ms: nan is not a f"),
    ("model", ("layers", 0, "weight_grad_ms"), float("inf"), "weight_grad_ms: inf is not a finite"),
    ("model", ("layers", 0, "gradient_bytes"), -2, "layers[0].gradient_bytes: -2 is negative"),
    ("model", ("layers", 0, "backward_ms"), "x", 'backward_ms: "x" is text, not a number'),
    ("model", ("layers", 0, "backward_ms"), True, "backward_ms: true is not a number"),
    ("model", ("layers", 0, "backward_ms"), None, "layers[0].backward_ms: null is no value"),
    ("model", ("layers", 0, "gradient_bytes"), None, "layers[0].gradient_bytes: null is no value"),
    ("model", ("layers", 0, "backward_ms"), [1], "layers[0].backward_ms: is a list, not a number"),
    ("model", ("layers", 0, "backward_ms"), 10**400, "0000... is too large a number"),
    ("model", ("layers", 0, "backward_ms"), ..., "layers[0].backward_ms: is missing"),
    ("model", ("layers", 0, "name"), 5, "layers[0].name: 5 is not text"),
    ("model", ("layers", 0, "name"), "second", "layers[1].name: 'second' is taken by layers[0]"),
    ("model", ("layers", 1, "forwards_ms"), 1, "layers[1].forwards_ms: is no known field; did you"),
    ("model", ("layers", 0), 7, "layers[0]: 7 is not an object"),
    ("model", ("layers",), [], "layers: is empty"),
    ("model", ("layers",), {}, "layers: is an object, not a list"),
    ("model", ("layers",), ..., "layers: is missing"),
    ("model", ("microbatch_size",), 0, "microbatch_size: 0 is not at least 1"),
    ("model", ("microbatch_size",), 1.5, "microbatch_size: 1.5 is not a whole number"),
    ("model", ("microbatch_size",), "4", 'microbatch_size: "4" is text, not a whole number'),
    ("model", ("microbatchsize",), 4, "did you mean 'microbatch_size'?"),
    ("model", ("document",), {}, "document: is no known field"),
    ("model", ("a\nb\x1b",), 1, r"'a\nb\x1b': is no known field; known are name"),
    ("model", ("input_bytes",), -1, "input_bytes: -1 is negative"),
    ("model", ("name",), None, "name: null is no value"),
    ("model", ("format",), "pipeplan.model/2", "format: 'pipeplan.model/2'; this reader takes"),
    ("model", ("format",), "pipeplan.cluster/1", "this reader takes 'pipeplan.model/1'"),
    ("model", ("format",), ["x"] * 999, "format: ['x', "),
    ("model", ("format",), ..., "format: is missing"),
    ("cluster", ("devices",), [], "devices: is empty"),
    ("cluster", ("devices", 0, "speed"), 0, "devices[0].speed: 0 is not above zero"),
    ("cluster", ("devices", 0, "speed"), -1, "devices[0].speed: -1 is negative"),
    ("cluster", ("devices", 1, "memory_gb"), None, "devices[1].memory_gb: null is no value"),
    ("cluster", ("devices", 1, "memory"), 1, "devices[1].memory: is no known field; did you mean"),
    ("cluster", ("devices", 1, "name"), "a", "devices[1].name: 'a' is taken by devices[0]"),
    ("cluster", ("devices", 1, "name"), "a" * 9999, None),
    ("cluster", ("duplex",), "both", 'duplex: "both" is none of full, half'),
    ("cluster", ("bandwidth_gb_per_s",), 3, "bandwidth_gb_per_s: 3 is not a list"),
    ("cluster", ("bandwidth_gb_per_s",), ..., "bandwidth_gb_per_s: is missing"),
    ("cluster", ("bandwidth_gb_per_s",), [[0, 1]], "bandwidth_gb_per_s: has 1 rows for 2 devices"),
    ("cluster", ("bandwidth_gb_per_s", 1), [1], "bandwidth_gb_per_s[1]: has 1 columns for 2"),
    ("cluster", ("bandwidth_gb_per_s", 1, 0), -1, "bandwidth_gb_per_s[1][0]: -1 is negative"),
    ("cluster", ("bandwidth_gb_per_s", 1, 0), "1", '[1][0]: "1" is text, not a number'),
    ("cluster", ("bandwidth_gb_per_s", 1, 0), None, "bandwidth_gb_per_s[1][0]: null is not a n"),
    ("cluster", ("bandwidth_gb_per_s", 1, 0), float("nan"), "_per_s[1][0]: nan is not a finite"),
    ("cluster", ("latency_us",), "low", 'latency_us: "low" is text, not a number or a list'),
    ("cluster", ("latency_us",), -1, "latency_us: -1 is negative"),
    ("cluster", ("latency_us",), [[0, 1], [1]], "latency_us[1]: has 1 columns for 2 devices"),
    ("cluster", ("hosts",), [], "devices: stands beside hosts"),
    ("plan", ("model",), ..., "model: is missing"),
    ("plan", ("cluster",), [], "cluster.format: is missing"),
    (
        "plan",
        ("model", "layers", 0, "forward_ms"),
        -1,
        "model.layers[0].forward_ms: -1 is negative",
    ),
    ("plan", ("cluster", "hosts", 0, "count"), 0, "cluster.hosts[0].count: 0 is not at least 1"),
    ("plan", ("microbatches",), 0, "microbatches: 0 is not at least 1"),
    ("plan", ("microbatches",), 10**12, "microbatches: 1000000000000 is above 65536, the most"),
    ("plan", ("microbatches",), 9, "schedule[0]: has 6 blocks for 9 microbatches"),
    ("plan", ("microbatches",), True, "microbatches: true is not a whole number"),
    ("plan", ("stages",), [], "stages: is empty"),
    ("plan", ("stages", 0, "devices", 0), "h9d9", "stages[0].devices[0]: 'h9d9' is not in the c"),
    ("plan", ("stages", 0, "devices"), [], "stages[0].devices: is empty"),
    ("plan", ("stages", 0, "layers"), [0, 9], "stages[0].layers: [0, 9] is no range within 0..2"),
    ("plan", ("stages", 0, "layers"), [-1, 1], "stages[0].layers: [-1, 1] is no range"),
    ("plan", ("stages", 0, "layers"), [1, 1], "stages[0].layers: [1, 1] is no range"),
    ("plan", ("stages", 0, "layers"), [0, 1, 2], "stages[0].layers: has 3 entries instead of 2"),
    ("plan", ("stages", 0, "layers"), [0, "1"], 'stages[0].layers[1]: "1" is text, not a whole'),
    ("plan", ("stages", 0, "shares"), [float("nan")], "stages[0].shares[0]: nan is not a finite"),
    ("plan", ("stages", 0, "recompute"), 1, "stages[0].recompute: 1 is not true or false"),
    ("plan", ("stages", 0, "replicas"), 1, "stages[0].replicas: is no known field; known are"),
    ("plan", ("schedule", 0, 1), "F-1", "schedule[0][1]: 'F-1' is no block; write F0 or B0"),
    ("plan", ("schedule", 0, 1), "X0", "schedule[0][1]: 'X0' is no block"),
    ("plan", ("schedule", 0, 1), "F01", "schedule[0][1]: 'F01' is no block"),
    ("plan", ("schedule", 0, 1), "F0\n", r"schedule[0][1]: 'F0\n' is no block"),
    ("plan", ("schedule", 0, 1), "F" + "9" * 5000, "schedule[0][1]: 'F9999"),
    ("plan", ("schedule", 0, 1), 5, "schedule[0][1]: 5 is not text"),
    ("plan", ("planner",), ..., "planner: is missing"),
    ("plan", ("seed",), 0.5, "seed: 0.5 is not a whole number"),
    ("plan", ("options",), {"x": [float("nan")]}, "options: holds a number that is not finite"),
    ("plan", ("options",), [], "options: is a list, not an object"),
    ("plan", ("predicted",), None, "predicted: null is no value"),
    ("plan", ("predicted", "iteration_ms"), None, "predicted.iteration_ms: null is no value"),
    ("plan", ("predicted", "iteration_ms"), float("nan"), "predicted.iteration_ms: nan is not a"),
    ("plan", ("predicted", "bubble_fraction"), float("inf"), "predicted.bubble_fraction: inf is"),
    ("plan", ("predicted", "peak_memory_gb", "h0d0"), "1", "peak_memory_gb: holds text instead of"),
    ("plan", ("predicted", "peak_memory_gb", "h0d0"), -1, "peak_memory_gb['h0d0']: -1 is neg"),
    ("plan", ("predicted", "bound_scope"), "any", "lower_bound_ms and bound_scope go together"),
    ("plan", ("predicted", "bound_scope"), "all", '"all" is none of even-shares, any'),
    ("plan", ("predicted", "iterations_ms"), 1, "predicted.iterations_ms: is no known field; did"),
]


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
@pytest.mark.parametrize(
    ("kind", "path", "value", "message"),
    WRONG,
    ids=[f"{kind}-{path[-1]!r}-{index}" for index, (kind, path, _, _) in enumerate(WRONG)],
)
def test_wrong_contents_are_refused(tmp_path, documents, kind, path, value, message, suffix):
    read, error, _ = READERS[kind]
    document = changed(documents[kind], path, value)
    if message is None:  # a long name is no error, but must not make a long message
        document = changed(document, ("devices", 0, "name"), value)
        message = "devices[1].name: 'aaa"
    with refused(error, str(tmp_path), message):
        read(saved(tmp_path, document, suffix))


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("document", [None, 5, "text", [], True, {}, [[]]])
def test_files_without_a_format_are_refused(tmp_path, kind, document):
    read, error, _ = READERS[kind]
    with refused(error, "format: is missing"):
        read(saved(tmp_path, document))


# ---------------------------------------------------------------------- hostile files

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]"
    for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
CHAIN = "x0: &x0 [1]\n" + "".join(f"x{i}: &x{i} [*x{i - 1}]\n" for i in range(1, 200))
HOSTILE = {
    "empty.json": (b"", "is empty"),
    "blank.yaml": (b" \n\n", "is empty"),
    "comment.yaml": (b"# nothing\n", "format: is missing"),
    "mark.json": (b"\xef\xbb\xbf", "is empty"),
    "latin1.json": ('{"name": "é"}'.encode("latin-1"), "is not UTF-8 text (byte 10)"),
    "utf16.yaml": ("name: x".encode("utf-16"), "is not UTF-8 text"),
    "surrogate.json": (rb'{"name": "\ud800"}', "holds half of a character pair"),
    "nul.yaml": (b"name: \x00", "is not YAML"),
    "text.json": (b"hello", "is not JSON: Expecting value at line 1, column 1"),
    "cut.json": (b'{"format": "pipeplan.mod', "is not JSON"),
    "cut.yaml": (b'{"format": "pipeplan.mod', "is not YAML"),
    "tail.json": (b"{} {}", "is not JSON: Extra data"),
    "deep.json": (b"[" * 100_000, "is nested deeper than 32 levels"),
    "closed.json": (b"[" * 33 + b"]" * 33, "is nested deeper than 32 levels"),
    "objects.json": (b'{"a":' * 100_000, "is nested deeper than 32 levels"),
    "deep.yaml": (b"[" * 100_000, "is nested deeper than 32 levels at line 1"),
    "objects.yaml": (b"{a: " * 100_000, "is nested deeper than 32 levels"),
    "indented.yaml": ("".join(" " * i + "a:\n" for i in range(500)).encode(), "nested deeper"),
    "dashes.yaml": (b"- " * 100_000, "nested deeper"),
    "bomb.yaml": (BOMB.encode(), "has more than 300,000 values, aliases counted, at line 6"),
    "chain.yaml": (CHAIN.encode(), "is nested deeper than 32 levels"),
    "loop.yaml": (b"a: &a [*a]", "line 1: the alias 'a' has no anchor before it"),
    "alias.yaml": (b"a: *nothing", "line 1: the alias 'nothing' has no anchor before it"),
    "object.yaml": (b"!!python/object/apply:os.system [true]", "tag:yaml.org,2002:python/object"),
    "tag.yaml": (b"name: !!float 3", "line 1: the tag 'tag:yaml.org,2002:float' is not allowed"),
    "local.yaml": (b"name:\n  !thing {}", "line 2: the tag '!thing' is not allowed"),
    "documents.yaml": (b"a: 1\n---\nb: 2\n", "holds more than one YAML document"),
    "many.yaml": (b"---\n" * 1_000_000, "holds more than one YAML document"),
    "twice.json": (
        b'{"a": 1, "b": [0, {"name": 1, "name": 2}]}',
        "b[1].'name': stands twice in one object",
    ),
    "tiny.json": (b'{"a": 1, "b": [1e-400]}', "'1e-400' is too small a number"),
    "zeros.json": (b'{"a": 0.%b1}' % (b"0" * 400), "is too small a number"),
    "tiny.yaml": (b"a: -1E-400", "'-1E-400' is too small a number"),
    "control.json": (b'{"a": "\x01"}', "Invalid control character at line 1, column 8"),
    "twice.yaml": (b"a: 1\nb:\n  name: 1\n  name: 2\n", "b.'name': stands twice in one object"),
    "deep_twice.yaml": (b"- [1, {x: {z: 1, z: 3}}]", "[0][1].x.'z': stands twice in one object"),
    "object_as_key.yaml": (b"? {a: 1, a: 2}\n: 2\n", "(key).'a': stands twice in one object"),
    "key.yaml": (b"5: x", "the key 5 of the object that ends at line"),
    "keys.yaml": (b"? [a]\n: x", "the key ['a'] of the object that ends at line"),
    "digits.json": (b"1" * 10_000, "holds a number with too many digits"),
    "digits.yaml": (b"1" * 10_000, "format: is missing"),
    "fraction.json": (b"0." + b"1" * 10_000_000, "format: is missing"),
    "values.json": (b"[" + b"0," * 7_000_000 + b"0]", "has more than 6,000,000 values"),
    "numbers.json": (b"[" + b"0.123456789012345," * 2_199_999 + b"0]", "format: is missing"),
    "lists.json": (b"[" + b"[]," * 500_000 + b"0]", "has more than 400,000 objects and lists"),
    "values.yaml": (b"- 0\n" * 999_999, "has more than 300,000 values"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_soon(tmp_path, name):
    data, message = HOSTILE[name]
    path = tmp_path / name
    path.write_bytes(data)
    for read, error, _ in READERS.values():
        with refused(error, f"{path}: ", message):
            read(path)
        if len(data) > 1_000_000:
            break  # the readers share their parser


@pytest.mark.parametrize(("name", "limit"), [("x.json", "250 MB"), ("x.yaml", "4 MB")])
def test_large_files_are_refused_unread(tmp_path, name, limit):
    with (tmp_path / name).open("wb") as file:
        file.truncate(10**12)  # sparse: takes no space
    with refused(ProfileError, f"is larger than {limit}"):
        files.read_model(tmp_path / name)


def test_a_file_at_the_size_limit_is_read(tmp_path, monkeypatch):
    path = saved(tmp_path, MODEL)
    monkeypatch.setattr(syntax, "MAX_JSON_BYTES", path.stat().st_size)
    files.read_model(path)
    monkeypatch.setattr(syntax, "MAX_JSON_BYTES", path.stat().st_size - 1)
    with refused(ProfileError, "is larger than"):
        files.read_model(path)


def test_files_that_cannot_be_opened_are_refused(tmp_path):
    with refused(ProfileError, "nothing.json: cannot be read: No such file or directory"):
        files.read_model(tmp_path / "nothing.json")
    with refused(ClusterError, "cannot be read: Is a directory"):
        files.read_cluster(tmp_path)
    with refused(PlanFileError, "cannot be read: Not a directory"):
        files.read_plan(saved(tmp_path, MODEL) / "below")


def test_yaml_follows_its_core_schema(tmp_path):
    text = """
format: pipeplan.model/1
name: no
microbatch_size: 1
input_bytes: 1e9
optimizer_bytes_per_parameter_byte: .5
layers:
- {name: "1.5", forward_ms: 1.5e-3, backward_ms: +2, output_bytes: 1E+3, parameter_bytes: 5.}
- {name: 2024-01-01, forward_ms: 0, backward_ms: 007, output_bytes: 0, parameter_bytes: 0}
"""
    (tmp_path / "m.yaml").write_text(text)
    model = files.read_model(tmp_path / "m.yaml")
    assert (model.name, model.input_bytes) == ("no", 1e9)
    assert model.optimizer_bytes_per_parameter_byte == 0.5
    first, second = model.layers
    assert (first.name, first.forward_ms, first.backward_ms) == ("1.5", 1.5e-3, 2)
    assert (first.output_bytes, first.parameter_bytes) == (1000, 5)
    assert (second.name, second.backward_ms) == ("2024-01-01", 7)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("1_000", 'input_bytes: "1_000" is text, not a number'),
        ("0x10", 'input_bytes: "0x10" is text, not a number'),
        ("'5'", 'input_bytes: "5" is text, not a number'),
        ("yes", 'input_bytes: "yes" is text, not a number'),
        ("true", "input_bytes: true is not a number"),
        ("~", "input_bytes: null is no value"),
        (".nan", "input_bytes: nan is not a finite number"),
        ("-.inf", "input_bytes: -inf is not a finite number"),
        ("1e999", "input_bytes: inf is not a finite number"),
    ],
)
def test_what_is_no_number_in_yaml_is_refused(tmp_path, number, message):
    path = saved(tmp_path, MODEL, ".yaml")
    path.write_text(f"{path.read_text()}\ninput_bytes: {number}\n")
    with refused(ProfileError, message):
        files.read_model(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_what_is_not_finite_in_json_is_refused(tmp_path, number):
    path = saved(tmp_path, changed(MODEL, ("input_bytes",), "here"))
    path.write_text(path.read_text().replace('"here"', number))
    with refused(ProfileError, "input_bytes: ", "is not a finite number"):
        files.read_model(path)


def test_shared_yaml_values_are_read(tmp_path):
    text = """
format: pipeplan.cluster/1
name: shared
devices: [{name: a}, {name: b}]
bandwidth_gb_per_s: [&row [1, 1], *row]
latency_us: [*row, *row]
"""
    (tmp_path / "c.yaml").write_text(text)
    cluster = files.read_cluster(tmp_path / "c.yaml")
    assert cluster.bandwidth_gb_per_s == cluster.latency_us == ((1, 1), (1, 1))
    files.write_cluster(cluster, tmp_path / "c.json")
    assert files.read_cluster(tmp_path / "c.json") == cluster


def test_1024_devices_load_soon(tmp_path):
    rng = random.Random(0)
    document = {
        "format": "pipeplan.cluster/1",
        "name": "large",
        "devices": [{"name": f"d{i}"} for i in range(1024)],
        "bandwidth_gb_per_s": [[rng.uniform(1, 2) for _ in range(1024)] for _ in range(1024)],
    }
    path = saved(tmp_path, document)
    start = time.process_time()
    cluster = files.read_cluster(path)
    assert time.process_time() - start < 5  # far more than it takes alone on a core
    assert cluster.bandwidth_gb_per_s[7][9] == document["bandwidth_gb_per_s"][7][9]


def test_the_examples_of_the_format_page_are_read(tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "formats.md").read_text()
    for language, read in (("json", files.read_model), ("yaml", files.read_cluster)):
        (example,) = re.findall(f"```{language}\n(.*?)```", page, re.DOTALL)
        (tmp_path / f"example.{language}").write_text(example)
        read(tmp_path / f"example.{language}")


# ------------------------------------------------------------------------------- fuzz

JUNK = [None, True, -1, 0, 1.5, 10**30, float("nan"), float("inf"), "", "x", "F0", [], [[]], {}]
JUNK += [[0, 1], ["h0d0"], {"name": "x"}, [None], "\x00\x1b[31m", "\ud800", -(10**400)]


def places(document, path=()):
    """The paths of everything in a document."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@pytest.mark.parametrize("kind", READERS)
def test_mutated_documents_load_or_are_refused(tmp_path, documents, kind):
    read, error, _ = READERS[kind]
    rng = random.Random(kind)
    refusals, num_loaded = [], 0
    for _ in range(300):
        document = documents[kind]
        for _ in range(rng.randint(1, 3)):
            path = rng.choice(list(places(document)))
            how = rng.randrange(4)
            if how == 0:
                document = changed(document, path, ...)
            elif how == 1 and isinstance(path[-1], str):
                misspelt = path[-1][:-1] + rng.choice(["", "x", "é", "\n"])
                document = changed(document, (*path[:-1], misspelt), rng.choice(JUNK))
            else:
                document = changed(document, path, rng.choice(JUNK))
            if not list(places(document)):
                break
        suffix = rng.choice([".json", ".json", ".yaml"])
        try:
            loaded = read(saved(tmp_path, document, suffix))
        except error as problem:
            refusals.append(str(problem))
        else:
            num_loaded += 1
            if kind == "plan":
                files.write_plan(loaded, tmp_path / "again.json")
    assert num_loaded
    assert refusals
    assert all(len(refusal.splitlines()) == 1 for refusal in refusals)


def test_mutated_bytes_load_or_are_refused(tmp_path, documents):
    rng = random.Random(1)
    refusals = []
    for _ in range(300):
        kind = rng.choice(list(READERS))
        read, error, _ = READERS[kind]
        path = saved(tmp_path, documents[kind], rng.choice([".json", ".yaml"]))
        data = bytearray(path.read_bytes())
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.choice(
                [b"", b"[", b"}", b"-", b"&a ", b"*a", b"\xff", b"!", b'"', b"\n", b"1e9", b": "]
            )
        path.write_bytes(data)
        try:
            read(path)
        except error as problem:
            refusals.append(str(problem))
    assert refusals
    assert all(len(refusal.splitlines()) == 1 for refusal in refusals)


# ---------------------------------------------------------------------------- writing


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError(28, "No space left")])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch, step, interruption):
    path = saved(tmp_path, MODEL)
    before = path.read_bytes()

    def interrupt(*_):
        raise interruption

    monkeypatch.setattr(os, step, interrupt)
    expected = InputError if isinstance(interruption, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        files.write_model(zoo.model("vgg19"), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_unwritable_paths_are_refused_in_one_line(tmp_path):
    model = zoo.model("vgg19")
    with refused(InputError, "m.json: cannot be written: No such file or directory"):
        files.write_model(model, tmp_path / "nowhere" / "m.json")
    with refused(InputError, f"{tmp_path}: cannot be written: Is a directory"):
        files.write_model(model, tmp_path)
    with refused(InputError, "cannot be written: Not a directory"):
        files.write_model(model, saved(tmp_path, MODEL) / "below")
    with refused(InputError, "cannot be written: File name too long"):
        files.write_model(model, tmp_path / ("x" * 300))
    assert os.listdir(tmp_path) == ["input.json"]


def test_writing_keeps_the_mode_and_the_link(tmp_path):
    path = saved(tmp_path, MODEL)
    path.chmod(0o640)
    (tmp_path / "link.json").symlink_to(path.name)
    files.write_model(zoo.model("vgg19"), tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert files.read_model(path) == zoo.model("vgg19")
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_new_file_obeys_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        files.write_model(zoo.model("vgg19"), tmp_path / "m.json")
    finally:
        os.umask(before)
    assert (tmp_path / "m.json").stat().st_mode & 0o777 == 0o640


def test_the_longest_names_can_be_written(tmp_path):
    files.write_model(zoo.model("vgg19"), tmp_path / ("x" * 255))


def test_the_same_plan_is_the_same_bytes(tmp_path):
    for name in ("a.json", "b.json"):
        made = plan(zoo.model("vgg19"), zoo.cluster("4x2-10g"), microbatches=4)
        files.write_plan(made, tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_json_is_laid_out_for_people():
    document = {"a": [1, 2], "b": [{"x": 1, "y": [1]}, {"z": {}}], "c": {}, "d": []}
    assert syntax.to_json(document).decode() == (
        '{\n  "a": [1,2],\n  "b": [\n    {"x":1,"y":[1]},\n    {\n      "z": {}\n    }\n  ],\n'
        '  "c": {},\n  "d": []\n}\n'
    )


# ------------------------------------------------------------------------------ made in Python


def pair(**fields):
    devices = (Device(name="a"), Device(name="b"))
    return Cluster(
        **{"name": "c", "devices": devices, "bandwidth_gb_per_s": ((1, 1),) * 2} | fields
    )


def test_duplex_as_text_is_what_it_says():
    given, meant = pair(duplex="half"), pair(duplex=Duplex.HALF)
    assert given.duplex is Duplex.HALF
    model = random_model(random.Random(3), 4)
    assert plan(model, given, 8, "1f1b") == plan(model, meant, 8, "1f1b")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pair(duplex="x"), "duplex: 'x' is none of full, half"),
        (lambda: pair(duplex=None), "duplex: None is none of full, half"),
        (lambda: pair(name=5), "name: 5 is not text"),
        (lambda: Device(name=b"x"), "name: b'x' is not text"),
        (lambda: Device(name="a", host=0), "host: 0 is not text"),
        (lambda: replace(zoo.model("vgg19"), name=5), "name: 5 is not text"),
        (lambda: replace(zoo.model("vgg19").layers[0], name=None), "name: None is not text"),
        (lambda: Bound(lower_bound_ms=1, scope="x"), "bound_scope: 'x' is none of"),
        (
            lambda: Bound(lower_bound_ms=1, scope="any", limits=("x",)),
            r"bound_limits\[0\]: 'x' is none of",
        ),
        (lambda: Stage(layers=range(1), devices=(0,), recompute="no"), "recompute: 'no' is"),
    ],
)
def test_nouns_made_in_python_are_checked_like_files(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_a_bound_made_with_text_has_its_scope_and_limits():
    bound = Bound(lower_bound_ms=1, scope="any", limits=("memory",))
    assert bound.scope is BoundScope.ANY
    assert bound.limits == (BoundLimit.MEMORY,)


def nested(levels):
    return [] if levels == 1 else [nested(levels - 1)]


CIRCLE: dict[str, object] = {}
CIRCLE.update(a=CIRCLE, b=CIRCLE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": None}, "version: None is not text"),
        ({"planner": 5}, "planner: 5 is not text"),
        ({"options": {1: 1, "1": 2}}, "options: the key 1 is not text"),
        ({"options": {"a": [{None: 1}]}}, "options: the key None is not text"),
        ({"options": {"a": nested(31)}}, "options: is nested deeper"),
        ({"options": CIRCLE}, "options: is nested deeper"),
        ({"options": {"a": {1}}}, "options: holds {1}, which JSON cannot say"),
        ({"options": {"a": 10**5000}}, "options: holds a number with too many digits"),
        ({"options": {"a": float("nan")}}, "options: holds a number that is not finite"),
    ],
)
def test_plans_that_no_file_can_hold_are_refused(tmp_path, fields, message):
    made = plan(random_model(random.Random(3), 4), pair(), 2, "1f1b")
    with pytest.raises(InputError, match=re.escape(message)):
        files.write_plan(replace(made, **fields), tmp_path / "plan.json")
    assert not os.listdir(tmp_path)


def test_options_at_the_limits_come_back(tmp_path):
    made = plan(random_model(random.Random(3), 4), pair(), 2, "1f1b")
    options = {
        "a": nested(30),
        "b": 2**3000 - 1,
        "c": None,
        "d": np.float64(1.5),
        "e": np.str_("x"),
    }
    made = replace(made, options=options)
    for name in ("plan.json", "plan.yaml"):
        files.write_plan(made, tmp_path / name)
        assert files.read_plan(tmp_path / name) == made


@pytest.mark.parametrize("number", [1e308, -3, 1e-320, 1e10])
def test_the_diagonal_may_hold_any_finite_number(number):
    matrix = ((number, 2.0), (1.0, number))
    odd = pair(bandwidth_gb_per_s=matrix, latency_us=matrix)
    plain = ((0.0, 2.0), (1.0, 0.0))
    model = random_model(random.Random(3), 4)
    for planner in ("best", "spp", "dapple", "data-parallel"):
        made = plan(model, odd, 4, planner)
        meant = plan(model, pair(bandwidth_gb_per_s=plain, latency_us=plain), 4, planner)
        assert (made.stages, made.predicted) == (meant.stages, meant.predicted)
        assert check(made).ok


@pytest.mark.parametrize("number", [float("inf"), float("nan"), "1", None, 10**400])
def test_the_diagonal_has_to_be_a_finite_number(number):
    with pytest.raises(ClusterError, match=r"bandwidth_gb_per_s\[1\]\[1\]: "):
        pair(bandwidth_gb_per_s=((0.0, 1.0), (1.0, number)))


def test_rows_that_are_shared_are_checked_beside_the_diagonal():
    row = (1e-9, 1.0)
    with pytest.raises(ClusterError, match=r"bandwidth_gb_per_s\[1\]\[0\]: 1e-09 is below"):
        pair(bandwidth_gb_per_s=(row, row))


def test_small_numbers_and_zeros_are_read_as_they_are(tmp_path):
    path = tmp_path / "numbers.json"
    path.write_text('{"a": [1e-300, 0e-400, 0.0E-999, 5e-324], "b": "1e-400"}')
    document = syntax.read_document(path, InputError)
    assert document == {"a": [1e-300, 0.0, 0.0, 5e-324], "b": "1e-400"}


def test_a_device_that_stands_twice_in_a_stage_is_named(tmp_path):
    made = plan(random_model(random.Random(3), 4), pair(), 2, "1f1b")
    document = files.plan_document(made)
    document["stages"][0]["devices"] = ["a", "b", "a"]
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(PlanFileError, match=r"stages\[0\].devices: 'a' stands twice"):
        files.read_plan(tmp_path / "p.json")
