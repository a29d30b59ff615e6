"""Orders of blocks as a plan file holds them, and as a schedule.

In the first version of plans there is one order for each stage, of `F0` and `B0`. In the second
there is one for each group of devices, and blocks name their stage, `3F0`, where the group has
several.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeplan.documents.json_text import LEFT_OUT, PackedOrder, PackedOrders
from pipeplan.documents.text import excerpt
from pipeplan.errors import PlanFileError
from pipeplan.pipeline import (
    KINDS,
    Codes,
    Group,
    GroupCodes,
    Kind,
    Schedule,
    pack_codes,
    unpack_codes,
)
from pipeplan.validation import MAX_DEVICES

__all__ = ["block_texts", "parse_group_orders", "parse_stage_orders"]

BLOCK_TEXT = re.compile(r"(0|[1-9][0-9]{0,8})?([FBIW])(0|[1-9][0-9]{0,8})")
KIND_OF_LETTER = np.zeros(256, dtype=np.int64)
for _number, _kind in enumerate(KINDS):
    KIND_OF_LETTER[ord(_kind)] = _number
FORWARD, BACKWARD = ord(Kind.FORWARD), ord(Kind.BACKWARD)
STAGE_BLOCKS = "write F0 or B0"
GROUP_BLOCKS = "write F0, B0, I0 or W0, with the stage before it (3F0) in a group of several"


# ---------------------------------------------------------------------------- writing


class _StageTexts(dict[int, str]):
    """The text of each block by its code; equal blocks share one text."""

    def __missing__(self, code: int) -> str:
        text = self[code] = f"F{code}" if code >= 0 else f"B{-1 - code}"
        return text


def block_texts(schedule: Schedule, groups: Sequence[Group]) -> list[list[str]]:
    """Each order as texts; blocks name their stage where the group has several."""
    if schedule.is_by_stage:
        texts = _StageTexts()
        return [list(map(texts.__getitem__, order)) for order in schedule.to_codes()]
    return [
        _group_texts(schedule.group_codes(g), g >= len(groups) or len(groups[g].stages) > 1)
        for g in range(len(schedule))
    ]


def _group_texts(codes: GroupCodes, names_stages: bool) -> list[str]:
    stages, kinds, microbatches = unpack_codes(codes)
    letters = [KINDS[kind].value for kind in kinds.tolist()]
    if not names_stages and len(set(stages.tolist())) <= 1:
        return [f"{kind}{m}" for kind, m in zip(letters, microbatches.tolist(), strict=True)]
    blocks = zip(stages.tolist(), letters, microbatches.tolist(), strict=True)
    return [f"{stage}{kind}{m}" for stage, kind, m in blocks]


# ---------------------------------------------------------------------------- reading


def parse_stage_orders(orders: Any, num_microbatches: int) -> Schedule:
    """The schedule of a plan of version 1: one order for each stage."""
    packed = _packed(orders, "stage", STAGE_BLOCKS)
    codes = [_stage_codes(order, f"schedule[{n}]") for n, order in enumerate(packed)]
    for stage, row in enumerate(codes):
        # Judging an order takes as long as the microbatches are many, so they have to be there.
        # Which of a few are missing is for the checker to say.
        if len(row) < num_microbatches:
            raise PlanFileError(
                f"schedule[{stage}]: has {len(row)} blocks for {num_microbatches}"
                " microbatches; each runs once forward and once backward"
            )
    return Schedule.from_codes(codes)


def parse_group_orders(orders: Any, num_microbatches: int, groups: Sequence[Group]) -> Schedule:
    """The schedule of a plan of version 2: one order for each group."""
    packed = _packed(orders, "group", GROUP_BLOCKS)
    if len(packed) != len(groups):
        raise PlanFileError(
            f"schedule: has {len(packed)} orders for {len(groups)} groups of devices; give one for"
            " each group, in the order of their first stages"
        )
    codes = [_group_codes(order, g, groups[g]) for g, order in enumerate(packed)]
    for g, row in enumerate(codes):
        if len(row) < num_microbatches * len(groups[g].stages):
            raise PlanFileError(
                f"schedule[{g}]: has {len(row)} blocks for {num_microbatches} microbatches in"
                f" {len(groups[g].stages)} stages; each has F and B, or F, I and W"
            )
    return Schedule.from_group_codes(codes)


def _packed(orders: Any, noun: str, remedy: str) -> list[PackedOrder]:
    """The orders as arrays, from arrays or from lists of texts."""
    if isinstance(orders, PackedOrders):
        return orders.orders
    if not isinstance(orders, list):
        raise PlanFileError(f"schedule: is not a list; give one for each {noun}")
    if len(orders) > MAX_DEVICES:
        raise PlanFileError(f"schedule: has more than {MAX_DEVICES:,} orders, one a {noun}")
    return [_pack_texts(order, f"schedule[{n}]", noun, remedy) for n, order in enumerate(orders)]


def _pack_texts(order: Any, path: str, noun: str, remedy: str) -> PackedOrder:
    if not isinstance(order, list):
        raise PlanFileError(f"{path}: is not a list; give the order of the {noun}'s blocks")
    letters, microbatches, stages = [], [], []
    for position, text in enumerate(order):
        if not isinstance(text, str):
            raise PlanFileError(f"{path}[{position}]: {excerpt(text)} is not text; {remedy}")
        match = BLOCK_TEXT.fullmatch(text)
        if not match:
            raise PlanFileError(f"{path}[{position}]: {excerpt(text)} is no block; {remedy}")
        stages.append(LEFT_OUT if match[1] is None else int(match[1]))
        letters.append(ord(match[2]))
        microbatches.append(int(match[3]))
    return PackedOrder(
        np.array(letters, dtype=np.uint8),
        np.array(microbatches, dtype=np.int32),
        np.array(stages, dtype=np.int32),
    )


def _stage_codes(order: PackedOrder, path: str) -> Codes:
    wrong = (order.letters != FORWARD) & (order.letters != BACKWARD)
    if order.stages is not None:
        wrong |= order.stages != LEFT_OUT
    if wrong.any():
        position = int(wrong.argmax())
        raise PlanFileError(
            f"{path}[{position}]: {_text(order, position)!r} is no block of format"
            f" 'pipeplan.plan/1'; {STAGE_BLOCKS}, or take 'pipeplan.plan/2'"
        )
    m = order.microbatches
    return np.where(order.letters == BACKWARD, -1 - m, m)


def _group_codes(order: PackedOrder, g: int, group: Group) -> GroupCodes:
    stages = order.stages
    is_left_out = np.ones(len(order.letters), bool) if stages is None else stages == LEFT_OUT
    if len(group.stages) > 1 and is_left_out.any():
        position = int(is_left_out.argmax())
        text = _text(order, position)
        raise PlanFileError(
            f"schedule[{g}][{position}]: {text!r} does not name its stage, but the group has stages"
            f" {', '.join(map(str, group.stages[:8]))}; write {group.stages[0]}{text}"
        )
    known = group.stages[0] if stages is None else np.where(is_left_out, group.stages[0], stages)
    return pack_codes(known, KIND_OF_LETTER[order.letters], order.microbatches)


def _text(order: PackedOrder, position: int) -> str:
    stage = LEFT_OUT if order.stages is None else int(order.stages[position])
    shown = "" if stage == LEFT_OUT else str(stage)
    return f"{shown}{chr(order.letters[position])}{order.microbatches[position]}"
