"""Published orders for groups with several stages and for backwards cut in two, by their names.

The orders depend on the shape of the chain and on the number of microbatches alone, not on costs.

References:
    interleaved-1f1b: Narayanan et al. 2021 (Megatron-LM), arXiv:2104.04473, section 2.2.2. The
        chain goes round all groups several times. Microbatches go in rounds of as many as there
        are groups.
    zb-h1: Qi et al. 2023, arXiv:2401.10241, section 2.1: one stage a group; weight gradients fill
        the gaps, and no group holds more than S microbatches.
    zb-v, v-half, v-min: Qi et al. 2024, arXiv:2405.15362. The chain goes down the groups and back
        up. In half stages no group holds more than 2S, 2 * ((S + 2) // 2), 2 * ((S + 4) // 3).
    Differs: the authors give building blocks or a heuristic for the last four. Here the order is
    the best that our scheduler finds if every block takes one unit, transfers nothing, and memory
    is what the paper says.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from pipeplan import _core
from pipeplan.errors import InputError
from pipeplan.pipeline import GroupCodes, Stage, groups_of, pack_codes, unpack_codes

__all__ = [
    "GROUP_SCHEDULES",
    "WHOLE_BACKWARDS",
    "GroupRule",
    "group_orders",
    "joined_at_end",
    "orders_of_blocks",
]

GroupRule = Callable[[Sequence[int], int], list[GroupCodes]]
"""From the group of each stage and a number of microbatches to one order for each group."""

FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
NUM_RUNS = 400
"""Schedules that are tried for a published order with unit costs."""


def orders_of_blocks(
    blocks: Sequence[int], group: Sequence[int], is_split: Sequence[bool], num_microbatches: int
) -> list[GroupCodes]:
    """The order of each group, from a kernel's blocks in the order of its decisions."""
    stages_kinds, microbatches = np.divmod(np.asarray(blocks, dtype=np.int64), num_microbatches)
    stages, kinds = np.divmod(stages_kinds, 3)
    # A kernel's backward is an input gradient where the stage has weight gradients too.
    split = np.asarray(is_split, dtype=bool)[stages]
    named = np.where((kinds > 0) & split, kinds + 1, kinds)
    codes = pack_codes(stages, named, microbatches)
    groups = np.asarray(group)[stages]
    return [codes[groups == number] for number in range(max(group) + 1)]


def joined_at_end(order: GroupCodes, stage: int) -> GroupCodes:
    """The order with the stage's last input and weight gradient as one backward.

    The same order where other blocks lie between the two.
    """
    stages, kinds, microbatches = unpack_codes(order)
    own = np.flatnonzero(stages == stage)
    if len(own) < 2 or own[-2] != own[-1] - 1:
        return order
    first, last = own[-2:]
    pair = kinds[first], kinds[last]
    if pair != (INPUT, WEIGHT) or microbatches[first] != microbatches[last]:
        return order
    kinds = kinds.copy()
    kinds[first] = BACKWARD
    joined = pack_codes(stages, kinds, microbatches)
    return np.delete(joined, last)


def group_orders(name: str, stages: Sequence[Stage], num_microbatches: int) -> list[GroupCodes]:
    """The published order of that name; `InputError` if these stages have another shape."""
    group = [0] * len(stages)
    for number, each in enumerate(groups_of(stages)):
        for stage in each.stages:
            group[stage] = number
    return GROUP_SCHEDULES[name](group, num_microbatches)


def _interleaved(group: Sequence[int], num_microbatches: int) -> list[GroupCodes]:
    size = max(group) + 1
    rounds = len(group) // size
    _require_shape("interleaved-1f1b", group, list(range(size)) * rounds, "goes round all groups")
    if num_microbatches % size:
        raise InputError(
            f"schedule: interleaved-1f1b needs a multiple of {size} microbatches for {size}"
            f" groups, not {num_microbatches}; change --microbatches"
        )
    total = rounds * num_microbatches

    def block(rank: int, step: int, kind: int) -> tuple[int, int, int]:
        turn, rest = divmod(step, size * rounds)
        chunk, place = divmod(rest, size)
        if kind == BACKWARD:
            chunk = rounds - 1 - chunk
        return chunk * size + rank, kind, turn * size + place

    orders = []
    for rank in range(size):
        warm_up = min((size - rank - 1) * 2 + (rounds - 1) * size, total)
        blocks = [block(rank, step, FORWARD) for step in range(warm_up)]
        for step in range(total):
            if warm_up + step < total:
                blocks.append(block(rank, warm_up + step, FORWARD))
            blocks.append(block(rank, step, BACKWARD))
        orders.append(pack_codes(*np.array(blocks, dtype=np.int64).T))
    return orders


def _zb_h1(group: Sequence[int], num_microbatches: int) -> list[GroupCodes]:
    size = max(group) + 1
    _require_shape("zb-h1", group, list(range(size)), "has one stage a group")
    return list(_unit_orders(tuple(group), num_microbatches, size))


def _v_shaped(name: str, room: Callable[[int], int]) -> GroupRule:
    def rule(group: Sequence[int], num_microbatches: int) -> list[GroupCodes]:
        size = max(group) + 1
        shape = [*range(size), *range(size - 1, -1, -1)]
        _require_shape(name, group, shape, "goes down the groups and back up")
        return list(_unit_orders(tuple(group), num_microbatches, room(size)))

    return rule


def _require_shape(name: str, group: Sequence[int], shape: Sequence[int], words: str) -> None:
    if list(group) != list(shape):
        raise InputError(
            f"schedule: {name} needs a chain that {words}; leave out --schedule, or choose"
            f" another one"
        )


@lru_cache(maxsize=8)
def _unit_orders(
    group: tuple[int, ...], num_microbatches: int, room: int
) -> tuple[GroupCodes, ...]:
    """The best order found if every block takes one unit and a group holds `room` activations."""
    ones, zeros = [1.0] * len(group), [0.0] * len(group)
    chain = _core.Chain(
        num_microbatches=num_microbatches,
        group=group,
        forward_ms=ones,
        backward_ms=ones,
        weight_ms=ones,
        there_ms=zeros,
        back_ms=zeros,
        reduce_ms=zeros,
        is_split=[True] * len(group),
        held_bytes=ones,
        kept_bytes=ones,
        room_bytes=[float(room)] * (max(group) + 1),
    )
    _, blocks, _ = _core.schedule_chain(chain, NUM_RUNS, 0)
    return tuple(orders_of_blocks(blocks, group, [True] * len(group), num_microbatches))


GROUP_SCHEDULES: dict[str, GroupRule] = {
    "interleaved-1f1b": _interleaved,
    "zb-h1": _zb_h1,
    "zb-v": _v_shaped("zb-v", lambda size: 2 * size),
    "v-half": _v_shaped("v-half", lambda size: 2 * ((size + 2) // 2)),
    "v-min": _v_shaped("v-min", lambda size: 2 * ((size + 4) // 3)),
}
"""Each published order by its name."""
WHOLE_BACKWARDS = ("interleaved-1f1b",)
"""The orders that do not cut backwards in two."""
