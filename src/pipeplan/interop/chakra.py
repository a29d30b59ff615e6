"""Execution traces of MLCommons Chakra, which network simulators such as ASTRA-sim read.

Each rank has a file of protobuf messages, each with its length before it: first the metadata, then
the nodes. A block is a COMP_NODE with its duration. A transfer is a COMM_SEND_NODE and a
COMM_RECV_NODE for each pair of devices, an all-reduce a COMM_COLL_NODE on each replica. Blocks of a
device run in their order: each one depends on the one before it and on what it receives.

Ranks number the used devices, stage by stage. The main file holds the groups of the all-reduces.

Reference:
    mlcommons/chakra, schema/protobuf/et_def.proto, version 0.0.4: field numbers and node types.
    Durations there are whole microseconds, so ours are rounded.
"""

from collections.abc import Iterator
from itertools import pairwise

from pipeplan.documents.json_text import to_json
from pipeplan.errors import InputError
from pipeplan.interop.exported import Exported, ExportSettings
from pipeplan.pipeline import Plan, Stage
from pipeplan.replaying import Replayed

__all__ = ["export_chakra"]

VERSION = "0.0.4"
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
"""Of the schema's NodeType."""
ALL_REDUCE = 0
US_IN_MS = 1000
MAX_NODES = 1_000_000
"""About 100 MB."""
FORWARD, BACKWARD = 0, 1


def export_chakra(replayed: Replayed, settings: ExportSettings) -> Exported:
    """A file for each rank, `<stem>.<rank>.et`, and the groups of ranks as the main file."""
    plan = replayed.plan
    _require_size(plan)
    first_rank, groups = 0, {}
    for index, stage in enumerate(plan.stages):
        groups[str(index)] = list(range(first_rank, first_rank + stage.num_replicas))
        first_rank += stage.num_replicas
    files = {}
    for index, ranks in enumerate(groups.values()):
        for replica, rank in enumerate(ranks):
            writer = _Rank(replayed, index, replica, list(groups.values()))
            files[f"{settings.stem}.{rank}.et"] = b"".join(writer.messages())
    notes = (
        "durations are rounded to microseconds",
        f"ranks are the used devices, stage by stage; there are {first_rank}",
    )
    return Exported(data=to_json(groups), others=files, notes=notes)


def _require_size(plan: Plan) -> None:
    counts = [stage.num_replicas for stage in plan.stages]
    pairs = sum(one * other for one, other in pairwise(counts))
    num_nodes = plan.microbatches * (2 * sum(counts) + 4 * pairs)
    if num_nodes > MAX_NODES:
        raise InputError(
            f"chakra: {num_nodes:,} nodes are more than the {MAX_NODES:,} that are written;"
            " take fewer microbatches"
        )


class _Rank:
    """The nodes of one rank."""

    def __init__(
        self, replayed: Replayed, stage: int, replica: int, ranks: list[list[int]]
    ) -> None:
        self._plan = replayed.plan
        self._stage, self._ranks = stage, ranks
        self._rank = ranks[stage][replica]
        self._share = self._plan.stages[stage].device_shares[replica]
        self._next_id = 0
        costs = replayed.costs
        self._block_ms = (float(costs.forward_ms_S[stage]), float(costs.backward_ms_S[stage]))

    def messages(self) -> Iterator[bytes]:
        """The messages of the file, in an order in which each node stands behind what it needs."""
        yield _message(_text(1, VERSION))
        previous: int | None = None
        for code in self._plan.schedule.codes(self._stage).tolist():
            direction, microbatch = (FORWARD, code) if code >= 0 else (BACKWARD, -1 - code)
            needed = [] if previous is None else [previous]
            source = self._stage + (-1 if direction == FORWARD else 1)
            for peer, share in self._peers(source):
                yield self._transfer(RECEIVE, direction, microbatch, peer, share, [])
                needed.append(self._next_id - 1)
            name = f"{self._stage}{'FB'[direction]}{microbatch}"
            duration_us = round(self._block_ms[direction] * US_IN_MS)
            yield self._node(name, COMPUTE, needed, [], duration_us=duration_us)
            previous = self._next_id - 1
            target = self._stage + (1 if direction == FORWARD else -1)
            for peer, share in self._peers(target):
                yield self._transfer(SEND, direction, microbatch, peer, share, [previous])
        stage = self._plan.stages[self._stage]
        if stage.num_replicas > 1 and previous is not None:
            attributes = [
                _attribute("comm_type", 9, ALL_REDUCE),
                _attribute("comm_size", 9, round(self._parameter_bytes(stage))),
                _message_field(10, _text(1, "pg_name") + _text(29, str(self._stage))),
            ]
            yield self._node(f"all-reduce {self._stage}", COLLECTIVE, [previous], attributes)

    def _peers(self, stage: int) -> list[tuple[int, float]]:
        """The ranks of a neighbouring stage with their shares; none beyond the ends."""
        if not 0 <= stage < len(self._plan.stages):
            return []
        shares = self._plan.stages[stage].device_shares
        return list(zip(self._ranks[stage], shares, strict=True))

    def _transfer(
        self,
        kind: int,
        direction: int,
        microbatch: int,
        peer: int,
        share: float,
        needed: list[int],
    ) -> bytes:
        """A send to a peer, or a receive from it."""
        is_behind = (kind == SEND) == (direction == FORWARD)  # the peer's stage is behind ours
        layer = self._plan.stages[self._stage if is_behind else self._stage - 1].layers[-1]
        profile = self._plan.model.layers[layer]
        whole = profile.output_bytes if direction == FORWARD else profile.gradient_bytes
        source, target = (self._rank, peer) if kind == SEND else (peer, self._rank)
        word = "send" if kind == SEND else "receive"
        attributes = [
            _attribute("comm_src", 7, source),
            _attribute("comm_dst", 7, target),
            _attribute("comm_tag", 7, 2 * microbatch + direction),
            _attribute("comm_size", 9, round(whole * self._share * share)),
        ]
        name = f"{word} {'FB'[direction]}{microbatch} {source} to {target}"
        return self._node(name, kind, needed, attributes)

    def _node(
        self,
        name: str,
        kind: int,
        needed: list[int],
        attributes: list[bytes],
        duration_us: int = 0,
    ) -> bytes:
        """One node, which gets the next id."""
        identity = self._next_id
        self._next_id += 1
        dependencies = b"".join(map(_varint, needed))
        parts = [
            _number(1, identity),
            _text(2, name),
            _number(3, kind),
            _message_field(5, dependencies) if needed else b"",
            _number(7, duration_us),
            _message_field(10, _text(1, "is_cpu_op") + _tag(27, 0) + b"\0"),
            *attributes,
        ]
        return _message(b"".join(parts))

    def _parameter_bytes(self, stage: Stage) -> float:
        return sum(self._plan.model.layers[layer].parameter_bytes for layer in stage.layers)


# ------------------------------------------------------------------- protobuf's wire format


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; all but the last byte have the highest bit set."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _tag(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _number(field: int, number: int) -> bytes:
    """A field of a whole number; 0 is the default and is left out."""
    return _tag(field, 0) + _varint(number) if number else b""


def _message_field(field: int, content: bytes) -> bytes:
    return _tag(field, 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _message_field(field, text.encode())


def _attribute(name: str, field: int, number: int) -> bytes:
    """An attribute of a node: 7 is an int32, 9 an int64; 0 is written, as one of its kinds."""
    return _message_field(10, _text(1, name) + _tag(field, 0) + _varint(number))


def _message(content: bytes) -> bytes:
    """A message with its length before it, as files hold it."""
    return _varint(len(content)) + content
