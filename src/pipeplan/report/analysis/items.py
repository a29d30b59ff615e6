"""Blocks, transfers and all-reduces as arrays with one numbering.

First come the blocks, group by group, in the order in which they run; a group mostly is a stage.
Then come the transfers by channel, forward before backward, in the order in which they are sent.
Then come the all-reduces, one for each stage, or the parts of each. An *item* is any of these.
Axes: N items, G groups, S stages, C channels between neighbouring stages, M microbatches.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeplan.cost import Floats, PipelineCosts
from pipeplan.pipeline import KINDS, GroupTimeline, Kind, unpack_codes
from pipeplan.simulator import Codes, Run, transfer_ends_ms

__all__ = [
    "ALL_REDUCE",
    "BACKWARD",
    "FORWARD",
    "INPUT",
    "LETTERS",
    "NOTHING",
    "WEIGHT",
    "Item",
    "Items",
    "make_group_items",
    "make_items",
]

FORWARD, BACKWARD, ALL_REDUCE, INPUT, WEIGHT = 0, 1, 2, 3, 4
"""The kinds of items; a transfer is forward or backward, whatever made its gradient."""
LETTERS = ("F", "B", "", "I", "W")
KIND_OF_CODE = np.array([FORWARD, BACKWARD, INPUT, WEIGHT], dtype=np.int8)
NOTHING = -1
"""In place of an item's number: the item began with the iteration."""


class Item(NamedTuple):
    """One item, for those who look at few of them."""

    kind: int
    place: int
    """The stage; for a transfer the channel between stages `place` and `place + 1`."""
    microbatch: int
    """-1 for an all-reduce."""
    start_ms: float
    end_ms: float

    @property
    def length_ms(self) -> float:
        """How long it takes."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """All items of one iteration."""

    num_stages: int
    num_microbatches: int
    kind_N: NDArray[np.int8]
    place_N: Codes
    microbatch_N: Codes
    start_ms_N: Floats
    end_ms_N: Floats
    block_number_2SM: Codes
    """The number of each F, and of each B or I, by stage and microbatch."""
    transfer_number_2CM: Codes
    """`NOTHING` between stages of one group."""
    group_of_S: Codes
    first_block_G1: Codes
    """Where the blocks of each group begin; at last the number of the first transfer."""
    first_part_S1: Codes
    """Where the parts of each stage's all-reduce begin; at last the number of items."""

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return len(self.first_block_G1) - 1

    @property
    def first_transfer(self) -> int:
        """The number of the first transfer."""
        return int(self.first_block_G1[-1])

    @property
    def first_all_reduce(self) -> int:
        """The number of the first all-reduce."""
        return int(self.first_part_S1[0])

    def __len__(self) -> int:
        return len(self.kind_N)

    def __getitem__(self, number: int) -> Item:
        return Item(
            int(self.kind_N[number]),
            int(self.place_N[number]),
            int(self.microbatch_N[number]),
            float(self.start_ms_N[number]),
            float(self.end_ms_N[number]),
        )

    def blocks_of(self, group: int) -> slice:
        """The numbers of a group's blocks."""
        return slice(int(self.first_block_G1[group]), int(self.first_block_G1[group + 1]))

    def transfers_of(self, channel: int, kind: int) -> slice:
        """The numbers of a channel's transfers in one direction; none inside a group."""
        first = int(self.transfer_number_2CM[kind, channel].min())
        return slice(0, 0) if first == NOTHING else slice(first, first + self.num_microbatches)

    def stages_of(self, group: int) -> list[int]:
        """The stages of a group."""
        stages: list[int] = np.flatnonzero(self.group_of_S == group).tolist()
        return stages

    def parts_of(self, stage: int) -> slice:
        """The numbers of the parts of a stage's all-reduce."""
        return slice(int(self.first_part_S1[stage]), int(self.first_part_S1[stage + 1]))

    def reduces_of(self, group: int) -> Codes:
        """The numbers of the all-reduces of a group, or of their parts, as they run."""
        parts = [self.parts_of(stage) for stage in self.stages_of(group)]
        numbers = np.concatenate([np.arange(each.start, each.stop) for each in parts])
        order = np.lexsort((numbers, self.start_ms_N[numbers]))
        return numbers[order].astype(np.int32)

    def done_ms(self, group: int) -> float:
        """When a group has ended its last block and its last all-reduce."""
        ends_ms = [self.end_ms_N[self.blocks_of(group).stop - 1]]
        ends_ms += self.end_ms_N[self.reduces_of(group)].tolist()
        return float(max(ends_ms))

    def label_of(self, number: int) -> str:
        """A block as short as can be: `F3`, and `2F3` where its group has several stages."""
        stage = int(self.place_N[number])
        is_alone = int((self.group_of_S == self.group_of_S[stage]).sum()) == 1
        label = f"{LETTERS[int(self.kind_N[number])]}{self.microbatch_N[number]}"
        return label if is_alone else f"{stage}{label}"

    def name_of(self, number: int) -> str:
        """An item in words: `F3 on stage 1`."""
        if number == NOTHING:
            return "the start"
        kind, place = int(self.kind_N[number]), int(self.place_N[number])
        if kind == ALL_REDUCE:
            parts = self.parts_of(place)
            which = f", part {number - parts.start + 1}" if parts.stop - parts.start > 1 else ""
            return f"all-reduce of stage {place}{which}"
        block = f"{LETTERS[kind]}{self.microbatch_N[number]}"
        if number < self.first_transfer:
            return f"{block} on stage {place}"
        ends = (place, place + 1) if kind == FORWARD else (place + 1, place)
        return f"transfer of {block} from stage {ends[0]} to {ends[1]}"


def make_items(costs: PipelineCosts, run: Run) -> Items:
    """The items of a simulated iteration."""
    num_stages, num_blocks = run.order_SM2.shape
    num_channels, num_microbatches = num_stages - 1, num_blocks // 2
    codes = np.concatenate([run.order_SM2.ravel(), run.sent_C2M.ravel()])
    kind = np.concatenate([codes < 0, np.full(num_stages, ALL_REDUCE)]).astype(np.int8)
    all_stages = np.arange(num_stages, dtype=np.int32)
    place = np.concatenate(
        [
            np.repeat(all_stages, num_blocks),
            np.repeat(all_stages[:-1], num_blocks),
            all_stages,
        ]
    )
    microbatch = np.concatenate(
        [np.where(codes < 0, -1 - codes, codes), np.full(num_stages, -1, dtype=np.int32)]
    ).astype(np.int32)
    block_ends_ms = run.block_start_ms_SM2 + np.where(
        run.order_SM2 < 0, costs.backward_ms_S[:, None], costs.forward_ms_S[:, None]
    )
    transfer_end_ms_C2M = transfer_ends_ms(costs, run)
    first_transfer = num_stages * num_blocks
    first_all_reduce = first_transfer + num_channels * num_blocks
    numbers = np.arange(first_all_reduce, dtype=np.int32)
    block_number = np.empty((2, num_stages, num_microbatches), dtype=np.int32)
    transfer_number = np.empty((2, num_channels, num_microbatches), dtype=np.int32)
    blocks, transfers = slice(0, first_transfer), slice(first_transfer, first_all_reduce)
    block_number[kind[blocks], place[blocks], microbatch[blocks]] = numbers[blocks]
    transfer_number[kind[transfers], place[transfers], microbatch[transfers]] = numbers[transfers]
    return Items(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        kind_N=kind,
        place_N=place,
        microbatch_N=microbatch,
        start_ms_N=np.concatenate(
            [
                run.block_start_ms_SM2.ravel(),
                run.transfer_start_ms_C2M.ravel(),
                block_ends_ms[:, -1],
            ]
        ),
        end_ms_N=np.concatenate([block_ends_ms.ravel(), transfer_end_ms_C2M.ravel(), run.end_ms_S]),
        block_number_2SM=block_number,
        transfer_number_2CM=transfer_number,
        group_of_S=all_stages,
        first_block_G1=np.arange(num_stages + 1, dtype=np.int32) * num_blocks,
        first_part_S1=np.arange(num_stages + 1, dtype=np.int32) + first_all_reduce,
    )


def make_group_items(timeline: GroupTimeline, group_of_S: Codes, num_microbatches: int) -> Items:
    """The items of a simulated iteration with groups."""
    num_stages = len(group_of_S)
    stage_N, kind_N, microbatch_N = unpack_codes(timeline.code_N)
    sender_T, sent_kind_T, sent_T = unpack_codes(timeline.sent_T)
    is_back_T = sent_kind_T > 0
    channel_T = sender_T - is_back_T
    first_transfer = len(stage_N)
    first_all_reduce = first_transfer + len(sent_T)
    num_parts = len(timeline.part_stage_P)
    block_number = np.full((2, num_stages, num_microbatches), NOTHING, dtype=np.int32)
    passing = np.flatnonzero(kind_N != KINDS.index(Kind.WEIGHT_GRADIENT))
    place = stage_N[passing], microbatch_N[passing]
    block_number[(kind_N[passing] > 0).astype(np.int8), *place] = passing
    transfer_number = np.full((2, num_stages - 1, num_microbatches), NOTHING, dtype=np.int32)
    transfer_number[is_back_T.astype(np.int8), channel_T, sent_T] = np.arange(
        first_transfer, first_all_reduce
    )
    parts_S = np.bincount(timeline.part_stage_P, minlength=num_stages)
    return Items(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        kind_N=np.concatenate(
            [KIND_OF_CODE[kind_N], is_back_T, np.full(num_parts, ALL_REDUCE)]
        ).astype(np.int8),
        place_N=np.concatenate([stage_N, channel_T, timeline.part_stage_P]).astype(np.int32),
        microbatch_N=np.concatenate([microbatch_N, sent_T, np.full(num_parts, -1)]).astype(
            np.int32
        ),
        start_ms_N=np.concatenate(
            [timeline.block_start_ms_N, timeline.transfer_start_ms_T, timeline.part_start_ms_P]
        ),
        end_ms_N=np.concatenate(
            [timeline.block_end_ms_N, timeline.transfer_end_ms_T, timeline.part_end_ms_P]
        ),
        block_number_2SM=block_number,
        transfer_number_2CM=transfer_number,
        group_of_S=group_of_S,
        first_block_G1=timeline.first_block_G1,
        first_part_S1=(np.concatenate([[0], np.cumsum(parts_S)]) + first_all_reduce).astype(
            np.int32
        ),
    )
