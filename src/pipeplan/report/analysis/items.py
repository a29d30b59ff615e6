"""Blocks, transfers and all-reduces as arrays with one numbering.

First come the blocks, stage by stage, in the order in which they run. Then come the transfers by
channel, forward before backward, in the order in which they are sent. Then comes one all-reduce for
each stage. An *item* is any of these. Axes: N items, S stages, C channels, M microbatches.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeplan.cost import Floats, PipelineCosts
from pipeplan.simulator import Codes, Run, transfer_ends_ms

__all__ = ["ALL_REDUCE", "BACKWARD", "FORWARD", "LETTERS", "NOTHING", "Item", "Items", "make_items"]

FORWARD, BACKWARD, ALL_REDUCE = 0, 1, 2
"""The kinds of items; a transfer has the kind of the block that it serves."""
LETTERS = ("F", "B")
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
    """The number of each block, by kind, stage and microbatch."""
    transfer_number_2CM: Codes

    @property
    def first_transfer(self) -> int:
        """The number of the first transfer."""
        return 2 * self.num_microbatches * self.num_stages

    @property
    def first_all_reduce(self) -> int:
        """The number of the first all-reduce."""
        return self.first_transfer + 2 * self.num_microbatches * (self.num_stages - 1)

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

    def blocks_of(self, stage: int) -> slice:
        """The numbers of a stage's blocks."""
        return slice(2 * self.num_microbatches * stage, 2 * self.num_microbatches * (stage + 1))

    def transfers_of(self, channel: int, kind: int) -> slice:
        """The numbers of a channel's transfers in one direction."""
        first = self.first_transfer + (2 * channel + kind) * self.num_microbatches
        return slice(first, first + self.num_microbatches)

    def name_of(self, number: int) -> str:
        """An item in words: `F3 on stage 1`."""
        if number == NOTHING:
            return "the start"
        kind, place = int(self.kind_N[number]), int(self.place_N[number])
        if kind == ALL_REDUCE:
            return f"all-reduce of stage {place}"
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
    )
