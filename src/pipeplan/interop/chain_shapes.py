"""How a plan's stages are spread over its groups, and what other programs make of that.

::

    loop   stages 0 1 2 3 4 5 on groups 0 1 2 0 1 2     stage i on rank i % P
    V      stages 0 1 2 3 4 5 on groups 0 1 2 2 1 0     down the ranks and back up

With one stage a group, a chain is a loop of one round. Other programs place stages by these rules
themselves, so they cannot run other chains.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeplan.errors import InputError
from pipeplan.group_schedules import group_orders
from pipeplan.interop.exported import CannotExport
from pipeplan.pipeline import GroupCodes, Plan, pack_codes, unpack_codes
from pipeplan.schedules import fixed_codes

__all__ = [
    "INTERLEAVED",
    "chain_of",
    "chain_text",
    "has_1f1b_order",
    "is_loop",
    "is_v",
    "require_1f1b",
    "whole_backwards",
]

INTERLEAVED = "interleaved-1f1b"
FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
"""Kinds as numbers, as in `pipeline.KINDS`."""


def chain_of(plan: Plan) -> list[int]:
    """The group of each stage."""
    chain = [0] * plan.num_stages
    for number, group in enumerate(plan.groups):
        for stage in group.stages:
            chain[stage] = number
    return chain


def chain_text(chain: Sequence[int]) -> str:
    """The groups of the first stages, for messages."""
    return " ".join(map(str, chain[:24])) + (" ..." if len(chain) > 24 else "")


def is_loop(chain: Sequence[int]) -> bool:
    """Whether the chain goes round all groups, once or several times."""
    size = max(chain) + 1
    return len(chain) % size == 0 and all(group == n % size for n, group in enumerate(chain))


def is_v(chain: Sequence[int]) -> bool:
    """Whether the chain goes down the groups and back up."""
    size = max(chain) + 1
    return list(chain) == [*range(size), *range(size - 1, -1, -1)]


def whole_backwards(plan: Plan) -> list[GroupCodes]:
    """The order of each group with a backward for each input gradient, and no weight gradients."""
    orders = []
    for group in range(len(plan.groups)):
        stages, kinds, microbatches = unpack_codes(plan.schedule.group_codes(group))
        kept = kinds != WEIGHT
        kinds = np.where(kinds == INPUT, BACKWARD, kinds)
        orders.append(pack_codes(stages[kept], kinds[kept], microbatches[kept]))
    return orders


def has_1f1b_order(plan: Plan) -> bool:
    """Whether a plan runs 1F1B: stage n begins with S - n forwards, then B and F in turn.

    With several stages a group, it has to be the interleaved form. What microbatches are called
    does not matter.
    """
    if not is_loop(chain_of(plan)):
        return False
    num_groups = len(plan.groups)
    if num_groups < plan.num_stages:
        try:
            expected = group_orders(INTERLEAVED, plan.stages, plan.microbatches)
        except InputError:  # not a multiple of the groups
            return False
    else:
        warm_ups = [num_groups - group for group in range(num_groups)]
        codes = fixed_codes(warm_ups, plan.microbatches)
        expected = [_group_codes(codes[group], group) for group in range(num_groups)]
    return all(
        np.array_equal(one, other) for one, other in zip(_renamed(plan), expected, strict=True)
    )


def _group_codes(codes: NDArray[np.int32], stage: int) -> GroupCodes:
    """Codes of one stage, -1 - m for backwards, as codes of a group."""
    is_forward = codes >= 0
    microbatches = np.where(is_forward, codes, -1 - codes).astype(np.int64)
    kinds = np.where(is_forward, FORWARD, BACKWARD).astype(np.int64)
    return pack_codes(np.full_like(microbatches, stage), kinds, microbatches)


def _renamed(plan: Plan) -> list[GroupCodes]:
    """The order of each group, microbatches numbered as stage 0 runs their forwards."""
    first = unpack_codes(plan.schedule.group_codes(0))
    forwards = first[2][(first[0] == 0) & (first[1] == FORWARD)]
    number = np.empty(plan.microbatches, dtype=np.int64)
    number[forwards] = np.arange(plan.microbatches)
    renamed = []
    for group in range(len(plan.groups)):
        stages, kinds, microbatches = unpack_codes(plan.schedule.group_codes(group))
        renamed.append(pack_codes(stages, kinds, number[microbatches]))
    return renamed


def require_1f1b(plan: Plan, framework: str) -> None:
    """Refuse a chain or an order that a framework does not run."""
    chain = chain_of(plan)
    if not is_loop(chain):
        raise CannotExport(
            f"stages lie on groups {chain_text(chain)}, and {framework} puts stage i on rank"
            f" i % {max(chain) + 1}"
        )
    if any(
        kind in (INPUT, WEIGHT)
        for group in range(len(plan.groups))
        for kind in set(unpack_codes(plan.schedule.group_codes(group))[1].tolist())
    ):
        raise CannotExport(f"backwards are cut in two, which {framework} does not do")
    num_groups = len(plan.groups)
    if num_groups < plan.num_stages:
        if num_groups == 1:
            raise CannotExport("one group has several stages, which need a pipeline of two or more")
        if plan.microbatches % num_groups:
            raise CannotExport(
                f"{plan.microbatches} microbatches are no multiple of the {num_groups} groups, as"
                f" {framework}'s interleaved 1F1B needs"
            )
    if not has_1f1b_order(plan):
        form = "1F1B" if num_groups == plan.num_stages else "interleaved 1F1B"
        raise CannotExport(f"the order of blocks is not {form}, the only one that {framework} runs")
