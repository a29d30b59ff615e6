"""Several stages a device and cut backwards by default: where, and what the files say."""

import itertools
import json
import random
from dataclasses import replace

import pytest

from command_line import run_command
from instances import even_model, flat_cluster, random_cluster, random_model
from one_stage import ONE_STAGE
from one_stage import plan as plain_plan
from pipeplan import check, compare, plan_global_batch, whatif, zoo
from pipeplan.cluster import HostGroup, expand_hosts
from pipeplan.documents.files import read_plan, write_cluster, write_model, write_plan
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.pipeline import Bound, BoundScope
from pipeplan.planning import registry
from pipeplan.planning.door import plan
from pipeplan.planning.planner.chains import WORTH
from pipeplan.planning.whatif.question import recorded_options
from pipeplan.report.analysis.plan_analysis import analyse

PUBLISHED = ("interleaved-1f1b", "zb-h1", "zb-v")


def without_weight_gradients(model):
    return replace(model, layers=tuple(replace(x, weight_grad_ms=None) for x in model.layers))


def test_the_default_is_auto_and_cut_where_the_profile_says_how():
    model, cluster = zoo.model("bert-large"), zoo.cluster("4x2-10g")
    found = plan(model, cluster, 4, effort=0.1)
    assert found == plan(model, cluster, 4, positions="auto", split_backward=True, effort=0.1)
    assert (found.options["positions"], found.options["split_backward"]) == ("auto", True)
    assert any(block.kind == "I" for order in found.schedule for block in order)
    bare = without_weight_gradients(model)
    found = plan(bare, cluster, 4, effort=0.1)
    assert found == plan(bare, cluster, 4, split_backward=False, effort=0.1)
    assert found.options["positions"] == "auto"
    assert "split_backward" not in found.options
    assert found.uses_families
    assert all(block.kind in "FB" for order in found.schedule for block in order)


def test_a_plain_plan_is_that_of_before_to_the_byte(tmp_path):
    model, cluster = zoo.model("vgg19"), zoo.cluster("4x2-10g")
    made = plain_plan(model, cluster, 8, effort=0.1)
    write_plan(made, tmp_path / "a.plan.json")
    document = json.loads((tmp_path / "a.plan.json").read_text())
    assert document["format"] == "pipeplan.plan/1"
    assert sorted(document["options"]) == ["bound", "effort", "microbatches", "planner"]
    # A record without the two options stands for one stage a device, whatever the default is.
    asked = recorded_options(read_plan(tmp_path / "a.plan.json"))
    assert (asked["positions"], asked["split_backward"]) == (1, False)
    answer = whatif(made, slower={"h0d1": 0.5}, effort=0.1)
    assert answer.replanned is not None
    assert not answer.replanned.uses_families


@pytest.mark.parametrize(("devices", "microbatches"), [(65, 4), (4, 513)])
def test_large_problems_are_planned_as_before(devices, microbatches):
    model, cluster = even_model(12, 3, 6), flat_cluster(devices)
    made = plan(model, cluster, microbatches, effort=0.01)
    assert made == plain_plan(model, cluster, microbatches, effort=0.01)
    asked = plan(model, cluster, microbatches, effort=0.01, positions=2)
    assert asked.options["positions"] == 2
    assert not check(asked).errors


@pytest.mark.parametrize("seed", range(8))
def test_a_default_plan_is_valid_and_worth_it(seed):
    rng = random.Random(seed)
    model = random_model(rng, rng.randint(2, 12))
    layers = tuple(replace(x, weight_grad_ms=x.backward_ms / 2) for x in model.layers)
    model = replace(model, layers=layers)
    cluster = random_cluster(rng, rng.randint(1, 6))
    if rng.random() < 0.5:
        devices = [replace(d, speed=rng.choice([0.5, 1.0, 2.0])) for d in cluster.devices]
        cluster = replace(cluster, devices=tuple(devices))
    microbatches, divisible = rng.choice([2, 8, 40]), rng.random() < 0.5
    asked = {"effort": 0.1, "divisible": divisible}
    one, found = (make(model, cluster, microbatches, **asked) for make in (plain_plan, plan))
    assert not check(found).errors
    if not found.uses_families:
        assert replace(found, options={}) == replace(one, options={})
        return
    assert found.bound is None or found.bound.scope is BoundScope.FAMILIES
    if found.iteration_ms > one.iteration_ms * WORTH:
        others = compare(model, cluster, microbatches, PUBLISHED, **asked)
        assert any(row.iteration_ms < one.iteration_ms for row in others.rows if row.keeps_limits)


def test_one_stage_a_device_says_of_which_plans_it_is_optimal(tmp_path):
    model, cluster = even_model(1, 3, 6), flat_cluster(2)
    found = plan(model, cluster, 4)
    write_plan(found, tmp_path / "x.plan.json")
    document = json.loads((tmp_path / "x.plan.json").read_text())
    assert document["format"] == "pipeplan.plan/1"
    assert document["predicted"]["bound_scope"] == "even-shares"
    words = analyse(read_plan(tmp_path / "x.plan.json")).verdict
    assert words == "optimal among plans with one stage a device"
    assert analyse(plain_plan(model, cluster, 4)).verdict == "optimal"


def test_schedules_of_others_and_other_planners_keep_one_stage_a_device():
    model, cluster = zoo.model("bert-large"), zoo.cluster("1x8-pcie")
    for schedule in ("1f1b", "portfolio"):
        made = plan(model, cluster, 4, schedule=schedule, effort=0.01)
        assert made == plain_plan(model, cluster, 4, schedule=schedule, effort=0.01)
    made = plan(model, cluster, 4, "spp")
    assert made == plain_plan(model, cluster, 4, "spp")
    assert "positions" not in made.options


EFFORTS = (0.1, 0.3, 1.0, 3.0, 10.0)


def efforts_on(seed):
    """A random problem: links of all kinds, memory limits, whole samples or not."""
    rng = random.Random(f"effort {seed}")
    model = random_model(rng, rng.randint(6, 16))
    layers = tuple(replace(x, weight_grad_ms=x.backward_ms / 2) for x in model.layers)
    model = replace(model, layers=layers) if seed % 3 else model
    cluster = random_cluster(rng, rng.randint(3, 8))
    if seed % 2:
        one = plain_plan(model, cluster, 6, effort=0.1)
        room_gb = 1.1 * max(one.require_predicted().peak_memory_gb.values())
        devices = tuple(replace(device, memory_gb=room_gb) for device in cluster.devices)
        cluster = replace(cluster, devices=devices)
    return model, cluster, rng.choice([3, 6, 12]), {"divisible": seed % 4 < 2}


def check_efforts(efforts, model, cluster, microbatches, options):
    found = [plan(model, cluster, microbatches, effort=e, **options) for e in efforts]
    for less, more in itertools.pairwise(found):
        assert more.iteration_ms <= less.iteration_ms * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_more_effort_is_never_slower(seed):
    check_efforts((0.01, 0.05, *EFFORTS[:3], 1.5), *efforts_on(seed))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3, 15))
def test_much_more_effort_is_never_slower(seed):
    check_efforts(EFFORTS, *efforts_on(seed))


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["1x8-pcie", "4x2-10g", "4x2-10g-no-shared-card", "random-8"])
@pytest.mark.parametrize("model", ["bert-large", "resnet152", "vgg19"])
def test_more_effort_is_never_slower_on_the_zoo(model, cluster):
    check_efforts(EFFORTS, zoo.model(model), zoo.cluster(cluster), 8, {})


def test_gaps_have_one_yardstick():
    model, cluster = zoo.model("bert-large"), zoo.cluster("1x8-pcie")
    found = compare(model, cluster, 8, ["best", "spp", "zb-h1"], effort=0.1)
    bound_ms = found.plans["best"].bound.lower_bound_ms
    assert found.plans["best"].bound.scope is BoundScope.FAMILIES
    kept = [row for row in found.rows if row.keeps_limits]
    assert len(kept) > 1
    for row in kept:
        assert row.gap == pytest.approx(row.iteration_ms / bound_ms - 1)
    plain = compare(model, cluster, 8, ["best", "zb-h1"], effort=0.1, **ONE_STAGE)
    gaps = {row.planner: row.gap for row in plain.rows}
    assert gaps["best"] is not None
    assert gaps["zb-h1"] is None


def test_a_global_batch_is_planned_with_several_stages_a_device():
    model, cluster = zoo.model("bert-large"), zoo.cluster("1x8-pcie")
    found = plan_global_batch(model, cluster, 16, effort=0.05)
    plain = plan_global_batch(model, cluster, 16, effort=0.05, **ONE_STAGE)
    assert found.uses_families
    assert found.iteration_ms < plain.iteration_ms


def test_stages_count_all_stages():
    model, cluster = zoo.model("bert-large"), zoo.cluster("1x8-pcie")
    found = plan(model, cluster, 4, stages=8, effort=0.1)
    assert len(found.stages) == 8
    assert len(plan(model, cluster, 4, max_stages=9, effort=0.1).stages) <= 9


def test_wrong_choices_are_refused():
    with pytest.raises(InputError, match="split_backward: 'yes' is neither true, false nor null"):
        plan(even_model(2, 1, 1), flat_cluster(2), 2, split_backward="yes")


def test_exports_name_options_that_help(tmp_path, capfd):
    path = str(tmp_path / "x.plan.json")
    plan_it = ("plan", "bert-large", "1x8-pcie", "-m", "4", "--effort", "0.1", "-o", path)
    advice = {"chakra": "--positions 1 --no-split-backward"}
    for target in ("chakra", "deepspeed", "megatron"):
        options = advice.get(target, "--uniform-replicas --schedule 1f1b")
        assert run_command(capfd, *plan_it)[0] == 0
        export = ("export", path, "--to", target, "-o", str(tmp_path / "x.out"))
        code, _, err = run_command(capfd, *export)
        assert code == 3
        assert f"or plan with {options}" in err
        assert run_command(capfd, *plan_it, *options.split())[0] == 0
        assert run_command(capfd, *export)[0] == 0


def test_clusters_too_large_for_several_stages_a_device_say_so(tmp_path, capfd):
    write_model(even_model(12, 3, 6), tmp_path / "m.model.json")
    write_cluster(flat_cluster(129), tmp_path / "c.cluster.json")
    arguments = ("plan", tmp_path / "m.model.json", tmp_path / "c.cluster.json", "-m", "4")
    for asked in (("--positions", "2"), ()):
        code, _, err = run_command(capfd, *arguments, "--effort", "0.01", *asked)
        assert code == 0
        assert ("are searched up to 128 devices only" in err) == bool(asked)


def test_equal_replicas_keep_one_stage_a_device(tmp_path, capfd):
    path = tmp_path / "m.model.json"
    write_model(zoo.model("bert-large"), path)
    output = str(tmp_path / "x.plan.json")
    arguments = ["plan", str(path), "1x8-pcie", "-m", "4", "--effort", "0.01", "-o", output]
    assert run_command(capfd, *arguments, "--uniform-replicas")[0] == 0
    assert not read_plan(output).uses_families
    assert run_command(capfd, *arguments)[0] == 0
    assert read_plan(output).uses_families


def test_whole_backwards_are_tried_where_cut_ones_keep_too_much():
    layers = [
        replace(layer, weight_grad_bytes=40 * layer.activation_bytes)
        for layer in zoo.model("bert-large").layers
    ]
    model = replace(zoo.model("bert-large"), layers=tuple(layers))
    hosts = [HostGroup(count=4, devices=2, bandwidth_gb_per_s=12, memory_gb=6)]
    cluster = expand_hosts("small", hosts, between_hosts_gb_per_s=3)
    found, whole = (plan(model, cluster, 8, split_backward=cut) for cut in (None, False))
    assert whole.uses_families
    # With cut backwards no chain fits: with these alone it is the plan with one stage a device, at
    # 1.29 times. The search without cut ones has more time for whole ones, and may find more.
    assert found.iteration_ms <= whole.iteration_ms * 1.02


def test_more_stages_than_devices_can_be_asked_for():
    model, cluster = even_model(8, 1.0, 2.0), flat_cluster(2)
    found = plan(model, cluster, 4, stages=5)
    assert len(found.stages) == 5
    assert check(found).ok
    with pytest.raises(InfeasibleError, match="stages: 5 is more than 2 on each of the 2 devices"):
        plan(model, cluster, 4, stages=5, positions=2)
    with pytest.raises(InfeasibleError, match="stages: 5 is more than the 2 devices"):
        plan(model, cluster, 4, stages=5, **ONE_STAGE)


def test_gaps_name_the_plans_that_the_bound_speaks_of():
    bound = Bound(lower_bound_ms=10.0, scope=BoundScope.EVEN_SHARES)
    words = "at most 10 % from the optimum"
    assert bound.verdict(11.0) == words
    assert bound.verdict(11.0, other_plans=True) == f"{words} among plans with one stage a device"
    assert bound.verdict(30.0) == "at most 200 % from the optimum"


ASKED = [("--positions", "2"), ("--split-backward",), ("--shard-optimizer",)]


@pytest.mark.parametrize("asked", ASKED, ids=" ".join)
@pytest.mark.parametrize("planner", ["spp", "exact", "zb-v"])
def test_an_option_that_a_planner_does_not_know_is_refused(planner, asked, capfd):
    arguments = ("plan", "vgg19", "1x8-pcie", "-m", "4", "--planner", planner, *asked)
    for more in ((), ("--global-batch", "64")):
        given = [each for each in arguments if not more or each not in ("-m", "4")]
        code, out, err = run_command(capfd, *given, *more)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1
        assert f"planner {planner!r} knows no {asked[0]}; leave it out, or use" in err


def test_an_option_that_another_package_does_not_know_is_refused(monkeypatch):
    mine = {**registry.PLANNERS, "mine": registry.PLANNERS["spp"]}
    monkeypatch.setattr(registry, "find", lambda kind, name, own, group: mine[name])
    model, cluster = even_model(4, 1, 1), flat_cluster(2)
    assert plan(model, cluster, 2, "mine", positions=1, split_backward=False)
    with pytest.raises(InputError, match="planner 'mine' knows no --split-backward"):
        plan(model, cluster, 2, "mine", split_backward=True)


def test_a_comparison_gives_no_options_to_other_packages(monkeypatch):
    seen = []

    def mine(problem):
        seen.append(problem.options)
        return registry.PLANNERS["spp"](problem)

    known = {**registry.PLANNERS, "mine": mine}
    monkeypatch.setattr(registry, "find", lambda kind, name, own, group: known[name])
    asked = {"positions": 2, "split_backward": False, "shard_optimizer": True}
    found = compare(even_model(4, 1, 1), flat_cluster(2), 2, ["best", "mine"], **asked)
    assert [(o.positions, o.split_backward, o.shard_optimizer) for o in seen] == [(1, False, False)]
    assert "positions" not in found.plans["mine"].options


def test_a_comparison_gives_options_to_planners_that_know_them():
    model, cluster = zoo.model("bert-large"), zoo.cluster("1x8-pcie")
    asked = {"positions": 2, "split_backward": True, "shard_optimizer": True}
    found = compare(model, cluster, 4, ["best", "spp", "zb-v"], effort=0.01, **asked)
    assert asked.items() <= found.plans["best"].options.items()
    for name in ("spp", "zb-v"):
        assert found.plans[name] == plan(model, cluster, 4, name, effort=0.01)
    # Who asks what another planner would do now does not ask for more than it knows.
    answer = whatif(found.plans["best"], slower={"h0d1": 0.5}, planner="spp")
    assert answer.replanned is not None
