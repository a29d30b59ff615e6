"""The checker refuses what is wrong, one thing at a time."""

import itertools
import math
import random
import time
from dataclasses import replace

import numpy as np
import pytest

from instances import even_model, flat_cluster, forced, random_plan, whole_samples
from one_stage import plan
from pipeplan import bound_checks, checker, zoo
from pipeplan.checker import Verdict, check, memory_excesses, replay, structural_errors
from pipeplan.cluster import Cluster, Duplex, HostGroup, expand_hosts
from pipeplan.cost import CostModel, PipelineCosts
from pipeplan.errors import ScheduleError
from pipeplan.pipeline import Block, Bound, BoundScope, Kind, Plan, Schedule, Stage
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.replaying import replay_plan
from pipeplan.schedules import schedule_guarantee_ms
from pipeplan.simulator import run_schedule


@pytest.fixture(scope="module")
def good() -> Plan:
    return plan(zoo.model("bert-large"), zoo.cluster("4x2-10g"), 6)


def with_stage(made: Plan, index: int, **changes) -> Plan:
    stages = list(made.stages)
    stages[index] = forced(stages[index], **changes)
    return replace(made, stages=tuple(stages))


def with_order(made: Plan, stage: int, order) -> Plan:
    orders = list(made.schedule)
    orders[stage] = tuple(order)
    return replace(made, schedule=Schedule(tuple(orders)))


def with_predicted(made: Plan, **changes) -> Plan:
    return replace(made, predicted=replace(made.predicted, **changes))


def swapped_forward_and_backward(made: Plan) -> Plan:
    order = list(made.schedule[0])
    backward = next(i for i, block in enumerate(order) if block.kind is Kind.BACKWARD)
    order.insert(0, order.pop(backward))
    return with_order(made, 0, order)


F, B = Kind.FORWARD, Kind.BACKWARD


def with_last(made: Plan, block: Block) -> tuple[Block, ...]:
    return (*made.schedule[2], block)


def without_links(made: Plan) -> Plan:
    count = made.cluster.num_devices
    return replace(
        made,
        cluster=Cluster(
            name="cut off",
            devices=made.cluster.devices,
            bandwidth_gb_per_s=((0.0,) * count,) * count,
        ),
    )


def deadlocked(made: Plan) -> Plan:
    """Stage 0 finishes each microbatch before the next, stage 1 starts with the last."""
    orders = [list(order) for order in made.schedule]
    orders[0].sort(key=lambda block: (block.microbatch, block.kind is Kind.BACKWARD))
    orders[1].sort(key=lambda block: (block.kind is Kind.BACKWARD, -block.microbatch))
    return replace(made, schedule=Schedule(tuple(tuple(order) for order in orders)))


WRONG = {
    "sum to": lambda made: with_stage(made, 0, shares=(0.4, 0.5)),
    "starts at": lambda made: with_stage(made, 1, layers=range(9, 14)),
    "of 26 layers": lambda made: replace(made, stages=made.stages[:-1]),
    "already serves": lambda made: with_stage(made, 1, devices=made.stages[0].devices),
    "there is no device": lambda made: with_stage(made, 1, devices=(99,)),
    "needs a path": without_links,
    "missing": lambda made: with_order(made, 2, made.schedule[2][:-1]),
    "already": lambda made: with_order(made, 2, (*made.schedule[2], made.schedule[2][0])),
    "not a block of this stage": lambda made: with_order(made, 2, made.schedule[1]),
    "stands before": swapped_forward_and_backward,
    "orders for": lambda made: replace(made, schedule=Schedule(made.schedule.orders[:-1])),
    "deadlocks": deadlocked,
    "iteration_ms": lambda made: with_predicted(made, iteration_ms=made.iteration_ms * 1.001),
    "bubble_fraction": lambda made: with_predicted(made, bubble_fraction=0.5),
    "exactly the used devices": lambda made: with_predicted(made, peak_memory_gb={}),
    "peak_memory_gb": lambda made: with_predicted(
        made, peak_memory_gb=dict.fromkeys(made.predicted.peak_memory_gb, 1.0)
    ),
    "schedule_guarantee_ms": lambda made: with_predicted(made, schedule_guarantee_ms=1.0),
    "lower_bound_ms": lambda made: with_predicted(
        made, bound=Bound(lower_bound_ms=made.iteration_ms * 2, scope=BoundScope.ANY)
    ),
    "microbatches": lambda made: forced(made, microbatches=0),
    "microbatches: 65537 is above 65536": lambda made: forced(made, microbatches=65_537),
    "stages[1].devices: there is no device -1": lambda made: with_stage(made, 1, devices=(-1,)),
    "1F0 is not a block of this stage": lambda made: with_order(made, 2, made.schedule[1]),
    "2F6 is not a block": lambda made: with_order(made, 2, with_last(made, Block(F, 2, 6))),
    "2B6 is not a block": lambda made: with_order(made, 2, with_last(made, Block(B, 2, 6))),
    "2F-1 is not a block": lambda made: with_order(made, 2, with_last(made, Block(F, 2, -1))),
    "schedule[2][12]: 2F0 stands at 0 already": lambda made: with_order(
        made, 2, (*made.schedule[2], made.schedule[2][0])
    ),
    "2B5 missing": lambda made: with_order(made, 2, made.schedule[2][:-1]),
    "2F0 and 2B0 missing": lambda made: with_order(
        made, 2, [block for block in made.schedule[2] if block.microbatch]
    ),
    "0B0 stands before 0F0": swapped_forward_and_backward,
    "nan is not above zero": lambda made: with_stage(made, 0, shares=(0.5, math.nan)),
    "9e-07..0.999999 is not within": lambda made: with_stage(made, 0, shares=(1 - 9e-7, 9e-7)),
    "0.5..1.5 is not within": lambda made: with_stage(made, 0, shares=(1.5, 0.5)),
    "sum to 1.00001": lambda made: with_stage(made, 0, shares=(0.5, 0.50001)),
}


def test_a_good_plan_is_valid(good):
    assert check(good) == Verdict(errors=(), warnings=(), stale=())
    assert check(good).ok
    assert structural_errors(good) == []


@pytest.mark.parametrize("message", WRONG)
def test_wrong_plans_are_refused(good, message):
    errors = check(WRONG[message](good)).errors
    assert any(message in error for error in errors), errors


@pytest.mark.parametrize("shares", [(0.9999988, 1.2e-6), (1 - 1e-6, 1e-6), (0.5, 0.5000000009)])
def test_shares_at_the_limits_are_fine(good, shares):
    assert structural_errors(with_stage(good, 0, shares=shares)) == []


def test_one_device_may_take_its_whole_share(good):
    whole = with_stage(good, 0, shares=(1.0,), devices=good.stages[0].devices[:1])
    assert structural_errors(whole) == []


def test_the_largest_numbers_of_microbatches_and_devices(good):
    most = structural_errors(forced(good, microbatches=65_536))
    assert most[0].startswith("schedule[0]")  # which does not hold that many, that is all
    count = good.cluster.num_devices
    assert f"there is no device {count}" in check(with_stage(good, 0, devices=(count,))).errors[0]


def test_too_much_memory_is_a_warning_unless_strict(good):
    small = replace(
        good.cluster, devices=tuple(replace(d, memory_gb=1.0) for d in good.cluster.devices)
    )
    tight = replace(good, cluster=small)
    verdict = check(tight)
    assert verdict.ok
    assert "needs" in verdict.warnings[0]
    assert not check(tight, strict_memory=True).ok


def test_recomputed_stages_keep_only_what_enters_them(good):
    """A stage that recomputes keeps its inputs in flight and one microbatch's activations."""
    recomputed = with_stage(good, 1, recompute=True)
    stage = recomputed.stages[1]
    layers = good.model.layers
    first = stage.layers.start
    parameters = sum(layers[i].parameter_bytes for i in stage.layers)
    activations = sum(layers[i].activation_bytes for i in stage.layers)
    in_flight = most = 0
    for block in good.schedule[1]:
        in_flight += 1 if block.kind is Kind.FORWARD else -1
        most = max(most, in_flight)
    optimizer = good.model.optimizer_bytes_per_parameter_byte
    expected_gb = (
        parameters * (1 + optimizer)
        + (most * layers[first - 1].output_bytes + activations) / stage.num_replicas
    ) / 1e9
    device = good.cluster.devices[stage.devices[0]].name
    messages = [e for e in check(recomputed).errors if f"peak_memory_gb['{device}']" in e]
    assert f"the replay {expected_gb:.9g}" in messages[0]


# --------------------------------------------------------------------- structure and figures


FIGURES = (
    "iteration_ms",
    "bubble_fraction",
    "exactly the used devices",
    "peak_memory_gb",
    "schedule_guarantee_ms",
    "lower_bound_ms",
)


@pytest.mark.parametrize("message", WRONG)
def test_only_figures_are_stale(good, message):
    wrong = WRONG[message](good)
    verdict = check(wrong)
    if message in FIGURES:
        assert verdict.stale == verdict.errors
        assert all(error.startswith("predicted.") for error in verdict.stale)
        assert structural_errors(wrong) == []
    else:
        assert verdict.stale == ()
        if message != "deadlocks":  # which only a run finds
            assert structural_errors(wrong) == list(verdict.errors)


def test_a_plan_without_figures_is_valid(good):
    assert check(replace(good, predicted=None)) == Verdict(errors=())


def test_only_figures_are_compared_that_are_off_by_a_millionth(good):
    for factor, is_stale in ((1 + 9e-7, False), (1 - 9e-7, False), (1 + 1.2e-6, True)):
        off = with_predicted(good, iteration_ms=good.iteration_ms * factor)
        assert bool(check(off).stale) is is_stale
    bubble = good.predicted.bubble_fraction
    assert check(with_predicted(good, bubble_fraction=bubble + 9e-7)).ok
    assert not check(with_predicted(good, bubble_fraction=bubble + 1.2e-6)).ok


@pytest.mark.parametrize("claimed", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "field", ["iteration_ms", "bubble_fraction", "schedule_guarantee_ms", "lower_bound_ms"]
)
def test_figures_that_are_no_numbers_are_stale(good, field, claimed):
    if field == "lower_bound_ms":
        bound = forced(Bound(lower_bound_ms=1.0, scope=BoundScope.ANY), lower_bound_ms=claimed)
        wrong = with_predicted(good, bound=bound)
    else:
        wrong = forced(good, predicted=forced(good.predicted, **{field: claimed}))
    assert check(wrong).stale
    assert all(f"predicted.{field}" in error for error in check(wrong).stale)


def test_memory_that_is_no_number_is_stale(good):
    peak = dict(good.predicted.peak_memory_gb)
    first = next(iter(peak))
    wrong = forced(good, predicted=forced(good.predicted, peak_memory_gb={**peak, first: math.nan}))
    assert [error.split(":")[0] for error in check(wrong).stale] == [
        f"predicted.peak_memory_gb[{first!r}]"
    ]


def test_a_bound_may_equal_the_time_but_for_rounding(good):
    for factor, is_ok in ((0.0, True), (1.0, True), (1 + 9e-7, True), (1 + 1.2e-6, False)):
        bound = Bound(lower_bound_ms=good.iteration_ms * factor, scope=BoundScope.ANY)
        assert check(with_predicted(good, bound=bound)).ok is is_ok
    negative = forced(good.predicted.bound, lower_bound_ms=-1.0)
    assert "-1 is not a finite number" in check(with_predicted(good, bound=negative)).stale[0]


def guaranteed(order: str, guarantee_ms: float) -> Plan:
    """Two stages, F takes 1, B takes 2, no transfers: three microbatches in a given order."""
    order = tuple(order.split())
    made = Plan(
        model=even_model(2, 1.0, 2.0),
        cluster=flat_cluster(2),
        microbatches=3,
        stages=tuple(Stage(layers=range(n, n + 1), devices=(n,)) for n in range(2)),
        schedule=Schedule(
            tuple(tuple(Block(Kind(b[0]), n, int(b[1:])) for b in order) for n in range(2))
        ),
        planner="hand",
    )
    figures = replay_plan(made).plan.predicted
    return replace(made, predicted=replace(figures, schedule_guarantee_ms=guarantee_ms))


def test_a_guarantee_is_the_theorem_s_number():
    # (3 + 4 * (2 - 1)) rounds of 3 ms.
    assert check(guaranteed("F0 F1 F2 B0 B1 B2", 21.0)).ok
    assert check(guaranteed("F0 F1 F2 B0 B1 B2", 20.9)).stale == (
        "predicted.schedule_guarantee_ms: says 20.9, the replay 21",
    )


def test_a_guarantee_may_be_met_to_the_digit():
    # One stage is never idle: 3 * (1 + 2) ms are 3 rounds of the bottleneck.
    made = guaranteed("F0 B0 F1 B1 F2 B2", 21.0)
    alone = replace(
        made,
        model=even_model(1, 1.0, 2.0),
        stages=made.stages[:1],
        schedule=Schedule(made.schedule.orders[:1]),
        predicted=None,
    )
    figures = replay_plan(alone).plan.predicted
    assert figures.iteration_ms == 9
    assert check(replace(alone, predicted=replace(figures, schedule_guarantee_ms=9.0))).ok


def test_a_schedule_that_breaks_the_guarantee_is_not_pe_s():
    # Each microbatch alone through five stages and back takes 5 * 3 ms. Six of them take
    # 90 ms, more than (6 + 4 * 4) rounds of 3.
    order = tuple(b for m in range(6) for b in (m, -1 - m))
    made = Plan(
        model=even_model(5, 1.0, 2.0),
        cluster=flat_cluster(5),
        microbatches=6,
        stages=tuple(Stage(layers=range(n, n + 1), devices=(n,)) for n in range(5)),
        schedule=Schedule.from_codes([order] * 5),
        planner="hand",
    )
    figures = replay_plan(made).plan.predicted
    assert figures.iteration_ms == 90
    slow = replace(made, predicted=replace(figures, schedule_guarantee_ms=66.0))
    assert check(slow).stale == (
        "predicted.schedule_guarantee_ms: 66 is broken by an iteration of 90",
    )


# ------------------------------------------------------------------------- the bound's scope


def shared(size: int, shares: tuple[float, ...] | None, scope: BoundScope) -> Plan:
    """One stage on some devices, with a bound of a scope."""
    k = 3 if shares is None else len(shares)
    made = Plan(
        model=replace(even_model(1, 1.0, 2.0), microbatch_size=size),
        cluster=flat_cluster(k),
        microbatches=1,
        stages=(Stage(layers=range(1), devices=tuple(range(k)), shares=shares),),
        schedule=Schedule.from_codes([[0, -1]]),
        planner="hand",
    )
    figures = replay_plan(made).plan.predicted
    bound = Bound(lower_bound_ms=0.5, scope=scope)
    return replace(made, predicted=replace(figures, bound=bound))


@pytest.mark.parametrize(
    ("size", "shares", "is_even"),
    [
        (3, None, True),
        (7, (1 / 3, 1 / 3, 1 / 3), True),
        (4, (0.5, 0.25, 0.25), True),  # the most even of whole samples
        (4, (0.25, 0.5, 0.25), True),  # on whichever device
        (8, (0.5, 0.25, 0.25), False),  # 3, 3 and 2 samples are more even
        (8, (0.375, 0.375, 0.25), True),
        (8, (0.375, 0.25, 0.375), True),
        (8, (0.375, 0.3125, 0.3125), False),
        (6, (0.5, 1 / 3, 1 / 6), False),
        (2, (0.5, 0.25, 0.25), False),  # more devices than samples
        (8, (0.3333, 0.3333, 0.3334), False),
        (8, (0.33333334, 0.33333333, 0.33333333), True),  # rounded
    ],
)
def test_a_bound_for_even_shares_speaks_of_even_shares_only(size, shares, is_even):
    assert check(shared(size, shares, BoundScope.ANY)).ok
    verdict = check(shared(size, shares, BoundScope.EVEN_SHARES))
    assert verdict.ok is is_even
    if not is_even:
        assert verdict.stale[0].startswith("predicted.bound_scope: 'even-shares' does not speak")
        assert "stages[0]" in verdict.stale[0]


def test_recomputation_does_not_matter_to_the_scope():
    made = shared(3, None, BoundScope.EVEN_SHARES)
    again = with_stage(made, 0, recompute=True)
    assert check(replay_plan(again).plan).ok
    assert replay_plan(again).plan.bound is made.bound


def test_planned_whole_samples_count_as_even():
    for size, k in itertools.product(range(1, 20), range(1, 8)):
        stage = Stage(layers=range(1), devices=tuple(range(k)))
        assert bound_checks.has_even_shares(whole_samples(stage, size), size)


# -------------------------------------------------------------------- numbers beyond limits


def with_layer(made: Plan, **changes) -> Plan:
    layers = (*made.model.layers[:-1], forced(made.model.layers[-1], **changes))
    return forced(made, model=forced(made.model, layers=layers))


def with_model(made: Plan, **changes) -> Plan:
    return forced(made, model=forced(made.model, **changes))


def with_device(made: Plan, **changes) -> Plan:
    devices = (*made.cluster.devices[:-1], forced(made.cluster.devices[-1], **changes))
    return forced(made, cluster=forced(made.cluster, devices=devices))


def with_matrix(made: Plan, field: str, row: int, column: int, number: float) -> Plan:
    numbers = [[1.0] * made.cluster.num_devices for _ in made.cluster.devices]
    numbers[row][column] = number
    matrix = tuple(map(tuple, numbers))
    return forced(made, cluster=forced(made.cluster, **{field: matrix}))


LIMITS = {
    "forward_ms": (1e-6, 1e12, with_layer),
    "backward_ms": (1e-6, 1e12, with_layer),
    "output_bytes": (1, 1e18, with_layer),
    "gradient_bytes": (1, 1e18, with_layer),
    "parameter_bytes": (1, 1e18, with_layer),
    "activation_bytes": (1, 1e18, with_layer),
    "input_bytes": (1, 1e18, with_model),
    "optimizer_bytes_per_parameter_byte": (0, 1e3, with_model),
    "memory_gb": (1e-6, 1e9, with_device),
    "speed": (1e-3, 1e3, with_device),
}


@pytest.mark.parametrize("field", LIMITS)
def test_numbers_beyond_the_limits_are_refused(good, field):
    low, high, change = LIMITS[field]
    for number in (0.999 * low, low, high, 1.001 * high, math.nan, math.inf, -1.0, 1e-320):
        is_fine = low <= number <= high
        errors = structural_errors(change(good, **{field: number}))
        assert not errors if is_fine else f"{field}: {number:g} is" in errors[0], number
    if field == "speed":
        assert "speed: 0 is not above zero" in structural_errors(with_device(good, speed=0.0))[0]
    else:
        assert structural_errors(change(good, **{field: 0.0})) == []


def test_a_wrong_number_is_named_by_its_path(good):
    last = good.cluster.num_devices - 1
    assert structural_errors(with_device(good, speed=1e-320))[0] == (
        f"cluster.devices[{last}].speed: 9.99989e-321 is neither 0 nor within 0.001..1000"
    )
    layer = len(good.model.layers) - 1
    assert structural_errors(with_layer(good, forward_ms=1e300))[0] == (
        f"model.layers[{layer}].forward_ms: 1e+300 is neither 0 nor within 1e-06..1e+12"
    )


@pytest.mark.parametrize("size", [0, 10**9 + 1])
def test_a_microbatch_holds_a_sensible_number_of_samples(good, size):
    errors = structural_errors(with_model(good, microbatch_size=size))
    assert f"model.microbatch_size: {size} is not within 1..1000000000" in errors
    assert structural_errors(with_model(good, microbatch_size=10**9)) == []


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [("bandwidth_gb_per_s", 1e-6, 1e9), ("latency_us", 1e-3, 1e12)],
)
def test_matrices_beyond_the_limits_are_refused(good, field, low, high):
    for number in (0.999 * low, low, high, 1.001 * high, math.nan, math.inf, -1.0):
        errors = structural_errors(with_matrix(good, field, 2, 1, number))
        if low <= number <= high:
            assert errors == []
        else:
            assert f"cluster.{field}[2][1]: {number:g} is neither 0 nor within" in errors[0]
        assert structural_errors(with_matrix(good, field, 2, 2, number)) == []  # the diagonal
    assert structural_errors(with_matrix(good, "latency_us", 2, 1, 0.0)) == []
    unused = with_matrix(good, "bandwidth_gb_per_s", *ends_of(good), 0.0)
    assert structural_errors(unused) == []


def ends_of(made: Plan) -> tuple[int, int]:
    """Devices of the first and of the last stage, which are no neighbours."""
    return made.stages[0].devices[0], made.stages[-1].devices[0]


def test_one_latency_beyond_the_limits_is_refused(good):
    for number in (1e-4, 1e13, math.nan):
        slow = forced(good, cluster=forced(good.cluster, latency_us=number))
        assert f"cluster.latency_us: {number:g} is" in structural_errors(slow)[0]


# ------------------------------------------------------------------------------------- links


def pair_plan(missing: tuple[int, int]) -> Plan:
    """Stages on devices 0 and 1, then 2 and 3, then 4; one path is missing."""
    rows = [[1.0] * 5 for _ in range(5)]
    rows[missing[0]][missing[1]] = 0.0
    return Plan(
        model=even_model(3, 1.0, 2.0),
        cluster=replace(flat_cluster(5), bandwidth_gb_per_s=tuple(map(tuple, rows))),
        microbatches=1,
        stages=(
            Stage(layers=range(1), devices=(0, 1)),
            Stage(layers=range(1, 2), devices=(2, 3)),
            Stage(layers=range(2, 3), devices=(4,)),
        ),
        schedule=Schedule.from_codes([[0, -1]] * 3),
        planner="hand",
    )


def test_paths_are_needed_within_stages_and_between_neighbours_alone():
    stage_of = [0, 0, 1, 1, 2]
    for u, v in itertools.permutations(range(5), 2):
        errors = check(pair_plan((u, v))).errors
        if abs(stage_of[u] - stage_of[v]) <= 1:
            index = min(stage_of[u], stage_of[v])
            assert errors == (
                f"stages[{index}].devices: needs a path from 'd{u}' to 'd{v}',"
                " but the cluster has none",
            )
        else:
            assert errors == ()


def unlinked(num_devices: int) -> Plan:
    """Two stages on devices without any path."""
    half = num_devices // 2
    return Plan(
        model=even_model(2, 1.0, 2.0),
        cluster=expand_hosts(
            "no links", [HostGroup(count=num_devices, devices=1)], between_hosts_gb_per_s=0.0
        ),
        microbatches=1,
        stages=(
            Stage(layers=range(1), devices=tuple(range(half))),
            Stage(layers=range(1, 2), devices=tuple(range(half, num_devices))),
        ),
        schedule=Schedule.from_codes([[0, -1]] * 2),
        planner="hand",
    )


# ------------------------------------------------------------------------- many, many messages


def test_the_checker_stops_after_a_few_hundred_messages():
    verdict = check(unlinked(1_000))
    assert len(verdict.errors) == 201
    assert len(set(verdict.errors)) == 201
    assert verdict.errors[-1] == "there are more than these 200 messages"


def test_messages_beyond_the_last_are_never_made():
    messages = checker._first_few(f"message {n}" for n in itertools.count())
    assert messages[199:] == ["message 199", "there are more than these 200 messages"]
    exactly = [f"message {n}" for n in range(200)]
    assert checker._first_few(iter(exactly)) == exactly


def test_figures_and_memory_of_many_devices_are_cut_short_too():
    made = Plan(
        model=replace(even_model(1, 1.0, 2.0), input_bytes=1e9),
        cluster=expand_hosts(
            "small", [HostGroup(count=300, devices=1, memory_gb=1e-6)], between_hosts_gb_per_s=1.0
        ),
        microbatches=1,
        stages=(Stage(layers=range(1), devices=tuple(range(300)), recompute=True),),
        schedule=Schedule.from_codes([[0, -1]]),
        planner="hand",
    )
    made = replay_plan(made).plan
    assert len(memory_excesses(made)) == 201
    memory, samples = check(made).warnings
    assert memory.startswith("stage 0 needs 0.00333 GB on 'h0d0' (1e-06 GB) (and 299 devices more)")
    assert samples.startswith("stage 0 splits samples: a device takes 0.00333 of 1;")
    wrong = with_predicted(made, peak_memory_gb=dict.fromkeys(made.predicted.peak_memory_gb, 7.0))
    assert len(check(wrong).stale) == len(check(wrong).errors) == 201
    strict = check(wrong, strict_memory=True)
    assert (len(strict.errors), strict.warnings) == (201, (samples,))


# ------------------------------------------------------------------------------------ memory


def test_memory_is_too_much_only_beyond_rounding(good):
    name, need_gb = next(iter(good.predicted.peak_memory_gb.items()))
    index = [device.name for device in good.cluster.devices].index(name)

    def excesses(limit_gb: float) -> list[str]:
        devices = list(good.cluster.devices)
        devices[index] = replace(devices[index], memory_gb=limit_gb)
        return memory_excesses(replace(good, cluster=replace(good.cluster, devices=tuple(devices))))

    assert excesses(need_gb) == excesses(need_gb * (1 - 9e-7)) == []
    (message,) = excesses(need_gb * (1 - 1.2e-6))
    assert message.startswith(f"stage 0 needs {need_gb:.3g} GB on {name!r}")


# ------------------------------------------------------------------------------------ replay


def costs_of(forward, backward, there, back, *, half=False) -> PipelineCosts:
    return PipelineCosts(
        forward_ms_S=np.array(forward, dtype=float),
        backward_ms_S=np.array(backward, dtype=float),
        send_forward_ms_C=np.array(there, dtype=float),
        send_backward_ms_C=np.array(back, dtype=float),
        all_reduce_ms_S=np.zeros(len(forward)),
        half_duplex=half,
    )


@pytest.mark.parametrize(("late_ms", "end_ms"), [(0.0, 14), (9e-10, 14), (1.2e-9, 15)])
def test_ends_within_a_billionth_of_a_millisecond_are_one_instant(late_ms, end_ms):
    # F2 of stage 0 ends at 12, B0 of stage 1 `late_ms` later; the half-duplex channel is free.
    # At one instant both wait, and the rule (0 + 3 <= 2 + 1) sends B0 first: it arrives at 13.
    # A moment later F2 has the channel already, and B0 arrives at 14.
    costs = costs_of([4, 3], [1, 4 + late_ms], [1], [1], half=True)
    orders = [[0, 1, 2, -1, -2, -3], [0, -1, 1, -2, 2, -3]]
    ends_ms = replay(costs, orders)
    assert ends_ms[0][3] == pytest.approx(end_ms, abs=1e-8)
    assert ends_ms[1].tolist()[:2] == [8, 12 + late_ms]
    run = run_schedule(costs, np.array(orders, dtype=np.int32))
    assert run.block_start_ms_SM2[0, 3] + 1 == ends_ms[0][3]


def test_ties_count_where_a_billionth_is_lost_in_rounding():
    # The same a thousand million times as long: 12e9 + 1e-9 is 12e9.
    costs = costs_of([4e9, 3e9], [1e9, 4e9], [1e9], [1e9], half=True)
    ends_ms = replay(costs, [[0, 1, 2, -1, -2, -3], [0, -1, 1, -2, 2, -3]])
    assert ends_ms[0][3] == 14e9


def test_what_follows_starts_at_the_earliest_end_of_its_instant():
    # F0 of stage 1 ends at 8, F1 of stage 0 at 8 - 4e-10: what starts then starts at the latter.
    costs = costs_of([4 - 2e-10, 3], [1, 4], [1 + 2e-10], [1])
    ends_ms = replay(costs, [[0, 1, -1, -2], [0, -1, 1, -2]])
    assert ends_ms[1][0] - 8 == pytest.approx(0, abs=1e-12)
    assert ends_ms[1][1] - 12 == pytest.approx(-4e-10, abs=1e-12)


def test_replay_of_numbers_that_are_none_ends():
    for number in (math.nan, math.inf):
        costs = costs_of([1, number], [number, 1], [number], [1], half=True)
        start = time.monotonic()
        assert len(replay(costs, [[0, 1, -1, -2], [0, 1, -1, -2]])[0]) == 4
        assert time.monotonic() - start < 1


def test_replayed_deadlocks_name_the_blocks_that_wait():
    costs = costs_of([1] * 12, [1] * 12, [0] * 11, [0] * 11)
    with pytest.raises(ScheduleError) as caught:
        replay(costs, [[0, -1, 1, -2]] * 11 + [[1, 0, -1, -2]])
    assert str(caught.value).startswith("schedule: deadlocks: stage 0 at 0B0, stage 1 at 1B0,")
    assert str(caught.value).endswith("stage 7 at 7B0 and 4 more wait for ever")
    eight = costs_of([1] * 8, [1] * 8, [0] * 7, [0] * 7)
    with pytest.raises(ScheduleError, match="stage 6 at 6B0, stage 7 at 7F1 wait for ever"):
        replay(eight, [[0, -1, 1, -2]] * 7 + [[1, 0, -1, -2]])
    with pytest.raises(ScheduleError, match="stage 0 at 0B0, stage 1 at 1F1 wait for ever"):
        replay(costs_of([1, 1], [1, 1], [0], [0]), [[0, -1, 1, -2], [1, 0, -1, -2]])


@pytest.mark.parametrize("duplex", Duplex)
def test_long_plans_are_checked_in_seconds(duplex):
    """With 64,000 blocks, nearly all of them in the queues of the channels."""
    made = replay_plan(long_plan(8, 4_000, duplex)).plan
    start = time.process_time()
    assert check(made).ok
    assert time.process_time() - start < 5


def long_plan(num_stages: int, num_microbatches: int, duplex: Duplex) -> Plan:
    """Each stage runs all forwards, then all backwards: the queues grow long."""
    order = [*range(num_microbatches), *range(-1, -1 - num_microbatches, -1)]
    return Plan(
        model=replace(
            even_model(num_stages, 1.0, 2.0),
            layers=tuple(
                replace(layer, output_bytes=3e6, gradient_bytes=3e6)
                for layer in even_model(num_stages, 1.0, 2.0).layers
            ),
        ),
        cluster=replace(flat_cluster(num_stages), duplex=duplex),
        microbatches=num_microbatches,
        stages=tuple(Stage(layers=range(n, n + 1), devices=(n,)) for n in range(num_stages)),
        schedule=Schedule.from_codes([order] * num_stages),
        planner="hand",
    )


def test_random_plans_are_valid_and_stop_being_so():
    """A random plan is valid; with two blocks of one stage swapped it is, or the order is wrong."""
    refused = 0
    for seed in range(200):
        rng = random.Random(seed)
        made = replay_plan(random_plan(rng)).plan
        assert check(made).errors == (), seed
        costs = CostModel(made.model, made.cluster).pipeline_costs(made.stages)
        longest_ms = schedule_guarantee_ms(costs, made.microbatches)
        errors = check(with_predicted(made, schedule_guarantee_ms=longest_ms)).errors
        assert all("is broken" in error for error in errors), seed  # if it is not PE's
        codes = made.schedule.to_codes()
        row = codes[rng.randrange(len(codes))]
        i, j = rng.randrange(len(row)), rng.randrange(len(row))
        row[i], row[j] = row[j], row[i]
        changed = replace(made, schedule=Schedule.from_codes(codes))
        verdict = check(changed)
        kinds = {error.split("[")[0].split(":")[0].split(".")[0] for error in verdict.errors}
        assert kinds <= {"schedule", "predicted"}
        refused += not verdict.ok
    assert refused > 50


def small_plan(forward_ms: float, parameter_bytes: float) -> Plan:
    layer = LayerProfile(
        name="a",
        forward_ms=forward_ms,
        backward_ms=forward_ms,
        output_bytes=0,
        parameter_bytes=parameter_bytes,
    )
    model = ModelProfile(name="m", microbatch_size=4, layers=(layer,))
    cluster = expand_hosts("c", [HostGroup(devices=1, speed=100.0)])
    return plan(model, cluster, 1, "1f1b")


def test_small_figures_have_to_be_right_too():
    made = small_plan(1e-6, 103)
    assert made.iteration_ms == pytest.approx(2e-8)
    assert check(made).ok
    for changes in ({"iteration_ms": 0.0}, {"peak_memory_gb": {"h0d0": 0.0}}):
        wrong = with_predicted(made, **changes)
        (message,) = check(wrong).stale
        assert message.startswith(f"predicted.{next(iter(changes))}")
        assert replay_plan(wrong).warnings
    rounded = with_predicted(made, iteration_ms=made.iteration_ms + 5e-10)
    assert check(rounded).ok


def test_shares_sum_to_one_exactly_but_for_rounding(good):
    index = next(i for i, stage in enumerate(good.stages) if stage.num_replicas == 2)
    plain = replace(good, predicted=None)
    assert check(with_stage(plain, index, shares=(0.5, 0.5 + 1e-10))).ok
    for shares in ((1.0, 1e-6), (0.5, 0.5 + 1e-8)):
        (message,) = check(with_stage(plain, index, shares=shares)).errors
        assert message.startswith(f"stages[{index}].shares: sum to 1.00000")
