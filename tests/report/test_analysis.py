import math

import pytest

from instances import flat_cluster
from pipeplan.cluster import Duplex
from pipeplan.pipeline import Block, Kind, Plan, Schedule, Stage
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.replaying import simulate
from pipeplan.report.analysis.items import NOTHING
from pipeplan.report.analysis.plan_analysis import PlanAnalysis, analyse

INSTANT_MS = 1e-8


def schedule_of(text: str) -> Schedule:
    return Schedule(
        tuple(
            tuple(Block(Kind(word[0]), stage, int(word[1:])) for word in line.split())
            for stage, line in enumerate(text.strip().splitlines())
        )
    )


def two_stages(there_ms: float, back_ms: float, text: str, **fields) -> PlanAnalysis:
    """Two stages of one device; F and B take 1."""
    layers = tuple(
        LayerProfile(
            name=name,
            forward_ms=1,
            backward_ms=1,
            output_bytes=there_ms * 1e6,
            gradient_bytes=back_ms * 1e6,
            parameter_bytes=0,
        )
        for name in "ab"
    )
    schedule = schedule_of(text)
    plan = Plan(
        model=ModelProfile(name="m", microbatch_size=1, layers=layers),
        cluster=flat_cluster(2, **fields),
        microbatches=len(schedule[0]) // 2,
        stages=tuple(Stage(layers=range(n, n + 1), devices=(n,)) for n in range(2)),
        schedule=schedule,
        planner="hand",
    )
    return analyse(plan)


def waits_of(analysis: PlanAnalysis) -> dict[str, str]:
    return {
        analysis.items.name_of(number): analysis.items.name_of(waited)
        for number, waited in enumerate(analysis.waited_for)
    }


def test_what_each_item_waited_for(analysis):
    assert waits_of(analysis) == {
        "F0 on stage 0": "the start",
        "F1 on stage 0": "F0 on stage 0",
        "B0 on stage 0": "transfer of B0 from stage 1 to 0",
        "B1 on stage 0": "transfer of B1 from stage 1 to 0",
        "F0 on stage 1": "transfer of F0 from stage 0 to 1",
        "B0 on stage 1": "F0 on stage 1",
        "F1 on stage 1": "B0 on stage 1",
        "B1 on stage 1": "F1 on stage 1",
        "transfer of F0 from stage 0 to 1": "F0 on stage 0",
        "transfer of F1 from stage 0 to 1": "F1 on stage 0",
        "transfer of B0 from stage 1 to 0": "B0 on stage 1",
        "transfer of B1 from stage 1 to 0": "B1 on stage 1",
        "all-reduce of stage 0": "B1 on stage 0",
        "all-reduce of stage 1": "B1 on stage 1",
    }


def test_the_critical_path_by_hand(analysis):
    assert analysis.iteration_ms == 14
    assert [analysis.items.name_of(number) for number in analysis.critical_path] == [
        "F0 on stage 0",
        "transfer of F0 from stage 0 to 1",
        "F0 on stage 1",
        "B0 on stage 1",
        "F1 on stage 1",
        "B1 on stage 1",
        "transfer of B1 from stage 1 to 0",
        "B1 on stage 0",
        "all-reduce of stage 0",
    ]
    shares = analysis.critical_shares
    assert (shares.compute, shares.communication, shares.all_reduce) == pytest.approx(
        (9 / 14, 2 / 14, 3 / 14)
    )


def test_idle_times_by_hand(analysis):
    found = [
        [
            (*times_ms, analysis.items.name_of(waited))
            for *times_ms, waited in zip(
                idle.start_ms, idle.end_ms, idle.on_links_ms, idle.waited_for, strict=True
            )
        ]
        for idle in analysis.idle
    ]
    assert found == [
        [
            (2, 6, 1, "transfer of B0 from stage 1 to 0"),
            (8, 9, 1, "transfer of B1 from stage 1 to 0"),
        ],
        [
            (0, 2, 1, "transfer of F0 from stage 0 to 1"),
            (8, 14, 0, "all-reduce of stage 0"),
        ],
    ]


def test_shares_and_phases_by_hand(analysis):
    first, second = (figures.shares for figures in analysis.stages)
    assert (first.compute, first.communication, first.all_reduce, first.bubble) == pytest.approx(
        (6 / 14, 2 / 14, 3 / 14, 3 / 14)
    )
    assert (second.compute, second.communication, second.bubble) == pytest.approx(
        (6 / 14, 1 / 14, 7 / 14)
    )
    whole = analysis.shares
    assert (whole.compute, whole.communication, whole.all_reduce, whole.bubble) == pytest.approx(
        (18 / 42, 5 / 42, 6 / 42, 13 / 42)
    )
    assert [(p.name, p.start_ms, p.end_ms) for p in analysis.phases] == [
        ("warm-up", 0, 2),
        ("steady", 2, 8),
        ("drain", 8, 14),
    ]


def test_memory_by_hand(analysis):
    first, second = analysis.memory
    assert first.times_ms.tolist() == [0, 0, 1, 8, 11]
    assert first.in_flight.tolist() == [0, 1, 2, 1, 0]
    # Parameters of 3 MB with their optimizer state; 2 GB of activations, half on each replica.
    assert first.base_gb == pytest.approx((0.012, 0.012))
    assert first.per_microbatch_gb == pytest.approx((1.0, 1.0))
    assert first.peak_gb == pytest.approx((2.012, 2.012))
    assert second.in_flight.tolist() == [0, 1, 0, 1, 0]
    assert second.peak_gb == pytest.approx((5.0,))


def test_links_by_hand(analysis):
    links = {(link.source, link.target): link for link in analysis.links().links}
    # Each replica of stage 0 sends its half of 2 MB, twice, and gets its half of the gradients.
    for pair in ((0, 1), (2, 1), (1, 0), (1, 2)):
        assert links[pair].num_bytes == 2e6
        assert links[pair].busy == pytest.approx(2 / 14)
    # The ring of the all-reduce: 2(k-1)/k of 3 MB each way.
    assert links[0, 2].num_bytes == links[2, 0].num_bytes == 3e6
    assert links[0, 2].busy == pytest.approx(3 / 14)
    assert len(links) == 6


def test_a_transfer_waits_for_the_channel():
    analysis = two_stages(3, 0, "F0 F1 B0 B1\nF0 F1 B0 B1")
    waits = waits_of(analysis)
    assert waits["transfer of F1 from stage 0 to 1"] == "transfer of F0 from stage 0 to 1"
    # Both gaps of stage 1 are links: 1 to 4 of the first, the queue of the second.
    idle = analysis.idle[1]
    found = list(zip(idle.start_ms, idle.end_ms, idle.on_links_ms, strict=True))
    assert found[:2] == [(0, 4, 3), (5, 7, 2)]


def test_with_half_duplex_the_directions_wait_for_each_other():
    # B0 ends on stage 1 at 6, while F1 is on the channel from 4 to 7 and F2 queues since 3.
    analysis = two_stages(3, 3, "F0 F1 F2 B0 B1 B2\nF0 B0 F1 B1 F2 B2", duplex=Duplex.HALF)
    waits = waits_of(analysis)
    assert waits["transfer of B0 from stage 1 to 0"] == "transfer of F1 from stage 0 to 1"
    assert waits["transfer of F2 from stage 0 to 1"] == "transfer of B0 from stage 1 to 0"


def test_the_reason_for_a_cut():
    # Three layers; the cut in the middle of small tensors and of even stages.
    def layer(name, ms, num_bytes):
        return LayerProfile(
            name=name, forward_ms=ms, backward_ms=0, output_bytes=num_bytes, parameter_bytes=0
        )

    model = ModelProfile(
        name="m",
        microbatch_size=1,
        layers=(layer("a", 1, 4e3), layer("b", 1, 1e3), layer("c", 1, 3e3), layer("d", 1, 0)),
    )
    plan = Plan(
        model=model,
        cluster=flat_cluster(2, 1000.0),
        microbatches=5,
        stages=(Stage(layers=range(2), devices=(0,)), Stage(layers=range(2, 4), devices=(1,))),
        schedule=schedule_of("F0 F1 F2 F3 F4 B0 B1 B2 B3 B4\n" * 2),
        planner="hand",
    )
    analysis = analyse(plan)
    cut = analysis.stages[0].cut
    assert (cut.here.bytes_across, cut.here.busiest_ms) == (2e3, 10)
    assert (cut.earlier.bytes_across, cut.earlier.busiest_ms) == (8e3, 15)
    assert (cut.later.bytes_across, cut.later.busiest_ms) == (6e3, 15)
    assert cut.reason == "fewest bytes and best balance"
    assert cut.evidence == (
        "2 kB cross; a layer earlier 8 kB, busier side +50.0 %; a layer later 6 kB,"
        " busier side +50.0 %"
    )
    assert analysis.stages[1].cut is None


def test_random_plans_every_wait_ends_when_its_item_starts(random_analyses):
    for analysis in random_analyses:
        for number, waited in enumerate(analysis.waited_for):
            start_ms = analysis.items[number].start_ms
            end_ms = 0.0 if waited == NOTHING else analysis.items[waited].end_ms
            assert start_ms == pytest.approx(end_ms, abs=INSTANT_MS), analysis.items.name_of(number)


def test_random_plans_critical_path_is_the_iteration(random_analyses):
    for analysis in random_analyses:
        path = [analysis.items[number] for number in analysis.critical_path]
        assert math.fsum(item.length_ms for item in path) == pytest.approx(
            analysis.iteration_ms, rel=1e-9, abs=INSTANT_MS
        )


def test_random_plans_shares_sum_to_one(random_analyses):
    for analysis in random_analyses:
        for shares in (analysis.shares, *(figures.shares for figures in analysis.stages)):
            parts = (shares.compute, shares.communication, shares.all_reduce, shares.bubble)
            assert sum(parts) == pytest.approx(1, abs=1e-9)
            assert min(parts) >= 0


def test_random_plans_lanes_are_full(random_analyses):
    """Blocks, all-reduce and gaps cover each stage's time exactly."""
    for analysis in random_analyses:
        timeline = simulate(analysis.plan)
        for order, reduce, idle in zip(
            timeline.blocks, timeline.all_reduces, analysis.idle, strict=True
        ):
            covered = math.fsum(
                [t.end_ms - t.start_ms for t in order]
                + [reduce.end_ms - reduce.start_ms]
                + (idle.end_ms - idle.start_ms).tolist()
            )
            assert covered == pytest.approx(analysis.iteration_ms, rel=1e-9, abs=1e-6)


def test_random_plans_memory_is_the_cost_models(random_analyses):
    for analysis in random_analyses:
        for stage, memory in zip(analysis.plan.stages, analysis.memory, strict=True):
            assert list(memory.times_ms) == sorted(memory.times_ms)
            assert memory.in_flight[-1] == 0
            for held in {*memory.in_flight.tolist()}:
                line = [
                    base + held * one
                    for base, one in zip(memory.base_gb, memory.per_microbatch_gb, strict=True)
                ]
                assert line == pytest.approx(analysis.cost.memory_gb(stage, held))


def test_random_plans_links_carry_what_the_stages_send(random_analyses):
    for analysis in random_analyses:
        plan = analysis.plan
        sent = sum(
            plan.model.layers[stage.layers[-1]].output_bytes
            + plan.model.layers[stage.layers[-1]].gradient_bytes
            for stage in plan.stages[:-1]
        )
        reduced = sum(
            2 * (s.num_replicas - 1) * sum(plan.model.layers[n].parameter_bytes for n in s.layers)
            for s in plan.stages
        )
        carried = math.fsum(link.num_bytes for link in analysis.links().links)
        assert carried == pytest.approx(plan.microbatches * sent + reduced)
        # Here every device is a host of its own.
        assert analysis.links(between_hosts=True) == analysis.links()
