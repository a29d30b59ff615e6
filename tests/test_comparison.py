"""Comparisons: rows, references, reasons, and the table within 80 columns."""

import io
import json
import random
from dataclasses import replace
from time import perf_counter

import pytest
from click.testing import CliRunner
from rich.console import Console

from instances import even_model, flat_cluster, random_cluster, random_model
from pipeplan import zoo
from pipeplan.checker import check
from pipeplan.commands.compare import compare_command
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.pipeline import Bound, BoundScope
from pipeplan.planning.baselines import BASELINES
from pipeplan.planning.comparison import compare
from pipeplan.planning.registry import PLANNERS, choose_planners
from pipeplan.report.comparison import render_comparison


def refuse(problem):
    raise InfeasibleError("no device is large enough; use larger ones")


def rendered(comparison, **settings) -> str:
    file = io.StringIO()
    console = Console(file=file, width=80, highlight=False, markup=False, **settings)
    console.print(render_comparison(comparison, console))
    return file.getvalue()


class TestRows:
    def test_fastest_first_and_speedups_over_data_parallel(self):
        free = {"divisible": True, "ignore_memory": True}
        cluster = replace(zoo.cluster("4x2-10g"), uplink_gb_per_s=None)
        comparison = compare(zoo.model("vgg19"), cluster, 8, BASELINES, **free)
        times = [row.iteration_ms for row in comparison.rows]
        assert times == sorted(times)
        assert comparison.reference == "data-parallel"
        base = next(row for row in comparison.rows if row.planner == "data-parallel")
        assert base.speedup == 1.0
        for row in comparison.rows:
            assert row.speedup == pytest.approx(base.iteration_ms / row.iteration_ms)
            assert row.planning_s > 0
            assert row.gap is None

    def test_without_data_parallel_the_slowest_is_the_reference(self):
        chosen = {name: BASELINES[name] for name in ("gpipe", "grid")}
        comparison = compare(zoo.model("vgg19"), zoo.cluster("4x2-10g"), 8, chosen)
        assert comparison.reference == comparison.rows[-1].planner
        assert comparison.rows[-1].speedup == 1.0
        assert comparison.rows[0].speedup >= 1.0

    def test_infeasible_planners_come_last_with_their_reason(self):
        planners = {"hopeless": refuse, "gpipe": BASELINES["gpipe"]}
        comparison = compare(even_model(4, 1, 2), flat_cluster(2), 4, planners)
        assert [row.planner for row in comparison.rows] == ["gpipe", "hopeless"]
        last = comparison.rows[-1]
        assert last.iteration_ms is None
        assert "no device is large enough" in last.infeasible_reason
        nobody = compare(even_model(4, 1, 2), flat_cluster(2), 4, {"hopeless": refuse})
        assert nobody.reference is None

    def test_a_gap_where_there_is_a_bound(self):
        def bounded(problem):
            draft = BASELINES["grid"](problem)
            bound = Bound(lower_bound_ms=draft.iteration_ms / 1.25, scope=next(iter(BoundScope)))
            return replace(draft, bound=bound)

        planners = {"bounded": bounded, "gpipe": BASELINES["gpipe"]}
        comparison = compare(even_model(4, 1, 2), flat_cluster(2), 4, planners, divisible=True)
        rows = {row.planner: row for row in comparison.rows}
        assert rows["bounded"].gap == pytest.approx(0.25)
        slower = rows["gpipe"].iteration_ms / rows["bounded"].iteration_ms
        assert rows["gpipe"].gap == pytest.approx(1.25 * slower - 1)  # the bound holds for all

    def test_memory_that_does_not_fit_is_marked(self):
        cluster = flat_cluster(2)
        small = tuple(replace(device, memory_gb=0.5) for device in cluster.devices)
        planners = {"data-parallel": BASELINES["data-parallel"]}
        comparison = compare(zoo.model("vgg19"), replace(cluster, devices=small), 2, planners)
        assert comparison.rows[0].fits_memory is False
        assert "needs more memory" in rendered(comparison)

    def test_a_model_that_costs_nothing(self):
        comparison = compare(even_model(3, 0, 0), flat_cluster(2), 2, BASELINES)
        rows = [row for row in comparison.rows if row.infeasible_reason is None]
        assert len(rows) > 8
        assert all(row.speedup == 1.0 for row in rows)
        assert "grid" in rendered(comparison)

    def test_progress_names_each_planner_once(self):
        names: list[str] = []
        compare(even_model(3, 1, 1), flat_cluster(2), 2, BASELINES, on_start=names.append)
        assert names == list(BASELINES)

    def test_bad_arguments(self):
        with pytest.raises(InputError, match="microbatches: 0"):
            compare(even_model(1, 1, 1), flat_cluster(1), 0, BASELINES)
        with pytest.raises(InputError, match="did you mean 'dapple'"):
            choose_planners(["gpipe", "daple"])
        with pytest.raises(InputError, match="names none"):
            choose_planners([])
        assert choose_planners(["grid", "gpipe", "grid"]) == ("grid", "gpipe")
        assert choose_planners(None) == tuple(name for name in PLANNERS if name != "exact")

    def test_a_layer_that_fits_nowhere_is_said_for_every_planner(self):
        cluster = flat_cluster(2)
        tiny = tuple(replace(device, memory_gb=0.001) for device in cluster.devices)
        comparison = compare(zoo.model("vgg19"), replace(cluster, devices=tiny), 2, ["spp", "grid"])
        assert all("more than any device" in row.infeasible_reason for row in comparison.rows)
        assert comparison.plans == {}
        assert comparison.fastest is None

    def test_the_plans_are_kept(self):
        comparison = compare(zoo.model("vgg19"), zoo.cluster("4x2-10g"), 4, ["grid", "best"])
        assert comparison.fastest is comparison.plans["best"]
        for row in comparison.rows:
            plan = comparison.plans[row.planner]
            assert (plan.planner, plan.iteration_ms) == (row.planner, row.iteration_ms)
            assert check(plan).ok

    def test_a_function_that_makes_invalid_plans_is_refused(self):
        def twice(problem):
            draft = BASELINES["1f1b"](problem)
            both = replace(draft.stages[1], devices=draft.stages[0].devices)
            return replace(draft, stages=(draft.stages[0], both))

        with pytest.raises(InputError, match=r"'twice' made a plan that is not valid.*already"):
            compare(even_model(4, 1, 2), flat_cluster(2), 4, {"twice": twice})


class TestTable:
    def test_fits_80_columns_whatever_the_names_and_numbers(self):
        for seed in range(40):
            rng = random.Random(seed)
            model = replace(random_model(rng, 6), name="model " * rng.choice([1, 30]))
            cluster = replace(random_cluster(rng, 5), name="\x1b[31mcluster " * rng.choice([1, 30]))
            planners = {**BASELINES, "a-planner-with-a-very-long-name-indeed": refuse}
            comparison = compare(model, cluster, rng.choice([1, 4000]), planners)
            text = rendered(comparison)
            assert max(len(line) for line in text.splitlines()) <= 80
            assert "\x1b" not in text
            for name in BASELINES:
                assert name in text
            assert "no plan" in text

    def test_every_figure_is_shown_in_full(self):
        comparison = compare(zoo.model("bert-48"), zoo.cluster("2x8-100g"), 16, BASELINES)
        text = rendered(comparison)
        assert "…" not in text
        assert "speed-up over data-parallel" in text


class TestCommand:
    def test_table_on_stdout(self):
        result = CliRunner().invoke(
            compare_command, ["vgg19", "4x2-10g", "-m", "4", "--planners", "spp"]
        )
        assert result.exit_code == 0
        assert "spp" in result.stdout

    def test_json(self):
        arguments = ["vgg19", "4x2-10g", "-m", "4", "--planners", "spp", "--json", "--seed", "3"]
        result = CliRunner().invoke(compare_command, arguments)
        document = json.loads(result.stdout)
        assert document["seed"] == 3
        assert document["rows"][0]["planner"] == "spp"
        assert document["rows"][0]["iteration_ms"] > 0

    def test_settings_reach_the_planners(self, monkeypatch):
        import pipeplan.planning.comparison as module

        seen = {}

        def fake(*_, **settings):
            seen.update(settings)
            raise InputError("enough")

        monkeypatch.setattr(module, "compare", fake)
        arguments = ["vgg19", "4x2-10g", "--runnable", "--effort", "0.5", "--seed", "7"]
        CliRunner().invoke(compare_command, arguments)
        assert (seen["runnable"], seen["effort"], seen["seed"]) == (True, 0.5, 7)

    def test_unknown_planner(self):
        result = CliRunner().invoke(compare_command, ["vgg19", "4x2-10g", "--planners", "sppp"])
        assert isinstance(result.exception, InputError)

    def test_all_planners_at_50_layers_and_16_devices_take_less_than_10_seconds(self):
        planners = {**PLANNERS, **BASELINES}
        started_s = perf_counter()
        compare(zoo.model("bert-48"), zoo.cluster("2x8-100g"), 16, planners, divisible=True)
        assert perf_counter() - started_s < 10
