from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

class DeadlineError(Exception):
    """The kernel's deadline has passed."""

class PipelineCosts:
    """The times of blocks, transfers and all-reduces; there is one channel less than stages."""

    def __init__(
        self,
        forward_ms: Floats,
        backward_ms: Floats,
        send_forward_ms: Floats,
        send_backward_ms: Floats,
        all_reduce_ms: Floats,
        half_duplex: bool,
        caps: Sequence[int] = ...,
        flows: PlanFlows | None = ...,
    ) -> None:
        """`caps` has the most microbatches that each stage may hold; without them, all.

        With flows, they decide the times of transfers and all-reduces.
        """
    @property
    def num_stages(self) -> int: ...

class SharedLinks:
    """Links that several devices share; `host_of` has the host of each device."""

    def __init__(
        self,
        *,
        members: Sequence[Sequence[int]],
        out_bytes_per_ms: Sequence[float],
        in_bytes_per_ms: Sequence[float],
        host_of: Sequence[int],
        out_latency_ms: Sequence[float] = ...,
        in_latency_ms: Sequence[float] = ...,
    ) -> None:
        """Latencies are the least of any flow that uses a side of the link."""

class PlanFlows:
    """What every transfer and all-reduce of a plan sends between which devices."""

    def __init__(
        self,
        *,
        instance: Instance,
        end_layer: Sequence[int],
        devices: Sequence[Sequence[int]],
        shares: Sequence[Sequence[float]],
    ) -> None: ...
    def groups(self) -> list[tuple[int, int, float, float, list[int]]]:
        """Of equal flows: their transfer, number, limit (bytes per ms), bytes, sides of links.

        Side 2l is what the members of shared link l send, 2l + 1 what they receive.
        """
    def num_simulated(self) -> int:
        """How many of these groups are left where those that are equal by symmetry are one."""
    def longest_ms(self, half_duplex: bool) -> list[float]:
        """The most that each can take: 2c and 2c + 1 of channel c, then the stages' rings."""

class GroupFlows:
    """What is sent between which devices in a plan with groups."""

    def __init__(
        self,
        *,
        instance: Instance,
        end_layer: Sequence[int],
        devices: Sequence[Sequence[int]],
        shares: Sequence[Sequence[float]],
        group_of: Sequence[int],
        num_parts: Sequence[int],
    ) -> None: ...
    def groups(self) -> list[tuple[int, int, float, float, list[int]]]:
        """As `PlanFlows.groups`."""

class GroupCosts:
    """The times of a plan with groups: of F, B, I and W of each stage, and of what is sent.

    Sends: forward and backward over each cut, then a part of each stage's all-reduce. I and W are
    NaN where a backward cannot be cut in two. A stage on one device has no parts.
    """

    def __init__(
        self,
        *,
        group_of: Sequence[int],
        length_ms: Floats,
        recompute_ms: Floats,
        send_ms: Floats,
        num_parts: Sequence[int],
        half_duplex: bool,
        flows: GroupFlows | None = ...,
    ) -> None:
        """With flows, they decide the times of what is sent."""
    @property
    def num_groups(self) -> int: ...
    @property
    def num_stages(self) -> int: ...

class PlanLimits:
    """What plans have to keep; devices by their index, -1 for none."""

    def __init__(
        self,
        *,
        whole_samples: bool = False,
        may_recompute: bool = False,
        memory_bytes: Sequence[float] = ...,
        state_bytes_per_parameter_byte: float = 1.0,
        input_bytes: float = 0.0,
        min_stages: int = 1,
        max_stages: int = ...,
        first_device: int = -1,
        last_device: int = -1,
        any_shares: bool = False,
    ) -> None:
        """Without `memory_bytes`, one number a device, memory does not count.

        `any_shares`: planning also shares by speed, and bounds hold for plans with any shares.
        """

class Instance:
    """A chain of layers, and devices in the order that the caller chose."""

    def __init__(
        self,
        *,
        forward_ms: Floats,
        backward_ms: Floats,
        output_bytes: Floats,
        gradient_bytes: Floats,
        parameter_bytes: Floats,
        speed: Floats,
        bytes_per_ms: Floats,
        latency_ms: Floats,
        half_duplex: bool,
        num_microbatches: int,
        microbatch_size: int,
        max_replicas: int,
        host_of: Sequence[int] = ...,
        inside_bytes_per_ms: Sequence[float] = ...,
        activation_bytes: Sequence[float] = ...,
        limits: PlanLimits | None = None,
        shared: SharedLinks | None = ...,
        sizes: Sequence[float] = ...,
        forward_at: Sequence[float] = ...,
        backward_at: Sequence[float] = ...,
    ) -> None:
        """Links are full matrices, or one number each.

        Where `host_of` has the host of each device, the rates inside the hosts are apart. With
        `sizes` of microbatches, rising, there is a time of each layer at each of them.
        """
    def on_devices(self, order: Sequence[int]) -> Instance:
        """The same with these devices only, in this order."""
    def shares(
        self, devices: Sequence[int], first_layer: int, end_layer: int, mode: int = 0
    ) -> list[float]:
        """The share of a microbatch that each device of a stage takes."""
    def with_layers(
        self,
        *,
        forward_ms: Floats,
        backward_ms: Floats,
        output_bytes: Floats,
        gradient_bytes: Floats,
        parameter_bytes: Floats,
        activation_bytes: Sequence[float] = ...,
        sizes: Sequence[float] = ...,
        forward_at: Sequence[float] = ...,
        backward_at: Sequence[float] = ...,
    ) -> Instance:
        """Another model on the same devices."""
    @property
    def has_equal_devices(self) -> bool:
        """Whether all devices are alike: speed, memory, links, and none has to serve a stage."""
    @property
    def any_shares(self) -> bool:
        """Whether devices of different speed may have different shares."""
    @property
    def num_layers(self) -> int: ...
    @property
    def num_devices(self) -> int: ...

class PlacedPlan:
    """The stages of a plan: for each the end of its layers, and its devices."""

    def __init__(
        self,
        instance: Instance,
        end_layer: Sequence[int],
        devices: Sequence[Sequence[int]],
        modes: Sequence[int] = ...,
    ) -> None: ...
    @property
    def end_layer(self) -> list[int]: ...
    @property
    def devices(self) -> list[list[int]]: ...
    @property
    def modes(self) -> list[int]:
        """For each stage 1 if it recomputes its activations, else 0."""

Trace = tuple[Ints, Floats, Ints, Floats, Ints, Floats, Floats | None, Floats | None]
"""order [S, 2M], block_start_ms [S, 2M], sent [C, 2, M], transfer_start_ms [C, 2, M],
blocks_done [S], stage_end_ms [S]; with flows transfer_end_ms [C, 2, M] and
all_reduce_end_ms [S]. `sent` and `order` hold codes: m is F(m), -1 - m is B(m)."""

def device_classes(instance: Instance) -> list[int]:
    """For each device the number of its class; devices of a class can be exchanged."""

def caps(instance: Instance, plan: PlacedPlan) -> list[int]:
    """The most microbatches that each stage may hold; [] if the plan is not possible."""

def run_schedule(costs: PipelineCosts, codes: Ints, deadline: float = ...) -> Trace: ...
def rate_changes(costs: PipelineCosts, codes: Ints) -> tuple[Floats, Ints, Floats]:
    """When which group of flows gets which rate, in bytes per ms; 0: its flows have ended."""

def run_list(costs: PipelineCosts, num_microbatches: int, preference: int, caps: Ints) -> Trace: ...
def plan_bound(costs: PipelineCosts, num_microbatches: int, caps: Ints) -> float: ...
def best_schedule(
    costs: PipelineCosts,
    num_microbatches: int,
    limit_ms: float,
    num_deadlines: int,
    deadline: float = ...,
) -> tuple[float, float, Ints]:
    """A lower bound on all schedules up to the limit, and the time and codes of a schedule.

    The limit and no rows if no schedule below the limit is found.
    """

def min_cut(weights: Floats, deadline: float = ...) -> tuple[float, NDArray[np.uint8]]: ...
def least_sum(
    stage_ms: Floats, sizes: Ints, num_devices: int, limit_ms: float, deadline: float = ...
) -> tuple[float, list[int], list[int]]:
    """The least sum of stage times; for each stage the end of its layers, and its size."""

def partition(
    instance: Instance, max_stages: int, limit_ms: float, num_threads: int, deadline: float = ...
) -> list[tuple[float, PlacedPlan]]:
    """For each number of stages the least bottleneck and its plan, if it is within the limit."""

def plan_on_order(
    instance: Instance,
    sizes: Ints,
    capacity: int,
    limit_ms: float,
    num_best: int,
    num_threads: int,
    deadline: float = ...,
    unit: int = 1,
) -> tuple[float, list[PlacedPlan]]:
    """The least bound and the best plans; stages take whole units of so many devices."""

def fits_on_order(instance: Instance, sizes: Ints, deadline: float = ...) -> bool:
    """Whether all layers fit on neighbours of the order, if each stage holds one microbatch."""

def plan_on_sets(
    instance: Instance,
    class_of: Sequence[int],
    capacity: int,
    limit_ms: float,
    num_best: int,
    num_threads: int,
    deadline: float = ...,
) -> tuple[float, list[PlacedPlan]]: ...
def prove_on_sets(
    instance: Instance,
    class_of: Sequence[int],
    capacity: int,
    limit_ms: float,
    num_best: int,
    steps: float,
    num_threads: int,
    deadline: float = ...,
) -> tuple[float, list[PlacedPlan], list[tuple[float, PlacedPlan, Ints]]]:
    """As `plan_on_sets`, and single plans are looked at; also a faster plan with its schedule."""

def price_bound(
    instance: Instance,
    proved_ms: float,
    limit_ms: float,
    steps: float,
    deadline: float = ...,
) -> float:
    """A lower bound by prices of devices, between a known bound and the time of a known plan."""

def prove_on_near_sets(
    instance: Instance,
    capacity: int,
    proved_ms: float,
    limit_ms: float,
    dp_steps: float,
    steps: float,
    num_threads: int,
    deadline: float = ...,
) -> tuple[float, list[PlacedPlan], list[tuple[float, PlacedPlan, Ints]]]:
    """As `prove_on_sets`, where only small sets of devices are known; without other plans."""

def relaxed_bound(
    instance: Instance,
    buckets: Ints,
    capacity: int,
    limit_ms: float,
    num_threads: int,
    deadline: float = ...,
    max_levels: int = 1024,
) -> float:
    """A lower bound on the time of all plans; link rates form at most `max_levels` groups."""

def rule_times(instance: Instance, plan: PlacedPlan, worth_ms: float) -> list[float]:
    """The time under each schedule of the portfolio; [] if a path is missing."""

def judge_plan(
    instance: Instance, plan: PlacedPlan, best_ms: float, worth_ms: float, deadline: float = ...
) -> tuple[float, list[float]]:
    """A time to rank a plan by, and its times under the schedules that were simulated in full."""

def local_search(
    instance: Instance,
    starts: list[PlacedPlan],
    seed: int,
    budget: float,
    target_ms: float,
    num_threads: int,
    deadline: float = ...,
    known_ms: float = ...,
    hottest: float = ...,
    overflow_price: float = ...,
) -> list[tuple[float, int, PlacedPlan]]: ...
def run_groups(
    costs: GroupCosts, num_microbatches: int, codes: NDArray[np.int64], sizes: Sequence[int]
) -> tuple[Floats, Floats, NDArray[np.int64], Floats, Floats, Ints, Ints, Floats, Floats, Ints]:
    """One iteration of any plan; `sizes` says how many of the codes each group has.

    Starts and ends of blocks, as coded; what was sent, its starts and ends; stages, numbers, starts
    and ends of parts of all-reduces; how many blocks each group has run: fewer than it has, if the
    orders deadlock.
    """

def group_rate_changes(
    costs: GroupCosts, num_microbatches: int, codes: NDArray[np.int64], sizes: Sequence[int]
) -> tuple[Floats, Ints, Floats]:
    """As `rate_changes`."""

def group_time(
    costs: GroupCosts, num_microbatches: int, codes: NDArray[np.int64], sizes: Sequence[int]
) -> float:
    """The iteration time alone, infinite where the orders deadlock.

    With full duplex and no shared links about ten times as fast.
    """

class Chain:
    """What a chain of stages on groups costs; lists by stage, `room_bytes` by group."""

    def __init__(
        self,
        *,
        num_microbatches: int,
        group: Sequence[int],
        forward_ms: Sequence[float],
        backward_ms: Sequence[float],
        weight_ms: Sequence[float],
        there_ms: Sequence[float],
        back_ms: Sequence[float],
        reduce_ms: Sequence[float],
        is_split: Sequence[bool],
        held_bytes: Sequence[float],
        kept_bytes: Sequence[float],
        room_bytes: Sequence[float],
        half_duplex: bool = ...,
        early_ms: Sequence[float] = ...,
        last_part_ms: Sequence[float] = ...,
    ) -> None:
        """Where a stage is split, `backward_ms` is that of its input gradient.

        An all-reduce in parts may begin `early_ms` before the end of the stage's last block, and
        needs at least `last_part_ms` after it.
        """

class ChainModel:
    """An instance, and what plans on groups need to know beside it."""

    def __init__(
        self,
        *,
        instance: Instance,
        weight_ms: Sequence[float],
        input_ms: Sequence[float],
        kept_bytes: Sequence[float],
        max_positions: int,
        shards_optimizer: bool = ...,
    ) -> None:
        """By layer the two parts of backwards, and what is kept between them; empty: whole."""

class ChainPlan:
    """Groups of devices, and for each stage its group and one past its last layer."""

    def __init__(
        self,
        model: ChainModel,
        *,
        devices: Sequence[Sequence[int]],
        group: Sequence[int],
        end_layer: Sequence[int],
        is_split: bool,
    ) -> None: ...
    @property
    def devices(self) -> list[list[int]]: ...
    @property
    def group(self) -> list[int]: ...
    @property
    def end_layer(self) -> list[int]: ...
    @property
    def is_split(self) -> bool: ...

def chain_bound(chain: Chain) -> float:
    """A time that no schedule of the chain beats."""

def cost_chain(model: ChainModel, plan: ChainPlan) -> Chain | None:
    """The chain of a plan; None if a path is missing, memory is short or a limit is broken."""

def schedule_chain(
    chain: Chain, num_runs: int, seed: int, deadline: float = ...
) -> tuple[float, list[int], int]:
    """The best of so many schedules: its time, its blocks in the order of decisions, runs made.

    Block k is microbatch k % M; k // M is 3 times its stage, plus 0 for a forward, 1 for a backward
    or an input gradient, 2 for a weight gradient.
    """

def rank_chains(
    model: ChainModel,
    starts: Sequence[ChainPlan],
    most: int,
    num_threads: int,
    deadline: float = ...,
) -> list[ChainPlan]:
    """The plans that are possible, by the time of their list schedules; at most so many."""

def search_chains(
    model: ChainModel,
    starts: Sequence[ChainPlan],
    seed: int,
    num_starts: int,
    anneal: float,
    polish: float,
    num_best: int,
    num_threads: int,
    deadline: float = ...,
) -> list[tuple[float, list[int], ChainPlan, list[int]]]:
    """The best plans near the starts: time, parts of the all-reduces, plan, blocks as above."""
