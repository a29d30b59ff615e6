"""Plans keep memory, whole samples and constraints; what cannot be is explained."""

import itertools
import json
import math
import random
from dataclasses import fields, replace

import pytest
from click.testing import CliRunner

from command_line import run_command
from instances import even_model, flat_cluster, random_cluster, random_model
from one_stage import ONE_STAGE, make_problem, plan
from pipeplan import _core, zoo
from pipeplan.checker import check, has_whole_samples
from pipeplan.cluster import HostGroup, expand_hosts
from pipeplan.commands.plan import plan_command
from pipeplan.cost import CostModel
from pipeplan.errors import InfeasibleError, InputError, NoPlanError
from pipeplan.pipeline import BoundLimit, Stage
from pipeplan.planning.baselines import GROUP_BASELINES
from pipeplan.planning.comparison import compare
from pipeplan.planning.limits import broken_constraint
from pipeplan.planning.options import OptionArguments, PlanningOptions
from pipeplan.planning.planner.placement import placed_plan, shared_stage
from pipeplan.planning.planner.reduction import without_devices
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.schedules import PORTFOLIO, SCHEDULES
from pipeplan.shared_links import SharedLink
from tight_memory import optimum_ms, tight_instance


def time_of(model, cluster, microbatches, **options) -> float:
    """The time of the plan, which the checker finds within all limits; infinite without one."""
    try:
        made = plan(model, cluster, microbatches, **options)
    except InfeasibleError:
        return math.inf
    assert check(made, strict_memory=True).errors == ()
    assert all(has_whole_samples(stage, model.microbatch_size) for stage in made.stages)
    return made.iteration_ms


class TestTightMemory:
    @pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.full)])
    def test_nearly_as_fast_as_the_optimum_and_feasible_wherever_that_is(self, count):
        losses, lacking, recomputed = [], [], 0
        for seed in range(count):
            model, cluster, microbatches = tight_instance(random.Random(seed))
            least_ms = optimum_ms(model, cluster, microbatches)
            try:
                made = plan(model, cluster, microbatches)
            except NoPlanError as error:
                lacking.append((error.need_gb or 0.0) - (error.memory_gb or 0.0))
                assert least_ms == math.inf, seed
                continue
            assert check(made, strict_memory=True).errors == (), seed
            if least_ms == math.inf:  # only shares that follow memory fit
                assert any(stage.shares for stage in made.stages), seed
                assert made.bound is None, seed
                continue
            assert made.iteration_ms >= least_ms * (1 - 1e-9), seed
            assert made.bound.lower_bound_ms <= least_ms * (1 + 1e-9), seed
            losses.append(made.iteration_ms / least_ms - 1 if least_ms else 0.0)
            recomputed += any(stage.recompute for stage in made.stages)
        assert sum(losses) / len(losses) < 0.001
        assert min(recomputed, len(lacking)) >= count // 40
        assert min(lacking) >= 0
        assert max(lacking) > 0

    @pytest.mark.parametrize("count", [8, pytest.param(60, marks=pytest.mark.full)])
    def test_exact_finds_the_optimum(self, count):
        pytest.importorskip("ortools")
        for seed in range(count):
            rng = random.Random(seed)
            model, cluster, _ = tight_instance(rng)
            if cluster.num_devices > 3:
                continue
            least_ms = optimum_ms(model, cluster, 2)
            found_ms = time_of(model, cluster, 2, planner="exact")
            assert found_ms == pytest.approx(least_ms, rel=1e-6, abs=1e-9), seed

    def test_less_memory_never_gives_a_plan_that_needs_more_than_there_is(self):
        """Between no limit and no plan at all; a planner that does not look would break it."""
        model, free = zoo.model("gpt2-xl"), zoo.cluster("4x2-10g")
        times_ms, again = [], []
        for memory_gb in (40.0, 16.0, 12.0, 8.0, 7.0):
            devices = tuple(replace(device, memory_gb=memory_gb) for device in free.devices)
            made = plan(model, replace(free, devices=devices), 16, effort=0.2)
            assert max(made.predicted.peak_memory_gb.values()) <= memory_gb * (1 + 1e-9)
            times_ms.append(made.iteration_ms)
            again.append(sum(stage.recompute for stage in made.stages))
        assert times_ms[-1] > times_ms[0] * 1.1
        assert again[0] == 0 < again[-1]

    def test_of_equally_fast_plans_the_one_with_less_memory_is_taken(self):
        """One stage alone is as fast in any order of blocks; only one microbatch need be held."""
        model = even_model(1, 1, 1)
        layers = tuple(replace(layer, activation_bytes=1e9) for layer in model.layers)
        devices = (replace(flat_cluster(1).devices[0], memory_gb=100.0),)
        made = plan(replace(model, layers=layers), replace(flat_cluster(1), devices=devices), 8)
        assert made.predicted.peak_memory_gb["d0"] < 1.5

    def test_layers_are_matched_to_devices_of_different_memory(self):
        """Twelve layers that just fit twelve devices, each only one of them; in no usual order."""
        layer = LayerProfile(
            name="l", forward_ms=1, backward_ms=1, output_bytes=1e6, parameter_bytes=1e9
        )
        sizes_gb = [1.0 + 0.5 * index for index in range(12)]
        model = ModelProfile(
            name="m",
            microbatch_size=1,
            layers=tuple(
                replace(layer, name=str(size), parameter_bytes=size * 1e9) for size in sizes_gb
            ),
            optimizer_bytes_per_parameter_byte=0,
        )
        free = flat_cluster(12)
        random.Random(3).shuffle(sizes_gb)
        devices = tuple(
            replace(device, memory_gb=size + 0.1)
            for device, size in zip(free.devices, sizes_gb, strict=True)
        )
        made = plan(model, replace(free, devices=devices), 2, effort=0.01)
        assert check(made, strict_memory=True).errors == ()
        assert made.num_stages == 12

    def test_the_70b_model_fits_64_devices_of_80_gb(self):
        made = plan(zoo.model("llama-70b"), zoo.cluster("8x8-100g"), 16, effort=0.05)
        assert check(made, strict_memory=True).errors == ()
        cost = CostModel(made.model, made.cluster)
        for index, stage in enumerate(made.stages):
            held = made.schedule.most_in_flight(index)
            for parts, total in zip(
                cost.memory_parts(stage, held), cost.memory_gb(stage, held), strict=True
            ):
                state = parts.parameter_gb + parts.gradient_gb + parts.optimizer_gb
                ratio = 1 + made.model.optimizer_bytes_per_parameter_byte
                assert state == pytest.approx(ratio * parts.parameter_gb)
                assert state + parts.activation_gb == pytest.approx(total)


class TestNothingFits:
    def test_the_error_says_which_stage_needs_how_much(self):
        layer = LayerProfile(
            name="l", forward_ms=1, backward_ms=1, output_bytes=1e6, parameter_bytes=1e9
        )
        model = ModelProfile(
            name="m",
            microbatch_size=1,
            layers=tuple(replace(layer, name=name) for name in "abc"),
            optimizer_bytes_per_parameter_byte=0,
        )
        cluster = expand_hosts("two", [HostGroup(devices=2, bandwidth_gb_per_s=1, memory_gb=1.5)])
        with pytest.raises(NoPlanError, match=r"needs 2(\.\d+)? GB on 'h0d\d' \(1.5 GB\)") as stop:
            plan(model, cluster, 2)
        error = stop.value
        assert error.need_gb == pytest.approx(2.0, rel=0.01)
        assert (error.memory_gb, error.exit_code) == (1.5, 3)
        assert error.layers[1] - error.layers[0] == 2
        assert set(error.devices) <= {"h0d0", "h0d1"}
        assert plan(model, cluster, 2, ignore_memory=True).predicted.peak_memory_gb
        larger = expand_hosts("two", [HostGroup(devices=2, bandwidth_gb_per_s=1, memory_gb=2.1)])
        assert plan(model, larger, 2).num_stages == 2

    def test_long_models_are_explained_too(self):
        """More layers than the search for the closest plan looks at one by one."""
        model = even_model(300, 1, 1)
        layers = tuple(replace(layer, parameter_bytes=1e8) for layer in model.layers)
        cluster = flat_cluster(2)
        devices = tuple(replace(device, memory_gb=1.0) for device in cluster.devices)
        with pytest.raises(NoPlanError) as error:
            plan(replace(model, layers=layers), replace(cluster, devices=devices), 2)
        assert error.value.need_gb > 10

    def test_the_command_ends_with_code_3(self, capfd):
        code, _, errors = run_command(capfd, "plan", "llama-70b", "1x8-pcie")
        assert code == 3
        assert errors.splitlines()[-1].startswith("pipeplan: ")


class TestWholeSamples:
    def test_kernels_cost_uneven_shares_as_the_cost_model_does(self):
        """Stages of our own shares, some of which recompute, with caps from memory."""
        uneven = capped = 0
        for seed in range(200):
            rng = random.Random(seed)
            model, cluster, microbatches = tight_instance(rng)
            problem = make_problem(model, cluster, microbatches)
            instance = problem.within_samples().kernel_instance()
            stages = tuple(
                shared_stage(instance, replace(stage, recompute=rng.random() < 0.3))
                for stage in random_cover(rng, model, cluster)
            )
            placed = placed_plan(instance, stages)
            caps, expected = _core.caps(instance, placed), expected_caps(problem, stages)
            times_ms = _core.rule_times(instance, placed, math.inf)
            if not expected:
                assert (caps, times_ms) == ([], [])
                continue
            assert caps == expected
            costs = replace(problem.cost.pipeline_costs(stages), caps=tuple(caps))
            for rule, kernel_ms in zip(PORTFOLIO, times_ms, strict=True):
                ours = SCHEDULES[rule](costs, microbatches)
                assert kernel_ms == pytest.approx(ours.iteration_ms, rel=1e-9, abs=1e-9)
            uneven += any(stage.shares for stage in stages)
            capped += min(caps) < microbatches
        assert min(uneven, capped) > 10

    def test_faster_devices_take_more(self):
        cluster = flat_cluster(3)
        devices = tuple(
            replace(device, speed=speed)
            for device, speed in zip(cluster.devices, (1.0, 3.0, 2.0), strict=True)
        )
        model = replace(even_model(2, 1, 1), microbatch_size=5)
        problem = make_problem(model, replace(cluster, devices=devices), 2)
        stage = shared_stage(problem.kernel_instance(), Stage(layers=range(2), devices=(0, 1, 2)))
        assert stage.devices == (1, 2, 0)
        assert stage.shares == (2 / 5, 2 / 5, 1 / 5)

    def test_the_bound_says_what_it_counts_on(self):
        model = replace(even_model(4, 1, 1), microbatch_size=3)
        free = flat_cluster(2)
        small = replace(
            free, devices=tuple(replace(device, memory_gb=1.0) for device in free.devices)
        )
        whole, memory, constraints = BoundLimit
        for cluster, options, expected in (
            (free, {}, (whole,)),
            (small, {}, (whole, memory)),
            (small, {"divisible": True, "ignore_memory": True}, ()),
            (small, {"ignore_memory": True, "stages": 2}, (whole, constraints)),
        ):
            assert plan(model, cluster, 2, **options).bound.limits == expected

    def test_compare_ranks_what_keeps_the_limits_first(self):
        model, cluster = zoo.model("gpt2-xl"), zoo.cluster("4x2-10g")
        rows = compare(model, cluster, 16, effort=0.1, **ONE_STAGE).rows
        rows = [r for r in rows if r.iteration_ms is not None]  # not all make a plan for this model
        rows = [r for r in rows if r.planner not in GROUP_BASELINES]
        within = [r.fits_memory and r.has_whole_samples for r in rows]
        assert within == sorted(within, reverse=True)
        assert rows[0].planner == "best"
        assert {r.has_whole_samples for r in rows} == {r.fits_memory for r in rows} == {True, False}
        breaks = [r for r in rows if not (r.fits_memory and r.has_whole_samples)]
        assert min(r.iteration_ms for r in breaks) < rows[0].iteration_ms
        assert all(r.gap is None for r in breaks)

    def test_best_is_not_slower_than_what_keeps_the_same_limits(self):
        for seed in range(8):
            rng = random.Random(seed)
            model = replace(random_model(rng, 8), microbatch_size=rng.choice([2, 4, 6]))
            cluster = random_cluster(rng, 6)
            devices = tuple(replace(device, memory_gb=0.06) for device in cluster.devices)
            comparison = compare(model, replace(cluster, devices=devices), 4, effort=0.05)
            best = next(r for r in comparison.rows if r.planner == "best")
            assert best is comparison.rows[0] or best.iteration_ms is None


def random_cover(rng, model, cluster) -> tuple[Stage, ...]:
    """Stages with no more devices than samples."""
    num_stages = rng.randint(1, min(model.num_layers, cluster.num_devices))
    devices = rng.sample(range(cluster.num_devices), cluster.num_devices)
    cuts = [0, *sorted(rng.sample(range(1, model.num_layers), num_stages - 1)), model.num_layers]
    sets = [devices[n::num_stages][: model.microbatch_size] for n in range(num_stages)]
    return tuple(
        Stage(layers=range(first, end), devices=tuple(mine))
        for (first, end), mine in zip(itertools.pairwise(cuts), sets, strict=True)
    )


def expected_caps(problem, stages) -> list[int]:
    """How many microbatches fit, by trying; [] if a stage holds none or a path is missing."""
    try:
        problem.cost.pipeline_costs(stages)
    except InputError:
        return []
    caps = []
    for stage in stages:
        fitting = [
            held
            for held in range(1, problem.num_microbatches + 1)
            if all(
                need_gb <= problem.cluster.devices[u].memory_gb * (1 + 1e-9)
                for u, need_gb in zip(
                    stage.devices, problem.cost.memory_gb(stage, held), strict=True
                )
            )
        ]
        caps.append(max(fitting, default=0))
    return caps if min(caps) > 0 else []


class TestConstraints:
    def test_random_constraints_are_kept_and_the_best_plan_is_found(self):
        """Against all placements of tiny instances; constraints that nothing keeps are refused."""
        from pipeplan.planning.planner.every_placement import all_placements

        kept = refused = 0
        for seed in range(60):
            rng = random.Random(seed)
            model = replace(random_model(rng, rng.randint(2, 4)), microbatch_size=12)
            cluster = random_cluster(rng, 3)
            asked = random_constraints(rng, model, cluster)
            try:
                problem = make_problem(model, cluster, 3, **asked)
            except InfeasibleError:
                refused += 1
                continue
            cost = CostModel(model, cluster)
            times_ms = [
                min(
                    SCHEDULES[rule](cost.pipeline_costs(stages), 3).iteration_ms
                    for rule in PORTFOLIO
                )
                for stages in all_placements(cost)
                if broken_constraint(stages, problem.limits) is None
            ]
            if not times_ms:
                with pytest.raises(InfeasibleError):
                    plan(model, cluster, 3, **asked)
                refused += 1
                continue
            made = plan(model, cluster, 3, **asked)
            assert broken_constraint(made.stages, problem.limits) is None, seed
            assert made.iteration_ms <= min(times_ms) * (1 + 1e-9), seed
            assert made.bound.lower_bound_ms <= min(times_ms) * (1 + 1e-9), seed
            assert check(made).errors == ()
            kept += 1
        assert kept > 25
        assert refused > 0

    def test_on_many_devices_too(self):
        model, cluster = zoo.model("bert-48"), zoo.cluster("2x8-100g")
        options = {
            "stages": 5, "first_on": "h1d3", "last_on": "h0d0", "without": ("h0d7", "h1d0"),
            "no_cut_after": (model.layers[10].name,),
            "together": ((model.layers[20].name, model.layers[24].name),),
        }  # fmt: skip
        made = plan(model, cluster, 8, effort=0.1, **options)
        names = [[cluster.devices[u].name for u in stage.devices] for stage in made.stages]
        assert (len(names), "h1d3" in names[0], "h0d0" in names[-1]) == (5, True, True)
        assert not {"h0d7", "h1d0"} & set(itertools.chain(*names))
        cuts = {stage.layers.stop - 1 for stage in made.stages[:-1]}
        assert not cuts & {10, 20, 21, 22, 23}
        assert made.options["without"] == ["h0d7", "h1d0"]

    def test_a_small_device_may_serve_the_first_and_the_last_stage(self):
        """Stages in proportion to speed do not fit here; those in proportion to memory do."""
        model, cluster = zoo.model("gpt2-xl"), zoo.cluster("mixed-hosts")
        asked = {"first_on": "h2d0", "last_on": "h2d0", "stages": 3, "effort": 0.1, "positions": 2}
        made = plan(model, cluster, 16, **asked)
        assert len(made.stages) == 3
        assert made.stages[0].devices == made.stages[-1].devices == (8,)
        assert check(made).errors == ()
        small = replace(cluster, devices=tuple(replace(d, memory_gb=12.0) for d in cluster.devices))
        with pytest.raises(InfeasibleError, match="no plan with 3 stages was found"):
            plan(model, small, 16, **asked)

    def test_tied_layers_stay_together(self):
        model = replace(even_model(6, 1, 1), microbatch_size=1)
        model = replace(model, tied=((model.layers[0].name, model.layers[3].name),))
        made = plan(model, flat_cluster(4), 4, keep_tied=True)
        assert made.stages[0].layers.stop >= 4
        assert plan(model, flat_cluster(4), 4).stages[0].layers.stop < 4

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            (
                {"without": ("d9",)},
                InputError,
                r"without: 'd9' is no device of 'flat'; known are d0",
            ),
            ({"no_cut_after": ("x",)}, InputError, r"no_cut_after: 'x' is no layer of"),
            ({"together": (("layer0",),)}, InputError, r"together: 'layer0' names one layer"),
            ({"together": "ab"}, InputError, r"together: 'ab' is not a list of groups"),
            ({"stages": 0}, InputError, r"stages: 0 is not at least 1"),
            ({"divisible": 1}, InputError, r"divisible: 1 is neither true nor false"),
            ({"first_on": 3}, InputError, r"first_on: 3 is not the name of a device"),
            ({"without": ("d0", "d1")}, InfeasibleError, r"without: names every device"),
            ({"stages": 5}, InfeasibleError, r"stages: 5 is more than the 3 layers"),
            (
                {"stages": 3, "positions": 1},
                InfeasibleError,
                r"stages: 3 is more than the 2 devices",
            ),
            ({"stages": 2, "max_stages": 1}, InfeasibleError, r"stages: 2 is above max_stages"),
            ({"first_on": "d0", "without": ("d0",)}, InfeasibleError, r"first_on: 'd0' is among"),
            (
                {"first_on": "d1", "last_on": "d1", "stages": 2, "positions": 1},
                InfeasibleError,
                r"'d1' cannot serve the first and the last of 2 stages",
            ),
            (
                {"first_on": "d0", "last_on": "d1", "max_stages": 1},
                InfeasibleError,
                r"would share a microbatch of one sample",
            ),
        ],
    )
    def test_what_cannot_be_is_explained(self, options, error, message):
        with pytest.raises(error, match=message):
            plan(replace(even_model(3, 1, 1), microbatch_size=1), flat_cluster(2), 2, **options)

    def test_devices_left_out_of_hosts_leave_their_links(self):
        hosts = expand_hosts(
            "h",
            [HostGroup(count=2, devices=2, bandwidth_gb_per_s=7), HostGroup(devices=1)],
            between_hosts_gb_per_s=2,
        )
        kept = [0, 1, 3, 4]
        smaller = without_devices(hosts, kept)
        full = [[hosts.bandwidth_gb_per_s[u][v] for v in kept] for u in kept]
        for u, v in itertools.permutations(range(4), 2):
            assert smaller.bandwidth_gb_per_s[u][v] == full[u][v]


def test_devices_left_out_leave_shared_links_to_the_others():
    groups = [HostGroup(count=3, devices=2, bandwidth_gb_per_s=7)]
    hosts = expand_hosts(
        "h", groups, between_hosts_gb_per_s=2, uplink_gb_per_s={"h0": 3.0, "h1": 1.0}
    )
    rack = SharedLink(name="rack", members=("h1", "h2d0"), gb_per_s=1.5)
    lone = SharedLink(name="lone", members=("h0d0",), gb_per_s=2.5)
    smaller = without_devices(replace(hosts, shared=(rack, lone)), [2, 3, 5])
    (devices,) = (link.devices for link in smaller.links if link.name == "rack")
    assert devices == {0, 1}
    assert smaller.uplink_gb_per_s == {"h1": 1.0}
    assert [link.name for link in smaller.shared] == ["rack"]


def random_constraints(rng, model, cluster) -> dict:
    names, layers = [d.name for d in cluster.devices], [layer.name for layer in model.layers]
    asked = {
        "stages": rng.randint(1, 4),
        "max_stages": rng.randint(1, 3),
        "first_on": rng.choice(names),
        "last_on": rng.choice(names),
        "without": (rng.choice(names),),
        "no_cut_after": (rng.choice(layers),),
        "together": (tuple(rng.sample(layers, 2)),),
    }
    return {name: asked[name] for name in rng.sample(sorted(asked), rng.randint(1, 3))}


class TestOptions:
    def test_there_is_one_list_of_options(self):
        assert set(OptionArguments.__annotations__) == {f.name for f in fields(PlanningOptions)}
        flags = {parameter.name for parameter in plan_command.params}
        assert flags >= set(OptionArguments.__annotations__)

    def test_plans_record_what_was_asked(self):
        options = {"stages": 2, "divisible": True, "together": (("0", "1"),)}
        made = plan(even_model(4, 1, 1), flat_cluster(2), 2, **options)
        assert made.options["together"] == [["0", "1"]]
        assert (made.options["stages"], made.options["divisible"]) == (2, True)
        assert "keep_tied" not in made.options

    def test_the_command_passes_them_on(self):
        arguments = ["vgg19", "4x2-10g", "--stages", "2", "--without", "h0d0", "--without", "h0d1"]
        arguments += ["--together", "conv1_1, conv1_2", "--effort", "0.01", "--json"]
        result = CliRunner().invoke(plan_command, arguments)
        assert result.exit_code == 0, result.output
        assert '"stages": 2' in result.stdout
        assert json.loads(result.stdout)["options"]["together"] == [["conv1_1", "conv1_2"]]
