"""The JSON Schemas: published as made, true of valid files, never stricter than a reader."""

import copy
import json
import random
from pathlib import Path

import jsonschema
import pytest

from pipeplan import zoo
from pipeplan.documents.files import plan_document, read_cluster, read_model, read_plan
from pipeplan.documents.inputs import cluster_document, model_document
from pipeplan.documents.schemas import SCHEMA_KINDS, json_schema
from pipeplan.documents.syntax import to_json
from pipeplan.errors import InputError
from pipeplan.planning.door import plan

ROOT = Path(__file__).parents[2]
READ = {"model": read_model, "cluster": read_cluster, "plan": read_plan}
HOSTILE = sorted((ROOT / "tests" / "hostile").glob("*.json"))


def validator(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json_schema(kind))


def sample(kind: str) -> dict:
    """A small valid file, with plain lists as JSON has them."""
    if kind == "model":
        document = model_document(zoo.model("vgg19"))
    elif kind == "cluster":
        document = cluster_document(zoo.cluster("random-8"))
    else:
        made = plan(zoo.model("vgg19"), zoo.cluster("mixed-hosts"), 3, effort=0.1)
        document = plan_document(made)
    return json.loads(to_json(document))


@pytest.mark.parametrize("kind", SCHEMA_KINDS)
def test_the_published_schema_is_the_one_of_the_types(kind):
    published = ROOT / "docs" / "schemas" / f"{kind}.schema.json"
    jsonschema.Draft202012Validator.check_schema(json_schema(kind))
    assert json.loads(published.read_text()) == json_schema(kind), (
        f"make it anew: pipeplan schema {kind} > docs/schemas/{kind}.schema.json"
    )


def test_everything_in_the_zoo_is_valid():
    for name in zoo.MODEL_NAMES:
        validator("model").validate(json.loads(to_json(model_document(zoo.model(name)))))
    for name in zoo.CLUSTER_NAMES:
        validator("cluster").validate(json.loads(to_json(cluster_document(zoo.cluster(name)))))
    validator("plan").validate(sample("plan"))


WRONG = {
    "model": [
        ("layers", 0, "forward_ms", -1),
        ("layers", 0, "forward_ms", 1e-9),
        ("layers", 0, "forward_ms", "1"),
        ("layers", 0, "forwards_ms", 1),
        ("layers", 0, "name", None),
        ("microbatch_size", 0),
        ("format", "pipeplan.model/2"),
    ],
    "cluster": [
        ("devices", 0, "speed", 0),
        ("devices", 0, "memory_gb", 1e10),
        ("duplex", "both"),
        ("uplink_gb_per_s", 0),
        ("bandwidth_gb_per_s", 1),
    ],
    "plan": [
        ("microbatches", 0),
        ("stages", 0, "recompute", 1),
        ("stages", 0, "layers", [0]),
        ("schedule", 0, 0, "X0"),
        ("schedule", 0, 0, "F00"),
        ("cluster", "name", 1),
        ("predicted", "bound_scope", "all"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "change"), [(kind, change) for kind in WRONG for change in WRONG[kind]], ids=str
)
def test_a_wrong_value_is_refused_by_schema_and_reader(kind, change, tmp_path):
    document = sample(kind)
    assert validator(kind).is_valid(document)
    place = document
    for step in change[:-2]:
        place = place[step]
    place[change[-2]] = change[-1]
    assert not validator(kind).is_valid(document)
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError):
        READ[kind](path)


@pytest.mark.parametrize("path", HOSTILE, ids=lambda path: path.name)
def test_what_a_schema_refuses_the_reader_refuses(path):
    kind = path.name.split(".")[-2]
    try:
        document = json.loads(path.read_text())
    except ValueError:
        return
    if not validator(kind).is_valid(document):
        with pytest.raises(InputError):
            READ[kind](path)


VALUES = [None, True, 0, 1, -1, 0.5, 1e-9, 1e13, 2**70, "x", "full", [], {}, [[1]], "F0"]


@pytest.mark.parametrize("kind", SCHEMA_KINDS)
def test_no_mutant_is_refused_by_the_schema_alone(kind, tmp_path):
    rng, valid, judge = random.Random(7), sample(kind), validator(kind)
    path, num_refused = tmp_path / "mutant.json", 0
    for _ in range(150):
        mutant = copy.deepcopy(valid)
        _mutate(mutant, rng)
        if judge.is_valid(mutant):
            continue
        num_refused += 1
        path.write_text(json.dumps(mutant))
        with pytest.raises(InputError):
            READ[kind](path)
    assert num_refused > 50


def _mutate(document: dict, rng: random.Random) -> None:
    """Change, add or remove one value somewhere."""
    place: dict | list = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = rng.choice(keys)
        if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.2:
            break
        place = place[key]
    action = rng.random()
    if action < 0.6:
        place[key] = rng.choice(VALUES)
    elif action < 0.8 and isinstance(place, dict):
        place[rng.choice(["extra", f"{key}s"])] = rng.choice(VALUES)
    else:
        del place[key]
