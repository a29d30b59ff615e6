"""Transfers on shared links: three replays agree, and every sharing is fair."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

import naive_flows
from pipeplan import _core
from pipeplan.cluster import HostGroup, expand_hosts
from pipeplan.cost import CostModel
from pipeplan.pipeline import Plan, Stage
from pipeplan.plain_flows import longest_times, replay_flows
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.schedules import run_pe, schedule_guarantee_ms
from pipeplan.simulator import Preference, run_plan, timeline_of
from shared_plans import extreme_plan, half_symmetric_plan, random_plan, symmetric_plan

COUNTS = [pytest.param(250, id="some"), pytest.param(6000, id="many", marks=pytest.mark.full)]
ALIKE = {"rel": 1e-9, "abs": 1e-9}
PLANS = [
    pytest.param(random_plan, id="any"),
    pytest.param(symmetric_plan, id="symmetric"),
    pytest.param(half_symmetric_plan, id="half symmetric"),
    pytest.param(extreme_plan, id="extreme"),
]


@pytest.mark.parametrize("make_plan", PLANS)
@pytest.mark.parametrize("count", COUNTS)
def test_three_replays_agree(count, make_plan):
    """The simulator, the checker's replay, and one that shares no code with either."""
    for seed in range(count):
        plan = make_plan(seed)
        costs, run = run_plan(plan)
        ends = timeline_of(costs, run).block_end_ms_SM2.tolist()
        naive = naive_flows.NaiveReplay(plan).run()
        checked = replay_flows(plan, costs)
        for block_ends, ring_ends in ((naive.block_ends, naive.ring_ends), checked):
            assert run.end_ms_S.tolist() == pytest.approx(ring_ends, **ALIKE), seed
            for mine, theirs in zip(ends, block_ends, strict=True):
                assert mine == pytest.approx(list(theirs), **ALIKE), seed


class FairJudge(naive_flows.Judge):
    """No link above its capacity; who is below its limit is fastest on a full link."""

    def __call__(self, replay: naive_flows.NaiveReplay) -> None:
        super().__call__(replay)
        flows = [(each.rate, each.limit, replay.sides(each), 1) for each in replay.under_way()]
        require_fair(flows, replay.capacity)


def require_fair(flows, capacity) -> None:
    """`flows` have a rate, a limit, the sides that they use, and a number."""
    used, fastest = defaultdict(float), defaultdict(float)
    for rate, limit, sides, count in flows:
        assert 0 < rate <= limit * (1 + 1e-9)
        for side in sides:
            used[side] += count * rate
            fastest[side] = max(fastest[side], rate)
    assert all(used[side] <= capacity(side) * (1 + 1e-9) for side in used)
    for rate, limit, sides, _ in flows:
        assert rate >= limit * (1 - 1e-9) or any(
            used[side] >= capacity(side) * (1 - 1e-9) and fastest[side] <= rate * (1 + 1e-9)
            for side in sides
        )


@pytest.mark.parametrize("make_plan", PLANS)
@pytest.mark.parametrize("count", COUNTS)
def test_every_sharing_is_fair(count, make_plan):
    """In the naive replay, and in what the simulator records of itself."""
    sharings = 0
    for seed in range(count // 2):
        plan = make_plan(seed)
        judge = FairJudge()
        naive_flows.NaiveReplay(plan, judge).run()
        sharings += judge.seen
        judge_simulator(plan)
    assert sharings > count


def judge_simulator(plan: Plan) -> None:
    """Every sharing that the simulator records is fair, and every flow carries its bytes."""
    costs, run = run_plan(plan)
    groups = costs.flows.groups()
    links = plan.cluster.links
    capacity = [1e6 * rate for link in links for rate in (link.out_gb_per_s, link.in_gb_per_s)]
    times, changed, rates = _core.rate_changes(costs.for_kernels(), run.order_SM2)
    # An instant is 1e-9 ms long; around 1e7 ms the next number is further away than that.
    assert (np.diff(times) >= -1e-9 - np.spacing(times[1:])).all()
    under_way: dict[int, tuple[float, float]] = {}  # rate, and since when
    carried = defaultdict(float)
    num_ended = defaultdict(int)
    for index, (ms, group, rate) in enumerate(zip(times, changed, rates, strict=True)):
        if group in under_way:
            before, since_ms = under_way.pop(group)
            carried[group] += before * (ms - since_ms)
        if rate > 0:
            under_way[group] = rate, ms
        else:
            num_ended[group] += 1
        if index + 1 == len(times) or times[index + 1] > ms + 1e-9:
            flows = [
                (rate, groups[each][2], groups[each][4], groups[each][1])
                for each, (rate, _) in under_way.items()
            ]
            require_fair(flows, capacity.__getitem__)
    assert not under_way
    num_lanes = 2 * (len(plan.stages) - 1)
    instant_ms = 1e-9 + 1e-15 * max(times, default=0.0)  # nothing is told apart within it
    for group, (transfer, _, limit, num_bytes, _) in enumerate(groups):
        times_sent = plan.microbatches if transfer < num_lanes else 1
        assert num_ended[group] == times_sent
        carried_each = carried[group] / times_sent
        assert carried_each == pytest.approx(num_bytes, rel=1e-6, abs=2 * instant_ms * limit)


@pytest.mark.parametrize("count", COUNTS)
def test_guarantee_of_pe_and_least_times_hold(count):
    for seed in range(count):
        plan = random_plan(seed, Preference.UNIT_PIPELINE)
        costs = CostModel(plan.model, plan.cluster).pipeline_costs(plan.stages)
        run = run_pe(costs, plan.microbatches)
        guarantee_ms = schedule_guarantee_ms(costs, plan.microbatches)
        assert run.iteration_ms <= guarantee_ms * (1 + 1e-9), seed
        channels_ms, rings_ms = longest_times(plan)
        busiest_ms = max([*(costs.forward_ms_S + costs.backward_ms_S), *channels_ms])
        rounds = plan.microbatches + 4 * (len(plan.stages) - 1)
        assert guarantee_ms == pytest.approx(rounds * busiest_ms + max(rings_ms)), seed
        timeline = timeline_of(costs, run)
        for transfer in timeline.transfers:
            at_least = (
                costs.send_forward_ms_C[transfer.channel]
                if transfer.kind.value == "F"
                else costs.send_backward_ms_C[transfer.channel]
            )
            assert transfer.end_ms - transfer.start_ms >= at_least * (1 - 1e-9) - 1e-9, seed
        reduced_ms = timeline.all_reduce_end_ms_S - timeline.all_reduce_start_ms_S
        assert (reduced_ms >= costs.all_reduce_ms_S * (1 - 1e-9) - 1e-9).all(), seed


def test_flows_that_are_alike_are_simulated_as_one():
    """One group for each transfer and each ring, however many hosts a stage has."""
    hosts = [HostGroup(count=4, devices=3, bandwidth_gb_per_s=10)]
    cluster = expand_hosts("equal", hosts, between_hosts_gb_per_s=1, uplink_gb_per_s=1)
    layers = tuple(
        LayerProfile(
            name=str(n), forward_ms=1, backward_ms=1, output_bytes=1e6 + n, parameter_bytes=1e6
        )
        for n in range(3)
    )
    model = ModelProfile(name="three", microbatch_size=4, layers=layers)
    stages = [Stage(layers=range(n, n + 1), devices=(n, 3 + n, 6 + n, 9 + n)) for n in range(3)]
    flows = CostModel(model, cluster).pipeline_costs(stages).flows
    assert (len(flows.groups()), flows.num_simulated()) == (4 * 12 + 3 * 4, 4 + 3)
    one_is_faster = replace(cluster, uplink_gb_per_s={"h0": 2.0, "h1": 1.0, "h2": 1.0, "h3": 1.0})
    flows = CostModel(model, one_is_faster).pipeline_costs(stages).flows
    # The rings go from h0 over h1 and h2 to h3. What is left is to read everything backwards, with
    # h1 and h3 exchanged: only h1 to h3 and h3 to h1 stay as they are.
    assert flows.num_simulated() == 4 * (2 + 5) + 3 * 2


def test_most_symmetric_plans_have_flows_that_are_alike():
    flows = [
        CostModel(plan.model, plan.cluster).pipeline_costs(plan.stages).flows
        for plan in map(symmetric_plan, range(100))
    ]
    assert sum(each.num_simulated() < len(each.groups()) for each in flows) > 50


def test_links_that_never_bind_change_nothing():
    for seed in range(60):
        plan = random_plan(seed)
        plain = replace(plan.cluster, uplink_gb_per_s=None, shared=())
        wide = replace(plain, uplink_gb_per_s=1e9)
        alone, shared = (
            run_plan(replace(plan, cluster=cluster))[1].iteration_ms for cluster in (plain, wide)
        )
        assert shared == pytest.approx(alone, rel=1e-12), seed
