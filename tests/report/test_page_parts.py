"""What the page says beside the timeline: memory by parts, bottleneck, cuts, folded stages."""

import random
from dataclasses import replace

import pytest

from instances import even_plan
from one_stage import plan
from pages import Page
from pipeplan import zoo
from pipeplan.cluster import Cluster, Device
from pipeplan.planning.comparison import compare
from pipeplan.report.analysis.plan_analysis import analyse
from pipeplan.report.cluster_picture import cluster_svg
from pipeplan.report.comparison import fastest_two
from pipeplan.report.html import render_report
from pipeplan.report.page_beside import SideBySide, side_by_side
from pipeplan.report.page_memory import memory_bars, memory_caption
from pipeplan.report.timeline_picture import timeline_svg
from pipeplan.simulator import run_schedule


@pytest.fixture(scope="module")
def bert():
    return plan(zoo.model("bert-large"), zoo.cluster("4x2-10g"), 8, planner="spp")


def with_memory(made, memory_gb: float):
    devices = tuple(replace(device, memory_gb=memory_gb) for device in made.cluster.devices)
    return replace(made, cluster=replace(made.cluster, devices=devices), predicted=None)


# ------------------------------------------------------------------------------- memory


def test_the_parts_of_the_memory_add_up(random_analyses):
    for analysis in random_analyses:
        for stage, memory in zip(analysis.plan.stages, analysis.memory, strict=True):
            parameters = sum(analysis.plan.model.layers[n].parameter_bytes for n in stage.layers)
            for parts, peak_gb in zip(memory.parts, memory.peak_gb, strict=True):
                assert parts.total_gb == pytest.approx(peak_gb, abs=1e-12)
                assert parts.parameters_gb == pytest.approx(parameters / 1e9)
                # Adam by default: a gradient and two moments.
                assert parts.gradients_gb == pytest.approx(parts.parameters_gb)
                assert parts.optimizer_gb == pytest.approx(2 * parts.parameters_gb)


@pytest.mark.parametrize(("ratio", "gradients", "optimizer"), [(0.5, 0.5, 0), (1, 1, 0), (7, 1, 6)])
def test_gradients_come_before_the_optimizer(bert, ratio, gradients, optimizer):
    model = replace(bert.model, optimizer_bytes_per_parameter_byte=ratio)
    parts = analyse(replace(bert, model=model, predicted=None)).memory[0].parts[0]
    assert parts.gradients_gb == pytest.approx(gradients * parts.parameters_gb)
    assert parts.optimizer_gb == pytest.approx(optimizer * parts.parameters_gb)


def test_bars_have_one_scale_and_a_mark_for_the_limit(bert):
    bars = memory_bars(analyse(bert))
    assert [bar.stage for bar in bars] == sorted(bar.stage for bar in bars)
    assert {bar.limit_at for bar in bars} == {"100.000%"}  # 16 GB, the largest of all
    for bar, memory in zip(bars, analyse(bert).memory, strict=True):
        filled = sum(float(part.width.rstrip("%")) for part in bar.parts)
        assert filled == pytest.approx(100 * memory.peak_gb[0] / 16.0, abs=0.01)
        assert bar.fits
    tight = memory_bars(analyse(with_memory(bert, 2.0)))
    assert not all(bar.fits for bar in tight)
    assert all(float(bar.limit_at.rstrip("%")) < 100 for bar in tight)
    assert memory_bars(analyse(with_memory(bert, 9000.0)))[0].limit_at == ""


def test_the_caption_names_the_fullest_device(bert):
    needs = bert.predicted.peak_memory_gb
    fullest = max(needs, key=needs.get)
    assert memory_caption(analyse(bert)).startswith(f"{fullest} in stage ")
    assert f"{needs[fullest]:.3g} GB of its 16 GB" in memory_caption(analyse(bert))


# --------------------------------------------------------------------------- bottleneck


def test_the_busiest_is_named(random_analyses):
    for analysis in random_analyses:
        found = analysis.bottleneck
        microbatches = analysis.plan.microbatches
        work = microbatches * (analysis.costs.forward_ms_S + analysis.costs.backward_ms_S)
        most_ms = max(*(work + analysis.costs.all_reduce_ms_S).tolist(), 0.0)
        links = microbatches * analysis.costs.channel_ms_C
        busiest_ms = max([most_ms, *links.tolist()])
        assert found.busy * (analysis.iteration_ms or 1.0) == pytest.approx(busiest_ms)
        if found.stage is None:
            assert found.words.startswith(f"The link between stages {found.channel} and ")
        else:
            reduces = analysis.costs.all_reduce_ms_S[found.stage] > work[found.stage]
            does = "all-reduces" if reduces else "computes"
            assert found.words.startswith(f"Stage {found.stage} {does} ")


def test_the_bottleneck_in_words(bert):
    slow = tuple(replace(d, speed=0.3 if d.name == "h0d0" else 1.0) for d in bert.cluster.devices)
    made = replace(bert, cluster=replace(bert.cluster, devices=slow), predicted=None)
    analysis = analyse(made)
    index = next(n for n, stage in enumerate(made.stages) if 0 in stage.devices)
    assert analysis.bottleneck.words.startswith(f"Stage {index} computes ")
    assert "longer than that of any other stage" in analysis.bottleneck.words
    slow_links = tuple((0.01,) * 8 for _ in range(8))
    slow = replace(bert.cluster, bandwidth_gb_per_s=slow_links)
    words = analyse(replace(bert, cluster=slow, predicted=None)).bottleneck.words
    assert words.startswith("Stage 0 all-reduces 93 % of the time: faster links")
    alone = plan(bert.model, bert.cluster, 8, stages=8, ignore_memory=True)
    words = analyse(replace(alone, cluster=slow, predicted=None)).bottleneck.words
    assert words.startswith("The link between stages ")
    page = Page(render_report(bert))
    assert analyse(bert).bottleneck.words in page.text


# --------------------------------------------------------------------------------- cuts


def test_a_better_neighbouring_cut_is_named():
    """Moved by one layer, the plan is faster by as much as the reason says."""
    rng = random.Random(3)
    named = 0
    made = plan(zoo.model("bert-large"), zoo.cluster("4x2-10g"), 8, planner="gpipe")
    for _ in range(6):
        # Shift a cut at random, so that some cut is not the best.
        at = rng.randrange(len(made.stages) - 1)
        stages = list(made.stages)
        middle = stages[at].layers.stop + rng.choice([-1, 1])
        if not stages[at].layers.start < middle < stages[at + 1].layers.stop:
            continue
        stages[at] = replace(stages[at], layers=range(stages[at].layers.start, middle))
        stages[at + 1] = replace(stages[at + 1], layers=range(middle, stages[at + 1].layers.stop))
        shifted = with_memory(replace(made, stages=tuple(stages)), 1000.0)
        analysis = analyse(shifted)
        for index, figures in enumerate(analysis.stages[:-1]):
            cut = figures.cut
            for offset, choice in ((-1, cut.earlier), (1, cut.later)):
                if choice is None:
                    continue
                end = stages[index].layers.stop + offset
                moved = list(stages)
                moved[index] = replace(stages[index], layers=range(stages[index].layers.start, end))
                behind = stages[index + 1]
                moved[index + 1] = replace(behind, layers=range(end, behind.layers.stop))
                costs = analysis.cost.pipeline_costs(moved)
                by_hand = run_schedule(costs, analysis.run.order_SM2).iteration_ms
                assert choice.iteration_ms == pytest.approx(by_hand)
                if by_hand < analysis.iteration_ms * 0.999:
                    assert "would be better: the iteration" in cut.reason
                    named += 1
    assert named > 3


def test_a_cut_that_does_not_fit_is_not_better(bert):
    peak_gb = max(bert.predicted.peak_memory_gb.values())
    analysis = analyse(with_memory(bert, peak_gb))
    for stage, figures in zip(bert.stages, analysis.stages, strict=True):
        assert figures.cut is None or figures.cut.later is None or stage
    fullest = max(range(len(bert.stages)), key=lambda n: max(analysis.memory[n].peak_gb))
    cut = analysis.stages[fullest].cut
    assert cut.later.iteration_ms is None  # one more layer there needs more memory


# ------------------------------------------------------------------------ stages, speeds


@pytest.mark.parametrize(("num_stages", "num_folded"), [(16, 0), (17, 3), (40, 26)])
def test_the_table_folds_beyond_16_stages(num_stages, num_folded):
    page = Page(render_report(even_plan(num_stages, 2)))
    folded = [e for e in page.elements if e == ("tr", {"class": "folded"})]
    # The bottleneck stays in sight, wherever it is.
    assert num_folded - 1 <= len(folded) <= num_folded
    assert ("Show all" in page.text) == (num_folded > 0)


def test_speeds_show_where_they_differ(bert):
    assert "speed" not in Page(render_report(bert)).text
    devices = tuple(
        replace(device, speed=2.5 if n == 0 else 1.0)
        for n, device in enumerate(bert.cluster.devices)
    )
    mixed = replace(bert, cluster=replace(bert.cluster, devices=devices), predicted=None)
    assert ", 2.5x<" in cluster_svg(analyse(mixed))
    assert "speeds 1 to 2.5" in Page(render_report(mixed)).text


def test_an_unused_device_has_readable_text():
    row = (1.0,) * 3
    devices = tuple(Device(name=f"d{n}") for n in range(3))
    made = even_plan(2, 1)
    cluster = Cluster(name="c", devices=devices, bandwidth_gb_per_s=(row,) * 3)
    svg = cluster_svg(analyse(replace(made, cluster=cluster)))
    assert svg.count(' unused"') == 2  # its name, and that it is unused


# ------------------------------------------------------------------------- side by side


def test_timelines_have_one_scale_of_time(bert):
    slower = replace(
        bert,
        cluster=replace(
            bert.cluster,
            devices=tuple(replace(device, speed=0.5) for device in bert.cluster.devices),
        ),
        predicted=None,
    )
    shown = SideBySide(heading="Two", words="", plans={"fast": bert, "slow": slower})
    fast, slow = side_by_side(shown)
    assert (fast.title, slow.title) == ("fast", "slow")
    longest_ms = analyse(slower).iteration_ms
    assert fast.picture == timeline_svg(
        analyse(bert), 1180, title=False, legend=False, span_ms=longest_ms
    )
    # Ticks are the same, and the fast plan's lanes end earlier.
    assert longest_ms > 1.5 * bert.iteration_ms
    page = Page(render_report(bert, beside=shown))
    assert [e[1]["class"] for e in page.elements if e[0] == "svg"][:2] == ["pp-timeline"] * 2


def test_a_comparison_shows_the_two_fastest():
    model, cluster = zoo.model("vgg19"), zoo.cluster("4x2-10g")
    comparison = compare(model, cluster, 4, ["spp", "gpipe", "1f1b"])
    shown = fastest_two(comparison)
    assert list(shown.plans) == list(comparison.plans)[:2]
    assert fastest_two(compare(model, cluster, 4, ["spp"])) is None
