"""A plan and its simulated iteration, with all that people look for in them."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeplan.cost import Floats, PipelineCosts
from pipeplan.group_costs import group_costs
from pipeplan.pipeline import GroupTimeline, Plan
from pipeplan.planning.planner.plan_bound import schedule_bound_ms
from pipeplan.replaying import Replayed, replay_plan
from pipeplan.report.analysis.bottleneck import (
    Bottleneck,
    find_bottleneck,
    find_group_bottleneck,
)
from pipeplan.report.analysis.cuts import Cut, find_cut, shifted_ms
from pipeplan.report.analysis.idle import (
    IdleTimes,
    Phase,
    Shares,
    average_shares,
    find_phases,
    idle_times,
)
from pipeplan.report.analysis.items import Items, make_group_items, make_items
from pipeplan.report.analysis.links import UsedLinks, used_links
from pipeplan.report.analysis.memory import StageMemory, group_memory, stage_memory
from pipeplan.report.analysis.shared_links import (
    SharedUse,
    costs_as_run,
    shared_use,
    shared_use_of_groups,
)
from pipeplan.report.analysis.waits import follow_back, waited_for
from pipeplan.simulator import Codes

__all__ = ["PlanAnalysis", "StageFigures", "analyse"]

MAX_CUT_ITEMS = 4_000_000
"""Items times stages; in a larger plan the cuts beside the plan's own are not simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """One stage in numbers; times are of one microbatch, but for the all-reduce.

    Where links are shared, those of transfers are means.
    """

    forward_ms: float
    backward_ms: float
    send_ms: float | None
    """To the next stage; None for the last one."""
    return_ms: float | None
    all_reduce_ms: float
    utilisation: float
    """The part of its devices' time in which they compute."""
    shares: Shares
    cut: Cut | None
    """None for the last stage, and where groups have several."""


def analyse(plan: Plan, warn: Callable[[str], None] | None = None) -> "PlanAnalysis":
    """The analysis of a plan that is run again for it; what the checker refuses is refused here.

    Figures under `predicted` that are missing or stale are replaced, and `warn` is told.
    """
    replayed = replay_plan(plan)
    if warn is not None:
        for warning in replayed.warnings:
            warn(warning)
    return PlanAnalysis(replayed)


class PlanAnalysis:
    """Each answer is worked out when it is first asked for, and then kept."""

    def __init__(self, replayed: Replayed) -> None:
        self.plan = replayed.plan
        self.cost = replayed.cost
        self.costs = replayed.costs
        self.run = replayed.run
        self.iteration_ms = self.run.iteration_ms
        self.num_stages = len(self.plan.stages)
        self.groups = self.plan.groups
        """A lane each; mostly a group is a stage."""
        self.has_groups = isinstance(self.run, GroupTimeline)
        """Whether the plan is of the second version."""
        self.num_used_devices = self.plan.num_used_devices

    def with_times(
        self, start_ms_N: Floats, end_ms_N: Floats, iteration_ms: float
    ) -> "PlanAnalysis":
        """The same plan with other times of its items, such as those of a run."""
        other = copy.copy(self)
        other.__dict__.pop("phases", None)
        other.iteration_ms = iteration_ms
        other.items = replace(self.items, start_ms_N=start_ms_N, end_ms_N=end_ms_N)
        return other

    @cached_property
    def verdict(self) -> str | None:
        """The certificate in words, and how much of the gap is the schedule's."""
        bound = self.plan.predicted.bound if self.plan.predicted else None
        if bound is None:
            return None
        if self.has_groups:
            return bound.verdict(self.iteration_ms)
        own_ms = schedule_bound_ms(self.costs, self.plan.microbatches, self.iteration_ms)
        other_plans = {"positions", "split_backward", "shard_optimizer"} & self.plan.options.keys()
        return bound.verdict(self.iteration_ms, own_ms, other_plans=bool(other_plans))

    # ------------------------------------------------------------------ items and waits

    @cached_property
    def items(self) -> Items:
        """Blocks, transfers and all-reduces."""
        if isinstance(self.run, GroupTimeline):
            group_of_S = np.zeros(self.num_stages, dtype=np.int32)
            for number, group in enumerate(self.groups):
                group_of_S[list(group.stages)] = number
            return make_group_items(self.run, group_of_S, self.plan.microbatches)
        return make_items(self.costs, self.run)

    @cached_property
    def waited_for(self) -> Codes:
        """For each item the one that it waited for; `NOTHING` if it began with the iteration."""
        return waited_for(self.items, half_duplex=self.costs.half_duplex)

    @cached_property
    def shared_use(self) -> SharedUse:
        """How busy shared links are, and which transfers slow each other there."""
        if isinstance(self.run, GroupTimeline):
            costs = group_costs(self.cost, self.plan.stages)
            return shared_use_of_groups(self.plan, costs, self.run, self.items)
        return shared_use(self.plan, self.costs, self.run.order_SM2, self.items)

    @cached_property
    def last_item(self) -> int:
        """The all-reduce that ends the iteration; where there is none, the block."""
        if isinstance(self.run, GroupTimeline):
            return int(self.items.end_ms_N.argmax())
        return self.items.first_all_reduce + int(self.run.end_ms_S.argmax())

    @cached_property
    def critical_path(self) -> Codes:
        """From the start to the end of the iteration: each item waited for the one before it."""
        return follow_back(self.waited_for, self.last_item)

    @cached_property
    def critical_shares(self) -> Shares:
        """What the critical path consists of; it has no bubble."""
        items, path = self.items, self.critical_path
        # Parts of an all-reduce begin before the block ends that they waited for.
        ends_ms = np.minimum(items.end_ms_N[path], np.append(items.start_ms_N[path[1:]], np.inf))
        lengths_ms = np.maximum(ends_ms - items.start_ms_N[path], 0.0)
        is_block, is_reduce = path < items.first_transfer, path >= items.first_all_reduce
        compute_ms = float(lengths_ms[is_block].sum())
        reduce_ms = float(lengths_ms[is_reduce].sum())
        links_ms = float(lengths_ms[~is_block & ~is_reduce].sum())
        whole_ms = compute_ms + links_ms + reduce_ms or 1.0
        return Shares(
            compute=compute_ms / whole_ms,
            communication=links_ms / whole_ms,
            all_reduce=reduce_ms / whole_ms,
            bubble=0.0,
        )

    @cached_property
    def shown_costs(self) -> PipelineCosts:
        """The costs as they turn out: where links are shared, the mean times of transfers."""
        return costs_as_run(self.costs, self.items) if self.cost.contention else self.costs

    # -------------------------------------------------------------------- idle and shares

    @cached_property
    def idle(self) -> tuple[IdleTimes, ...]:
        """For each group the times in which it does nothing."""
        return tuple(
            idle_times(self.items, self.waited_for, group, self.last_item)
            for group in range(len(self.groups))
        )

    @cached_property
    def shares(self) -> Shares:
        """Where the time of all used devices goes."""
        weights = [group.num_replicas / self.num_used_devices for group in self.groups]
        return average_shares(weights, self.stage_shares)

    @cached_property
    def stage_shares(self) -> tuple[Shares, ...]:
        """Where the time of each group's devices goes."""
        if not self.iteration_ms:  # nothing takes any time, so nothing is lost
            whole = Shares(compute=1.0, communication=0.0, all_reduce=0.0, bubble=0.0)
            return (whole,) * len(self.groups)
        shares = []
        for index, group in enumerate(self.groups):
            device_ms = self.plan.microbatches * math.fsum(
                ms
                for stage in group.stages
                for ms in self.cost.device_compute_ms(self.plan.stages[stage])
            )
            compute = device_ms / (group.num_replicas * self.iteration_ms)
            links_ms = math.fsum(self.idle[index].on_links_ms)
            communication = links_ms / self.iteration_ms
            # What is all-reduced beside computing costs no time.
            last_ms = float(self.items.end_ms_N[self.items.blocks_of(index).stop - 1])
            reduce = (self.items.done_ms(index) - last_ms) / self.iteration_ms
            shares.append(
                Shares(
                    compute=compute,
                    communication=communication,
                    all_reduce=reduce,
                    # The rest; rounding may leave a little less than nothing.
                    bubble=max(1 - compute - communication - reduce, 0.0),
                )
            )
        return tuple(shares)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Warm-up, steady and drain."""
        return find_phases(self.items, self.iteration_ms)

    # ------------------------------------------------------------------------ per stage

    @cached_property
    def device_paces(self) -> tuple[tuple[float, ...], ...]:
        """For each stage and device the part of a block in which that device computes.

        A block lasts as long as its slowest device; the others wait for it.
        """
        paces = []
        for stage in self.plan.stages:
            times_ms = self.cost.device_compute_ms(stage)
            slowest_ms = max(times_ms)
            paces.append(tuple(ms / slowest_ms if slowest_ms else 1.0 for ms in times_ms))
        return tuple(paces)

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """For each group its memory over time."""
        cluster = self.plan.cluster
        if self.has_groups:
            return tuple(
                group_memory(self.cost, self.plan, index, self.items)
                for index in range(len(self.groups))
            )
        return tuple(
            stage_memory(self.cost, cluster, stage, index, self.items)
            for index, stage in enumerate(self.plan.stages)
        )

    @cached_property
    def stages(self) -> tuple[StageFigures, ...]:
        """Each stage in numbers."""
        return tuple(self._stage_figures(index) for index in range(self.num_stages))

    def _stage_figures(self, index: int) -> StageFigures:
        costs, is_last = self.shown_costs, index == self.num_stages - 1
        return StageFigures(
            forward_ms=float(costs.forward_ms_S[index]),
            backward_ms=float(costs.backward_ms_S[index]),
            send_ms=None if is_last else float(costs.send_forward_ms_C[index]),
            return_ms=None if is_last else float(costs.send_backward_ms_C[index]),
            all_reduce_ms=float(costs.all_reduce_ms_S[index]),
            utilisation=self.stage_shares[self.group_of(index)].compute,
            shares=self.stage_shares[self.group_of(index)],
            cut=None if is_last or self.has_groups else self._cut(index),
        )

    def _cut(self, index: int) -> Cut:
        stages = self.plan.stages

        def iteration_ms(at: int) -> float | None:
            if at == stages[index].layers.stop:
                return self.iteration_ms
            run = self.run
            if isinstance(run, GroupTimeline) or len(self.items) * self.num_stages > MAX_CUT_ITEMS:
                return None
            return shifted_ms(self.cost, stages, run.order_SM2, index, at)

        return find_cut(
            self.cost, stages[index], stages[index + 1], self.plan.microbatches, iteration_ms
        )

    @cached_property
    def bottleneck(self) -> Bottleneck:
        """The busiest stage or link."""
        if self.has_groups:
            return find_group_bottleneck(
                [shares.compute for shares in self.stage_shares], self.shares, self.iteration_ms
            )
        return find_bottleneck(
            self.shown_costs, self.shares, self.plan.microbatches, self.iteration_ms
        )

    def group_of(self, stage: int) -> int:
        """The number of a stage's group."""
        return int(self.items.group_of_S[stage])

    @cached_property
    def has_speeds(self) -> bool:
        """Whether the devices of the cluster differ in speed."""
        return len({device.speed for device in self.plan.cluster.devices}) > 1

    # ---------------------------------------------------------------------------- links

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """For each device of the cluster the number of its host in `hosts`."""
        number_of = {host: number for number, host in enumerate(self.hosts)}
        return tuple(number_of[device.host] for device in self.plan.cluster.devices)

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the cluster, in the order of their first device."""
        return tuple(dict.fromkeys(device.host for device in self.plan.cluster.devices))

    def links(self, *, between_hosts: bool = False, most: int | None = None) -> UsedLinks:
        """What the used links carry, or the `most` busiest of them."""
        place_of = self.host_of if between_hosts else range(self.plan.cluster.num_devices)
        return used_links(self.plan, self.cost, self.iteration_ms, place_of, most)
