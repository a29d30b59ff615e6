"""Chains for problems whose limits no regular chain keeps: drawn at random, within the limits.

Groups are runs of a device order that has the devices asked for at its ends. The chain goes along
them once, and back to the first one where both ends are asked for on one device. Further stages
come beside a stage of their own group, which needs no path, or anywhere.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from pipeplan import _core
from pipeplan.cost import CostModel
from pipeplan.planning.limits import Limits
from pipeplan.planning.planner.chain_starts import ends_by_memory, even_ends, orders_of
from pipeplan.planning.planner.starts import with_ends
from pipeplan.planning.problem import Problem

__all__ = ["ranked_chains"]

ROUNDS, CHAINS_A_ROUND = 6, 500
MORE_STAGES = 3
"""Half of the chains may have so many stages more than they need."""


def ranked_chains(
    model: _core.ChainModel,
    problem: Problem,
    chains: list[_core.ChainPlan],
    *,
    most: int,
    drawn_kinds: Sequence[bool] = (),
) -> list[_core.ChainPlan]:
    """The fastest of the chains that keep the limits; where none does, the same of drawn ones.

    Those have cut backwards, whole ones or both, as `drawn_kinds` say.
    """
    rng = random.Random(problem.seed)
    for _ in range(1 + ROUNDS):
        ranked = _core.rank_chains(model, chains, most, problem.num_threads, problem.deadline)
        if ranked or not drawn_kinds or time.monotonic() >= problem.deadline:
            return ranked
        chains = _draw_chains(model, problem, drawn_kinds, rng)
    return []


def _draw_chains(
    model: _core.ChainModel, problem: Problem, kinds: Sequence[bool], rng: random.Random
) -> list[_core.ChainPlan]:
    cost, orders = problem.cost, orders_of(problem.cost)
    num_layers, max_positions = len(cost.forward_ms_L), problem.options.max_positions
    chains = []
    for _ in range(CHAINS_A_ROUND):
        limits = _draw_limits(problem.limits, rng)
        devices = _draw_groups(cost, orders, limits, rng)
        group = _draw_group_of_stages(len(devices), num_layers, limits, max_positions, rng)
        if group is None:
            continue
        end_layer = _draw_ends(cost, [devices[g] for g in group], rng)
        chains += [
            _core.ChainPlan(
                model, devices=devices, group=group, end_layer=end_layer, is_split=is_split
            )
            for is_split in kinds
        ]
    return chains


def _draw_limits(limits: Limits, rng: random.Random) -> Limits:
    """The limits; where one end is free, it may be on the device of the other one."""
    ends = {limits.first_on, limits.last_on} - {None}
    if len(ends) != 1 or rng.random() < 0.5:
        return limits
    (device,) = ends
    return replace(limits, first_on=device, last_on=device)


def _draw_groups(
    cost: CostModel, orders: Sequence[tuple[int, ...]], limits: Limits, rng: random.Random
) -> list[list[int]]:
    """Runs of an order, of which some devices are left out, but never those asked for."""
    order = list(rng.choice(orders))
    if rng.random() < 0.5:
        rng.shuffle(order)
    asked = {limits.first_on, limits.last_on} - {None}
    others = [u for u in order if u not in asked]
    num_used = rng.randint(max(1, len(asked)), len(asked) + len(others))
    kept = set(rng.sample(others, num_used - len(asked)))
    used = with_ends(tuple(u for u in others if u in kept), limits)
    cuts = sorted(rng.sample(range(1, num_used), rng.randint(0, num_used - 1)))
    runs = [list(used[a:b]) for a, b in pairwise([0, *cuts, num_used])]
    most = cost.max_replicas
    return [run if len(run) <= most else [*run[: most - 1], run[-1]] for run in runs]


def _draw_group_of_stages(
    num_groups: int, num_layers: int, limits: Limits, max_positions: int, rng: random.Random
) -> list[int] | None:
    """Which group serves each stage; None if so many groups cannot keep the limits."""
    chain = list(range(num_groups))
    if limits.first_on is not None and limits.first_on == limits.last_on and num_groups > 1:
        chain.append(0)
    possible = min(num_layers, num_groups * max_positions)
    most = possible if limits.max_stages is None else min(possible, limits.max_stages)
    least = max(limits.min_stages, len(chain))
    if least > most or chain.count(0) > max_positions:
        return None
    goal = least if rng.random() < 0.5 else rng.randint(least, min(most, least + MORE_STAGES))
    while len(chain) < goal:
        group = rng.choice([g for g in range(num_groups) if chain.count(g) < max_positions])
        beside = chain.index(group) + rng.randint(0, 1)
        is_inner = len(chain) > 1 and rng.random() < 0.5
        chain.insert(rng.randint(1, len(chain) - 1) if is_inner else beside, group)
    return chain


def _draw_ends(cost: CostModel, sets: Sequence[Sequence[int]], rng: random.Random) -> list[int]:
    """One past the last layer of each stage: by work, by memory, or anywhere."""
    way = rng.randrange(3)
    if way < 2:
        return (even_ends, ends_by_memory)[way](cost, sets)
    num_layers = len(cost.forward_ms_L)
    return [*sorted(rng.sample(range(1, num_layers), len(sets) - 1)), num_layers]
