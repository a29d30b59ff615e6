import math

import pytest

from instances import flat_cluster
from pipeplan.cluster import Duplex
from pipeplan.pipeline import Block, Kind, Plan, Schedule, Stage
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.replaying import simulate
from pipeplan.report.drawing import NOTHING, Drawing

INSTANT_MS = 1e-8


def schedule_of(text: str) -> Schedule:
    return Schedule(
        tuple(
            tuple(Block(Kind(word[0]), stage, int(word[1:])) for word in line.split())
            for stage, line in enumerate(text.strip().splitlines())
        )
    )


def two_stages(there_ms: float, back_ms: float, text: str, **fields) -> Drawing:
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
    return Drawing(plan, simulate(plan))


def waits_of(drawing: Drawing) -> dict[str, str]:
    return {
        drawing.name_of(number): drawing.name_of(waited)
        for number, waited in enumerate(drawing.waited_for)
    }


def test_what_each_item_waited_for(drawing):
    assert waits_of(drawing) == {
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


def test_the_critical_path_by_hand(drawing):
    assert drawing.iteration_ms == 14
    assert [drawing.name_of(number) for number in drawing.critical_path] == [
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
    shares = drawing.critical_shares
    assert (shares.compute, shares.communication, shares.all_reduce) == pytest.approx(
        (9 / 14, 2 / 14, 3 / 14)
    )


def test_gaps_by_hand(drawing):
    found = [
        [(gap.start_ms, gap.end_ms, gap.on_links_ms, drawing.name_of(gap.waited_for)) for gap in g]
        for g in drawing.gaps
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


def test_shares_and_phases_by_hand(drawing):
    first, second = (figures.shares for figures in drawing.stages)
    assert (first.compute, first.communication, first.all_reduce, first.bubble) == pytest.approx(
        (6 / 14, 2 / 14, 3 / 14, 3 / 14)
    )
    assert (second.compute, second.communication, second.bubble) == pytest.approx(
        (6 / 14, 1 / 14, 7 / 14)
    )
    whole = drawing.shares
    assert (whole.compute, whole.communication, whole.all_reduce, whole.bubble) == pytest.approx(
        (18 / 42, 5 / 42, 6 / 42, 13 / 42)
    )
    assert [(p.name, p.start_ms, p.end_ms) for p in drawing.phases] == [
        ("warm-up", 0, 2),
        ("steady", 2, 8),
        ("drain", 8, 14),
    ]


def test_memory_by_hand(drawing):
    first, second = drawing.memory
    assert first.times_ms == (0, 0, 1, 8, 11)
    assert first.in_flight == (0, 1, 2, 1, 0)
    # Parameters of 3 MB with their optimizer state; 2 GB of activations, half on each replica.
    assert first.base_gb == pytest.approx((0.012, 0.012))
    assert first.per_microbatch_gb == pytest.approx((1.0, 1.0))
    assert first.peak_gb == pytest.approx((2.012, 2.012))
    assert second.in_flight == (0, 1, 0, 1, 0)
    assert second.peak_gb == pytest.approx((5.0,))


def test_links_by_hand(drawing):
    links = {(link.source, link.target): link for link in drawing.links()}
    # Each replica of stage 0 sends its half of 2 MB, twice, and gets its half of the gradients.
    for pair in ((0, 1), (2, 1), (1, 0), (1, 2)):
        assert links[pair].num_bytes == 2e6
        assert links[pair].busy == pytest.approx(2 / 14)
    # The ring of the all-reduce: 2(k-1)/k of 3 MB each way.
    assert links[0, 2].num_bytes == links[2, 0].num_bytes == 3e6
    assert links[0, 2].busy == pytest.approx(3 / 14)
    assert len(links) == 6


def test_a_transfer_waits_for_the_channel():
    drawing = two_stages(3, 0, "F0 F1 B0 B1\nF0 F1 B0 B1")
    waits = waits_of(drawing)
    assert waits["transfer of F1 from stage 0 to 1"] == "transfer of F0 from stage 0 to 1"
    # Both gaps of stage 1 are links: 1 to 4 of the first, the queue of the second.
    assert [(g.start_ms, g.end_ms, g.on_links_ms) for g in drawing.gaps[1][:2]] == [
        (0, 4, 3),
        (5, 7, 2),
    ]


def test_with_half_duplex_the_directions_wait_for_each_other():
    # B0 ends on stage 1 at 6, while F1 is on the channel from 4 to 7 and F2 queues since 3.
    drawing = two_stages(3, 3, "F0 F1 F2 B0 B1 B2\nF0 B0 F1 B1 F2 B2", duplex=Duplex.HALF)
    waits = waits_of(drawing)
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
    drawing = Drawing(plan, simulate(plan))
    cut = drawing.stages[0].cut
    assert (cut.here.bytes_across, cut.here.busiest_ms) == (2e3, 10)
    assert (cut.earlier.bytes_across, cut.earlier.busiest_ms) == (8e3, 15)
    assert (cut.later.bytes_across, cut.later.busiest_ms) == (6e3, 15)
    assert cut.reason == "fewest bytes and best balance"
    assert cut.evidence == (
        "2 kB cross; a layer earlier 8 kB, busier side +50.0 %; a layer later 6 kB,"
        " busier side +50.0 %"
    )
    assert drawing.stages[1].cut is None


def test_random_plans_every_wait_ends_when_its_item_starts(random_drawings):
    for drawing in random_drawings:
        for number, waited in enumerate(drawing.waited_for):
            start_ms = drawing.items[number].start_ms
            end_ms = 0.0 if waited == NOTHING else drawing.items[waited].end_ms
            assert start_ms == pytest.approx(end_ms, abs=INSTANT_MS), drawing.name_of(number)


def test_random_plans_critical_path_is_the_iteration(random_drawings):
    for drawing in random_drawings:
        path = [drawing.items[number] for number in drawing.critical_path]
        assert math.fsum(item.length_ms for item in path) == pytest.approx(
            drawing.iteration_ms, rel=1e-9, abs=INSTANT_MS
        )


def test_random_plans_shares_sum_to_one(random_drawings):
    for drawing in random_drawings:
        for shares in (drawing.shares, *(figures.shares for figures in drawing.stages)):
            parts = (shares.compute, shares.communication, shares.all_reduce, shares.bubble)
            assert sum(parts) == pytest.approx(1, abs=1e-9)
            assert min(parts) >= 0


def test_random_plans_lanes_are_full(random_drawings):
    """Blocks, all-reduce and gaps cover each stage's time exactly."""
    for drawing in random_drawings:
        for order, reduce, gaps in zip(
            drawing.timeline.blocks, drawing.timeline.all_reduces, drawing.gaps, strict=True
        ):
            covered = math.fsum(
                [t.end_ms - t.start_ms for t in order]
                + [reduce.end_ms - reduce.start_ms]
                + [gap.end_ms - gap.start_ms for gap in gaps]
            )
            assert covered == pytest.approx(drawing.iteration_ms, rel=1e-9, abs=1e-6)


def test_random_plans_memory_is_the_cost_models(random_drawings):
    for drawing in random_drawings:
        for stage, memory in zip(drawing.plan.stages, drawing.memory, strict=True):
            assert list(memory.times_ms) == sorted(memory.times_ms)
            assert memory.in_flight[-1] == 0
            for held in {*memory.in_flight}:
                line = [
                    base + held * one
                    for base, one in zip(memory.base_gb, memory.per_microbatch_gb, strict=True)
                ]
                assert line == pytest.approx(drawing.cost.memory_gb(stage, held))


def test_random_plans_links_carry_what_the_stages_send(random_drawings):
    for drawing in random_drawings:
        plan = drawing.plan
        sent = sum(
            plan.model.layers[stage.layers[-1]].output_bytes
            + plan.model.layers[stage.layers[-1]].gradient_bytes
            for stage in plan.stages[:-1]
        )
        reduced = sum(
            2 * (s.num_replicas - 1) * sum(plan.model.layers[n].parameter_bytes for n in s.layers)
            for s in plan.stages
        )
        carried = math.fsum(link.num_bytes for link in drawing.links())
        assert carried == pytest.approx(plan.microbatches * sent + reduced)
        # Here every device is a host of its own.
        assert drawing.links(between_hosts=True) == drawing.links()
