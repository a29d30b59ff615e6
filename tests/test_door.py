"""The door: what is asked for reaches the planner, what comes out is judged and recorded."""

import math
import random
from dataclasses import replace

import pytest

from instances import even_model, flat_cluster, random_cluster, random_model
from pipeplan import zoo
from pipeplan.cost import CostModel
from pipeplan.errors import InfeasibleError, InputError, PlanningInterrupted
from pipeplan.pipeline import Bound, BoundScope, Stage
from pipeplan.planning.baselines import BASELINES, GROUP_BASELINES
from pipeplan.planning.comparison import compare
from pipeplan.planning.door import attempt, make_problem, plan
from pipeplan.planning.problem import SearchInterrupted
from pipeplan.planning.registry import choose_planners, planner_names
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.schedules import PORTFOLIO, SCHEDULES, run_pe, schedule_guarantee_ms
from pipeplan.version import VERSION

SPY = "spy"


def on_first_device(problem):
    """Everything on one device, forwards first."""
    stage = Stage(layers=range(problem.model.num_layers), devices=(0,))
    draft = BASELINES["gpipe"](problem)
    return replace(draft, stages=(stage,), codes=draft.codes[:1])


class TestArguments:
    def test_what_cannot_be_is_refused(self):
        model, cluster = even_model(2, 1, 1), flat_cluster(2)
        for name, values in (
            ("effort", (0.0, -1.0, 1000.5, math.inf, math.nan)),
            ("time_limit_s", (0.0, -1.0, math.inf, math.nan)),
            ("num_threads", (0, -1)),
        ):
            for value in values:
                with pytest.raises(InputError, match=rf"^{name}: "):
                    make_problem(model, cluster, 2, **{name: value})

    def test_plans_too_large_to_be_written_are_refused_before_the_work(self):
        with pytest.raises(InputError, match="microbatches"):
            make_problem(even_model(1000, 1, 1), flat_cluster(600), 60_000)

    def test_everything_reaches_the_planner(self):
        seen = []

        def spy(problem):
            seen.append(problem)
            return on_first_device(problem)

        model, cluster = replace(even_model(2, 1, 1), microbatch_size=3), flat_cluster(4)
        compare(model, cluster, 5, {SPY: spy}, divisible=True, seed=7, effort=0.5, num_threads=3)
        (problem,) = seen
        assert (problem.num_microbatches, problem.limits.whole_samples) == (5, False)
        assert (problem.seed, problem.effort, problem.num_threads) == (7, 0.5, 3)
        assert problem.within_samples().cost.max_replicas == 4
        assert (problem.deadline, problem.time_limit_s) == (math.inf, None)
        limited = make_problem(model, cluster, 5, time_limit_s=9.0)
        assert 0 < limited.deadline < math.inf
        assert limited.limits.whole_samples
        assert limited.within_samples().cost.max_replicas == 3

    def test_progress_is_reported(self):
        lines = []
        plan(zoo.model("vgg19"), zoo.cluster("random-8"), 4, effort=0.1, report=lines.append)
        assert lines


class TestRecords:
    def test_a_plan_says_how_it_was_made(self):
        model = replace(even_model(4, 1, 1), microbatch_size=2)
        made = plan(
            model,
            flat_cluster(2),
            4,
            schedule="gpipe",
            runnable=True,
            seed=11,
            effort=2.0,
            time_limit_s=60.0,
        )
        assert (made.seed, made.version, made.planner) == (11, VERSION, "best")
        expected = {
            "microbatches": 4,
            "planner": "best",
            "effort": 2.0,
            "schedule": "gpipe",
            "runnable": True,
            "time_limit_s": 60.0,
        }
        assert expected.items() <= made.options.items()
        assert "bound" in made.options
        plain = plan(model, flat_cluster(2), 4, "spp")
        assert set(plain.options) == {"microbatches", "planner", "effort"}

    def test_a_planner_s_own_word_counts_for_nothing(self):
        def boastful(problem):
            return replace(on_first_device(problem), iteration_ms=0.001)

        problem = make_problem(even_model(3, 1, 1), flat_cluster(2), 4)
        made = attempt(problem, SPY, function=boastful)
        assert made.plan.iteration_ms == made.plan.predicted.iteration_ms == 4 * 6

    def test_guarantees_are_given_for_pe_alone(self):
        model, cluster = zoo.model("vgg19"), zoo.cluster("4x2-10g")
        for rule in SCHEDULES:
            for planner in ("spp", "dapple"):  # with and without one of its own
                made = plan(model, cluster, 4, planner, schedule=rule)
                costs = CostModel(model, cluster).pipeline_costs(made.stages)
                guarantee_ms = schedule_guarantee_ms(costs, 4) if rule == "pe" else None
                assert made.predicted.schedule_guarantee_ms == guarantee_ms
        own = plan(model, cluster, 4, "spp")
        costs = CostModel(model, cluster).pipeline_costs(own.stages)
        assert own.predicted.schedule_guarantee_ms == schedule_guarantee_ms(costs, 4)

    def test_the_portfolio_gives_the_fastest_rule_and_its_guarantee(self):
        others = 0
        for seed in range(20):
            rng = random.Random(seed)
            model, cluster = random_model(rng, 6), random_cluster(rng, 4)
            made = plan(model, cluster, 4, "1f1b", schedule="portfolio")
            costs = CostModel(model, cluster).pipeline_costs(made.stages)
            times = {rule: SCHEDULES[rule](costs, 4).iteration_ms for rule in PORTFOLIO}
            assert made.iteration_ms == pytest.approx(min(times.values()))
            pe_is_fastest = made.schedule.to_codes() == run_pe(costs, 4).order_SM2.tolist()
            others += not pe_is_fastest
            if not pe_is_fastest:
                assert made.predicted.schedule_guarantee_ms is None
        assert others > 0


class TestReasons:
    def test_one_device_that_holds_the_largest_layer_is_enough(self):
        layer = LayerProfile(
            name="big", forward_ms=1, backward_ms=1, output_bytes=0, parameter_bytes=2e9
        )
        model = ModelProfile(name="m", microbatch_size=1, layers=(layer,))
        cluster = flat_cluster(2)
        for rooms, fits in (((1.0, 2.0), True), ((1.0, 1.999), False), ((1.0, None), True)):
            devices = tuple(
                replace(device, memory_gb=room)
                for device, room in zip(cluster.devices, rooms, strict=True)
            )
            problem = make_problem(model, replace(cluster, devices=devices), 2)
            made = attempt(problem, "spp")
            assert (made.plan is not None) == fits
            assert fits or "more than any device" in made.reason

    def test_a_time_limit_that_passes_before_there_is_a_plan(self):
        with pytest.raises(InfeasibleError, match=r"time limit of 1e-09 s passed.*allow more time"):
            plan(zoo.model("vgg19"), zoo.cluster("random-8"), 4, "spp", time_limit_s=1e-9)

    def test_plans_that_split_samples_are_marked_whoever_made_them(self):
        def everyone(problem):
            stage = Stage(layers=range(problem.model.num_layers), devices=(0, 1))
            return replace(on_first_device(problem), stages=(stage,))

        model, cluster = even_model(2, 1, 1), flat_cluster(2)  # one sample in a microbatch
        made = attempt(make_problem(model, cluster, 2), SPY, function=everyone)
        assert made.plan is not None
        assert not made.broken.has_whole_samples
        split = make_problem(model, cluster, 2, divisible=True)
        assert attempt(split, SPY, function=everyone).broken.keeps_all

    def test_interruptions_carry_a_plan_except_in_comparisons(self):
        def interrupted(problem):
            raise SearchInterrupted(replace(on_first_device(problem), notes={"interrupted": True}))

        model, cluster = even_model(2, 1, 1), flat_cluster(2)
        with pytest.raises(PlanningInterrupted) as stop:
            attempt(make_problem(model, cluster, 2), SPY, function=interrupted)
        assert stop.value.plan.options["interrupted"] is True
        with pytest.raises(KeyboardInterrupt) as stop:
            compare(model, cluster, 2, {SPY: interrupted})
        assert not isinstance(stop.value, PlanningInterrupted)


class TestComparisons:
    def test_rows_say_what_the_plans_need(self):
        """Two devices of different size; the plan uses one, then both."""
        layer = LayerProfile(
            name="l", forward_ms=1, backward_ms=1, output_bytes=0, parameter_bytes=1e9
        )
        model = ModelProfile(
            name="m",
            microbatch_size=2,
            layers=tuple(replace(layer, name=name) for name in "abc"),
            optimizer_bytes_per_parameter_byte=0,
        )
        cluster = flat_cluster(3)
        rooms = (3.0, 1.5, None)
        devices = tuple(
            replace(device, memory_gb=room)
            for device, room in zip(cluster.devices, rooms, strict=True)
        )

        def two_stages(problem):
            stages = (
                Stage(layers=range(1), devices=(0,)),
                Stage(layers=range(1, 3), devices=(1,)),
            )
            draft = BASELINES["gpipe"](problem)
            return replace(draft, stages=stages, codes=draft.codes[:2])

        comparison = compare(
            model,
            replace(cluster, devices=devices),
            2,
            {"one": on_first_device, "two": two_stages},
        )
        rows = {row.planner: row for row in comparison.rows}
        one, two = rows["one"], rows["two"]
        assert (one.num_devices, one.num_stages, one.fits_memory) == (1, 1, True)  # exactly 3 GB
        assert (two.num_devices, two.num_stages, two.fits_memory) == (2, 2, False)
        assert (one.peak_memory_gb, two.peak_memory_gb) == (3.0, 2.0)
        assert one.bubble_fraction == 0
        assert two.bubble_fraction > 0

    def test_the_best_bound_counts_and_a_bound_of_nothing_gives_no_gap(self):
        def bounded(share):
            def planner(problem):
                draft = on_first_device(problem)
                bound = Bound(lower_bound_ms=share * 16.0, scope=BoundScope.EVEN_SHARES)
                return replace(draft, bound=bound)

            return planner

        model, cluster = even_model(2, 2, 2), flat_cluster(2)
        rows = compare(model, cluster, 2, {"a": bounded(0.5), "b": bounded(0.8)}).rows
        assert [row.gap for row in rows] == pytest.approx([0.25, 0.25])
        assert {row.lower_bound_ms for row in rows} == {8.0, 12.8}
        (row,) = compare(model, cluster, 2, {"a": bounded(0.0)}).rows
        assert (row.gap, row.lower_bound_ms) == (None, 0.0)

    def test_a_plan_without_any_time_is_infinitely_faster(self):
        model = ModelProfile(
            name="m",
            microbatch_size=1,
            layers=(
                LayerProfile(
                    name="l", forward_ms=0, backward_ms=0, output_bytes=0, parameter_bytes=1e6
                ),
            ),
        )
        planners = {"data-parallel": BASELINES["data-parallel"], "one": on_first_device}
        rows = compare(model, flat_cluster(2), 2, planners).rows
        assert [(row.planner, row.speedup) for row in rows] == [
            ("one", math.inf),
            ("data-parallel", 1.0),
        ]

    def test_a_function_stands_for_the_planner_of_its_name(self):
        (row,) = compare(even_model(4, 1, 1), flat_cluster(4), 2, {"spp": on_first_device}).rows
        assert row.iteration_ms == 2 * 8


def test_best_is_never_slower_than_a_published_planner():
    """Also with the least effort: complete plans of others are among its starts."""
    for seed in range(12):
        rng = random.Random(seed)
        model, cluster = random_model(rng, 10), random_cluster(rng, rng.choice([4, 12]))
        best = plan(model, cluster, 4, effort=0.01, divisible=True)
        for name in BASELINES.keys() - set(GROUP_BASELINES):
            assert best.iteration_ms <= plan(model, cluster, 4, name).iteration_ms * (1 + 1e-9)


def test_slow_planners_run_only_when_asked_for():
    assert "exact" in planner_names()
    assert "exact" not in choose_planners(None)
    assert choose_planners(["exact"]) == ("exact",)
