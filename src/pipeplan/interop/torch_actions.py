"""The actions in a schedule CSV of torch, compute-only or with communication, as plain values.

Besides F (forward) and B (backward) there are I and W, the two halves of a backward; sends and
receives; and UNSHARD, RESHARD and REDUCE_GRAD, which have no order that matters here.
"""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.documents.text import excerpt
from pipeplan.errors import ScheduleError
from pipeplan.validation import MAX_BLOCKS

__all__ = ["Action", "parse_actions", "require_received_as_sent"]

ACTION = re.compile(
    r"([0-9]{1,6})(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|F|B|I|W)([0-9]{0,6})",
    re.ASCII,
)
WITHOUT_MICROBATCH = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
PAIRS = (("SEND_F", "RECV_F", 1), ("SEND_B", "RECV_B", -1))
"""A send, its receive, and how far away the receiving stage is."""


@dataclass(frozen=True, slots=True)
class Action:
    """One cell of the table."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def parse_actions(text: str) -> list[list[Action]]:
    """The actions of each rank in their order; bubbles and sharding are left out."""
    reader = csv.reader(io.StringIO(text), strict=True)
    rows = []
    num_actions = 0
    try:
        for rank, cells in enumerate(reader):
            row = [_action(cell.strip(), rank, n) for n, cell in enumerate(cells) if cell.strip()]
            rows.append([action for action in row if action is not None])
            num_actions += len(row)
            if num_actions > MAX_BLOCKS:
                raise ScheduleError(f"has more than the {MAX_BLOCKS:,} blocks that a plan may have")
    except csv.Error as problem:
        raise ScheduleError(f"line {reader.line_num}: is not CSV: {problem}") from None
    while rows and not rows[-1]:
        rows.pop()
    return rows


def _action(cell: str, rank: int, column: int) -> Action | None:
    where = f"rank {rank}, cell {column}"
    if cell.endswith("OVERLAP_F_B"):
        raise ScheduleError(f"{where}: {excerpt(cell)}: overlapped blocks cannot be simulated")
    match = ACTION.fullmatch(cell)
    if not match:
        raise ScheduleError(f"{where}: {excerpt(cell)} is no action; one looks like 2F0")
    stage, kind, microbatch = match.groups()
    if kind in WITHOUT_MICROBATCH:
        return None
    if not microbatch:
        raise ScheduleError(f"{where}: {excerpt(cell)} has no microbatch")
    return Action(int(stage), kind, int(microbatch))


def require_received_as_sent(rows: Sequence[Sequence[Action]]) -> None:
    """Refuse communication in a wrong order, which torch runs without a word.

    Between two stages, messages arrive in the order in which they were sent, and torch does not
    look which one it gets. A result is sent behind its block and received before its user.
    """
    if not any("_" in action.kind for row in rows for action in row):
        return
    place = {
        (action.stage, action.kind, action.microbatch): (rank, position)
        for rank, row in enumerate(rows)
        for position, action in enumerate(row)
    }
    for send, receive, away in PAIRS:
        kinds = ("F",) if send == "SEND_F" else ("B", "I")
        sent: dict[int, list[Action]] = {}
        received: dict[int, list[Action]] = {}
        for row in rows:
            for action in row:
                if action.kind == send:
                    _require_later(place, action, kinds, action.stage)
                    sent.setdefault(action.stage + away, []).append(action)
                elif action.kind == receive:
                    _require_earlier(place, action, kinds)
                    received.setdefault(action.stage, []).append(action)
        for stage in sorted({*sent, *received}):
            _require_same(sent.get(stage, []), received.get(stage, []))


Places = dict[tuple[int, str, int], tuple[int, int]]


def _require_later(place: Places, send: Action, kinds: Sequence[str], stage: int) -> None:
    mine = place[send.stage, send.kind, send.microbatch]
    before = [place.get((stage, kind, send.microbatch)) for kind in kinds]
    if not any(found and found[0] == mine[0] and found[1] < mine[1] for found in before):
        raise ScheduleError(f"rank {mine[0]}: {send} stands before the block that makes it")


def _require_earlier(place: Places, receive: Action, kinds: Sequence[str]) -> None:
    mine = place[receive.stage, receive.kind, receive.microbatch]
    users = [place.get((receive.stage, kind, receive.microbatch)) for kind in kinds]
    if any(found and found[0] == mine[0] and found[1] < mine[1] for found in users):
        raise ScheduleError(f"rank {mine[0]}: {receive} stands behind the block that needs it")


def _require_same(sent: Sequence[Action], received: Sequence[Action]) -> None:
    for one, other in zip(sent, received, strict=False):
        if one.microbatch != other.microbatch:
            raise ScheduleError(
                f"{other} is received where {one} arrives; torch would take one for the other"
            )
    if len(sent) != len(received):
        longer = (sent if len(sent) > len(received) else received)[min(len(sent), len(received))]
        raise ScheduleError(f"{longer} has no counterpart")
