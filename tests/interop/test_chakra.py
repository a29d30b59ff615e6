"""Chakra traces: Google's protobuf reads them by the published schema, and they can be run."""

import json
import random

import pytest

from interop.samples import any_plan
from pipeplan.cost import CostModel
from pipeplan.errors import InputError
from pipeplan.interop.exported import ExportSettings
from pipeplan.interop.exporting import export_plan
from pipeplan.pipeline import Plan

descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")

COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
FIELD = descriptor_pb2.FieldDescriptorProto


def message_classes() -> dict:
    """The parts of Chakra's et_def.proto that are used, by its field numbers and types."""
    from google.protobuf import descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="Chakra", syntax="proto3")

    def add(name: str, *fields: tuple) -> None:
        message = file.message_type.add(name=name)
        for field, number, kind, *rest in fields:
            label = FIELD.LABEL_REPEATED if "repeated" in rest else FIELD.LABEL_OPTIONAL
            each = message.field.add(name=field, number=number, type=kind, label=label)
            if kind == FIELD.TYPE_MESSAGE:
                each.type_name = ".Chakra.AttributeProto"

    add(
        "AttributeProto",
        ("name", 1, FIELD.TYPE_STRING),
        ("int32_val", 7, FIELD.TYPE_INT32),
        ("int64_val", 9, FIELD.TYPE_INT64),
        ("bool_val", 27, FIELD.TYPE_BOOL),
        ("string_val", 29, FIELD.TYPE_STRING),
    )
    add("GlobalMetadata", ("version", 1, FIELD.TYPE_STRING))
    add(
        "Node",
        ("id", 1, FIELD.TYPE_UINT64),
        ("name", 2, FIELD.TYPE_STRING),
        ("type", 3, FIELD.TYPE_INT32),
        ("ctrl_deps", 4, FIELD.TYPE_UINT64, "repeated"),
        ("data_deps", 5, FIELD.TYPE_UINT64, "repeated"),
        ("duration_micros", 7, FIELD.TYPE_UINT64),
        ("attr", 10, FIELD.TYPE_MESSAGE, "repeated"),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"Chakra.{name}"))
        for name in ("GlobalMetadata", "Node")
    }


CLASSES = message_classes()


def nodes_in(data: bytes) -> list:
    """The nodes of a file, behind its metadata; nothing unknown may be in any of them."""
    from google.protobuf import unknown_fields

    messages, place = [], 0
    while place < len(data):
        length, shift = 0, 0
        while True:
            byte = data[place]
            place += 1
            length |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        messages.append(data[place : place + length])
        assert len(messages[-1]) == length
        place += length
    metadata = CLASSES["GlobalMetadata"].FromString(messages[0])
    assert metadata.version == "0.0.4"
    nodes = [CLASSES["Node"].FromString(message) for message in messages[1:]]
    assert all(len(unknown_fields.UnknownFieldSet(node)) == 0 for node in nodes)
    return nodes


def attributes(node) -> dict:
    values = {}
    for attribute in node.attr:
        for field, value in attribute.ListFields():
            if field.name != "name":
                values[attribute.name] = value
        values.setdefault(attribute.name, 0)
    return values


def ranks_of(plan: Plan) -> tuple[dict[str, list[int]], list[list]]:
    done = export_plan(plan, "chakra", ExportSettings(stem="x"))
    groups = json.loads(done.data)
    num_ranks = sum(stage.num_replicas for stage in plan.stages)
    assert done.others.keys() == {f"x.{rank}.et" for rank in range(num_ranks)}
    return groups, [nodes_in(done.others[f"x.{rank}.et"]) for rank in range(num_ranks)]


@pytest.mark.parametrize("seed", range(40))
def test_traces_hold_the_plan(seed):
    plan = any_plan(random.Random(seed))
    groups, ranks = ranks_of(plan)
    costs = CostModel(plan.model, plan.cluster).pipeline_costs(plan.stages)
    for stage, (name, members) in enumerate(groups.items()):
        for rank in members:
            nodes = ranks[rank]
            blocks = [node for node in nodes if node.type == COMPUTE]
            assert [node.name for node in blocks] == [str(block) for block in plan.schedule[stage]]
            for node in blocks:
                forward = "F" in node.name
                block_ms = (costs.forward_ms_S if forward else costs.backward_ms_S)[stage]
                assert node.duration_micros == round(block_ms * 1000)
            reduced = [attributes(node) for node in nodes if node.type == COLLECTIVE]
            assert len(reduced) == (len(members) > 1)
            for each in reduced:
                held = sum(plan.model.layers[n].parameter_bytes for n in plan.stages[stage].layers)
                assert (each["pg_name"], each["comm_type"]) == (name, 0)
                assert each["comm_size"] == round(held)


@pytest.mark.parametrize("seed", range(40))
def test_transfers_match_and_nothing_waits_for_ever(seed):
    plan = any_plan(random.Random(seed))
    _, ranks = ranks_of(plan)
    sent, received = {}, {}
    for rank, nodes in enumerate(ranks):
        assert [node.id for node in nodes] == list(range(len(nodes)))
        assert all(dependency < node.id for node in nodes for dependency in node.data_deps)
        for node in nodes:
            if node.type in (SEND, RECEIVE):
                about = attributes(node)
                key = (about["comm_src"], about["comm_dst"], about["comm_tag"])
                side = sent if node.type == SEND else received
                assert key not in side
                assert key[0 if node.type == SEND else 1] == rank
                side[key] = about["comm_size"]
    assert sent == received
    assert run(ranks) == sum(map(len, ranks))


def run(ranks: list[list]) -> int:
    """How many nodes can be done if each waits for its dependencies and for its sender."""
    done = [set() for _ in ranks]
    arrived = set()
    progress = True
    while progress:
        progress = False
        for rank, nodes in enumerate(ranks):
            for node in nodes:
                if node.id in done[rank] or not set(node.data_deps) <= done[rank]:
                    continue
                about = attributes(node)
                key = tuple(about.get(f"comm_{part}", 0) for part in ("src", "dst", "tag"))
                if node.type == RECEIVE and key not in arrived:
                    continue
                if node.type == SEND:
                    arrived.add(key)
                done[rank].add(node.id)
                progress = True
    return sum(map(len, done))


def test_too_many_nodes_are_refused(monkeypatch):
    monkeypatch.setattr("pipeplan.interop.chakra.MAX_NODES", 1)
    with pytest.raises(InputError, match="are more than the 1 that are written"):
        export_plan(any_plan(random.Random(0)), "chakra", ExportSettings())
