"""Plans with several stages a device and split backwards: limits, refusals, files, baselines."""

import json
import random
from dataclasses import replace

import pytest

from command_line import run_command
from instances import flat_cluster, random_cluster, random_model
from one_stage import plan as plain_plan
from pipeplan import _core, zoo
from pipeplan.checker import check
from pipeplan.cluster import Cluster
from pipeplan.cost import CostModel
from pipeplan.documents.files import read_plan, write_cluster, write_plan
from pipeplan.errors import InputError
from pipeplan.group_schedules import group_orders
from pipeplan.pipeline import BoundScope, Stage, unpack_codes
from pipeplan.planning.door import make_problem, plan
from pipeplan.planning.planner.best import plan_best
from pipeplan.planning.planner.chain_bound import fixed_plan_bound_ms
from pipeplan.planning.planner.chain_starts import regular_chains
from pipeplan.planning.planner.lower_bound import work_bound_ms
from pipeplan.profile import LayerProfile, ModelProfile, TimesAt


def split_model(rng: random.Random, num_layers: int) -> ModelProfile:
    model = random_model(rng, num_layers)
    layers = tuple(
        replace(layer, weight_grad_ms=layer.backward_ms * rng.choice([0.0, 0.4, 0.5, 1.0]))
        for layer in model.layers
    )
    return replace(model, layers=layers)


def with_memory(cluster: Cluster, memory_gb: float) -> Cluster:
    devices = tuple(replace(device, memory_gb=memory_gb) for device in cluster.devices)
    return replace(cluster, devices=devices)


def own_links(name: str) -> Cluster:
    """The zoo's cluster without shared links."""
    return replace(zoo.cluster(name), uplink_gb_per_s=None, shared=())


def quick_plan(model: ModelProfile, cluster: Cluster, microbatches: int, **options):
    options = {"positions": "auto", "split_backward": True, "effort": 0.1, **options}
    return plan(model, cluster, microbatches, **options)


@pytest.mark.parametrize("seed", range(12))
def test_random_plans_are_valid_keep_limits_and_are_never_slower(seed):
    rng = random.Random(seed)
    model = split_model(rng, rng.randint(2, 14))
    cluster = random_cluster(rng, rng.randint(2, 7))
    microbatches, divisible = rng.choice([1, 3, 4, 9]), rng.random() < 0.5
    one = plain_plan(model, cluster, microbatches, effort=0.1, divisible=divisible)
    if rng.random() < 0.7:
        peak_gb = max(one.require_predicted().peak_memory_gb.values())
        cluster = with_memory(cluster, peak_gb * rng.uniform(1.0, 1.3))
        one = plain_plan(model, cluster, microbatches, effort=0.1, divisible=divisible)
    found = quick_plan(model, cluster, microbatches, divisible=divisible)
    report = check(found)
    assert not report.errors
    assert not [line for line in report.warnings if "memory" in line]
    assert found.iteration_ms <= one.iteration_ms * (1 + 1e-12)
    assert found.iteration_ms >= fixed_plan_bound_ms(found) * (1 - 1e-9)
    if found.uses_families:
        assert found.bound is None or found.bound.scope is BoundScope.FAMILIES
    else:
        assert found.stages == one.stages


@pytest.mark.parametrize("seed", [64, 69, 84, 98, 136, 145])
def test_limits_on_stages_do_not_weaken_one_stage_a_device(seed):
    rng = random.Random(seed)
    num_devices = rng.randint(2, 4)
    num_layers = rng.randint(num_devices + 2, 9)
    model, cluster = random_model(rng, num_layers), random_cluster(rng, num_devices)
    limits = {"split_backward": False, "max_stages": num_devices + 1}
    one, alone = (
        plan_best(make_problem(model, cluster, 4, positions=positions, **limits))
        for positions in ("auto", 1)
    )
    assert (one.stages, one.iteration_ms) == (alone.stages, alone.iteration_ms)
    assert one.bound == alone.bound


def test_chains_gain_and_positions_are_kept(tmp_path):
    model, cluster = zoo.model("bert-large"), own_links("4x2-25g")
    one = plain_plan(model, cluster, 4)
    for most, split in ((1, True), (2, False), (3, True)):
        found = quick_plan(model, cluster, 4, positions=most, split_backward=split)
        assert found.iteration_ms < one.iteration_ms * 0.98
        assert max(len(group.stages) for group in found.groups) <= most
        kinds = {block.kind for order in found.schedule for block in order}
        assert split or "I" not in kinds
        write_plan(found, tmp_path / "x.plan.json")
        assert json.loads((tmp_path / "x.plan.json").read_text())["format"] == "pipeplan.plan/2"
        assert read_plan(tmp_path / "x.plan.json") == found


def test_the_same_seed_gives_the_same_plan_whatever_the_threads():
    model, cluster = zoo.model("gpt2-xl"), own_links("4x2-10g")
    assert quick_plan(model, cluster, 8, num_threads=1) == quick_plan(
        model, cluster, 8, num_threads=2
    )


def test_constraints_are_kept():
    model, cluster = zoo.model("bert-large"), own_links("4x2-25g")
    names = [layer.name for layer in model.layers]
    found = quick_plan(
        model,
        cluster,
        4,
        max_stages=6,
        without=("h0d0",),
        first_on="h2d1",
        last_on="h1d0",
        no_cut_after=(names[3], names[12]),
    )
    assert not check(found).errors
    assert len(found.stages) <= 6
    assert all(0 not in stage.devices for stage in found.stages)
    assert 5 in found.stages[0].devices
    assert 2 in found.stages[-1].devices
    assert not {4, 13} & {stage.layers.stop for stage in found.stages}


def test_split_backwards_need_weight_gradients(tmp_path):
    model = replace(
        zoo.model("vgg19"),
        layers=tuple(replace(each, weight_grad_ms=None) for each in zoo.model("vgg19").layers),
    )
    with pytest.raises(InputError, match=r"split_backward: layers.0. .* has no weight_grad_ms"):
        plan(model, own_links("4x2-10g"), 4, split_backward=True)


def test_a_missing_weight_gradient_is_named_as_in_the_model():
    model = split_model(random.Random(0), 6)
    layers = [*model.layers[:4], replace(model.layers[4], weight_grad_ms=None), model.layers[5]]
    with pytest.raises(InputError, match=r"layers.4. \('layer4'\) has no weight_grad_ms"):
        quick_plan(
            replace(model, layers=tuple(layers)),
            own_links("4x2-10g"),
            2,
            no_cut_after=("layer0", "layer3"),
        )


def measured_model(num_layers: int) -> ModelProfile:
    """Half of a microbatch takes 0.6 of its time."""

    def time_ms(whole_ms: float, size: int) -> float:
        return whole_ms * (size / 8) ** 0.7

    return ModelProfile(
        name="measured",
        microbatch_size=8,
        layers=tuple(
            LayerProfile(
                name=f"layer{index}",
                forward_ms=4.0,
                backward_ms=8.0,
                weight_grad_ms=4.0,
                output_bytes=2e6,
                parameter_bytes=1e7,
                at=tuple(
                    TimesAt(
                        microbatch_size=size,
                        forward_ms=time_ms(4.0, size),
                        backward_ms=time_ms(8.0, size),
                    )
                    for size in (1, 2, 4)
                ),
            )
            for index in range(num_layers)
        ),
    )


def test_replicas_with_measured_times_keep_whole_backwards():
    model, cluster = measured_model(8), flat_cluster(4, 12.0)
    made = quick_plan(model, cluster, 4)
    assert not check(made).errors
    assert made.require_predicted().bubble_fraction >= 0
    assert made.uses_families
    for number, group in enumerate(made.groups):
        if len(group.devices) > 1:
            assert (unpack_codes(made.schedule.group_codes(number))[1] <= 1).all()


def test_schedules_do_not_cut_backwards_of_replicas_with_measured_times():
    with pytest.raises(InputError, match="stage 0 has replicas"):
        plan(measured_model(8), flat_cluster(4, 12.0), 4, planner="data-parallel", schedule="zb-h1")


@pytest.mark.parametrize("given", [0, 65, -1, "many", 1.5, True])
def test_wrong_positions_are_refused(given):
    with pytest.raises(InputError, match="positions: "):
        plan(zoo.model("vgg19"), own_links("4x2-10g"), 4, positions=given)


def test_searches_only_look_at_whole_plans():
    """Two moves at once: if the second one fails, nothing of it may stay."""
    rng = random.Random(5)
    for seed in range(30):
        model, cluster = split_model(rng, rng.randint(3, 6)), random_cluster(rng, 4)
        problem = make_problem(model, cluster, 3, divisible=True, split_backward=True)
        chains = _core.ChainModel(
            instance=problem.kernel_instance(),
            weight_ms=[layer.weight_grad_ms for layer in model.layers],
            input_ms=[layer.backward_ms - layer.weight_grad_ms for layer in model.layers],
            kept_bytes=[layer.weight_grad_bytes for layer in model.layers],
            max_positions=4,
        )
        starts = regular_chains(chains, problem.cost, max_positions=4, is_split=True)
        for _, _, found, _ in _core.search_chains(chains, starts, seed, 3, 1e5, 1e4, 2, 1):
            again = _core.ChainPlan(
                chains,
                devices=found.devices,
                group=found.group,
                end_layer=found.end_layer,
                is_split=found.is_split,
            )
            assert again.end_layer == found.end_layer


# ------------------------------------------------------------------------ published orders

UNIFORM = {
    "zb-h1": {(4, 8): 27, (8, 16): 55},
    "zb-v": {(4, 8): 51, (8, 16): 103},
    "v-half": {(4, 8): 53, (8, 16): 113},
    "v-min": {(8, 16): 123},
}
"""Units that the papers' own schedulers take, by groups and microbatches; half stages for V."""


def v_stages(size: int, *, is_v: bool) -> list[Stage]:
    devices = [*range(size), *reversed(range(size))] if is_v else list(range(size))
    return [Stage(layers=range(n, n + 1), devices=(u,)) for n, u in enumerate(devices)]


def unit_time(orders, group: list[int]) -> tuple[int, int]:
    """The time if each block takes one unit, and the most activations that a group holds."""
    last, done = max(range(len(group))), {}
    rows = [
        list(zip(*(part.tolist() for part in unpack_codes(row)), strict=True)) for row in orders
    ]
    at, free = [0] * len(rows), [0] * len(rows)
    while any(at[g] < len(rows[g]) for g in range(len(rows))):
        before = list(at)
        for g, row in enumerate(rows):
            while at[g] < len(row):
                stage, kind, m = row[at[g]]
                needs = {0: (stage - 1, 0, m), 2: (stage + 1, 2, m), 3: (stage, 2, m)}[kind]
                if kind == 0 and stage == 0:
                    ready = 0
                elif kind == 2 and stage == last:
                    ready = done.get((stage, 0, m))
                else:
                    ready = done.get(needs)
                if ready is None:
                    break
                free[g] = max(free[g], ready) + 1
                done[stage, kind, m] = free[g]
                at[g] += 1
        assert at != before, "deadlock"
    held = 0
    for row in rows:
        now = 0
        for _, kind, _ in row:
            now += {0: 1, 2: 0, 3: -1}[kind]
            held = max(held, now)
    return max(free), held


@pytest.mark.parametrize("name", UNIFORM)
def test_published_orders_are_as_fast_as_the_papers_say(name):
    for (size, microbatches), units in UNIFORM[name].items():
        stages = v_stages(size, is_v=name != "zb-h1")
        orders = group_orders(name, stages, microbatches)
        group = [stage.devices[0] for stage in stages]
        time, held = unit_time(orders, group)
        assert time <= units
        room = {"zb-h1": size, "zb-v": 2 * size, "v-half": 2 * ((size + 2) // 2)}
        assert held <= room.get(name, 2 * ((size + 4) // 3))


def test_interleaved_is_megatron_s_order():
    stages = [Stage(layers=range(n, n + 1), devices=(n % 2,)) for n in range(4)]
    first, second = group_orders("interleaved-1f1b", stages, 4)
    names = "FBIW"

    def text(order) -> str:
        parts = zip(*(part.tolist() for part in unpack_codes(order)), strict=True)
        return " ".join(f"{stage}{names[kind]}{m}" for stage, kind, m in parts)

    assert text(first).startswith("0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1")
    assert text(second).startswith("1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2")


def test_schedules_refuse_other_shapes():
    model, cluster = zoo.model("bert-large"), own_links("4x2-10g")
    assert not check(plan(model, cluster, 8, "1f1b", schedule="zb-h1")).errors
    with pytest.raises(InputError, match="zb-v needs a chain that goes down the groups and back"):
        plan(model, cluster, 8, "1f1b", schedule="zb-v")
    with pytest.raises(InputError, match="'pe' is for one stage a device"):
        plan(model, cluster, 8, "zb-v", schedule="pe")


@pytest.mark.parametrize("planner", ["interleaved-1f1b", "zb-h1", "zb-v"])
def test_published_planners_on_even_splits(planner):
    model, cluster = zoo.model("bert-large"), own_links("1x8-pcie")
    published = plan(model, cluster, 16, planner)
    assert not check(published).errors
    assert {stage.num_replicas for stage in published.stages} == {1}
    best = quick_plan(model, cluster, 16, ignore_memory=True)
    assert best.iteration_ms <= published.iteration_ms


def test_the_command_line(tmp_path, capfd):
    output = tmp_path / "x.plan.json"
    write_cluster(own_links("4x2-25g"), tmp_path / "c.cluster.json")
    arguments = [
        "plan",
        "vgg19",
        tmp_path / "c.cluster.json",
        "-m",
        "4",
        "--effort",
        "0.1",
        "-o",
        output,
    ]
    code, _, _ = run_command(capfd, *arguments, "--positions", "auto", "--split-backward", "--json")
    assert code == 0
    assert read_plan(output).options["positions"] == "auto"
    code, _, err = run_command(capfd, *arguments, "--positions", "none")
    assert code == 2
    assert "positions: 'none' is neither" in err


def test_several_stages_a_device_pay_on_shared_links_too():
    model, cluster = zoo.model("bert-large"), zoo.cluster("4x2-10g")
    one = plain_plan(model, cluster, 4)
    found = plan(model, cluster, 4, split_backward=False)
    assert check(found).errors == ()
    assert len(found.stages) > len(found.schedule)
    assert found.iteration_ms < 0.9 * one.iteration_ms


def test_chains_are_found_where_the_first_device_is_given():
    model, cluster = zoo.model("bert-large"), own_links("4x2-25g")
    asked = ({"effort": 1.0}, {"effort": 1.0, "first_on": "h3d1"})
    free, bound = (quick_plan(model, cluster, 4, **options) for options in asked)
    assert 7 in bound.stages[0].devices
    assert bound.uses_families
    assert bound.iteration_ms < 1.05 * free.iteration_ms


@pytest.mark.parametrize("seed", [0, 23, 25, 53])
def test_sharing_optimizers_out_is_never_slower(seed):
    """Less memory for state means more room; the search for it once missed what fits without."""
    rng = random.Random(seed)
    model = replace(split_model(rng, rng.randint(6, 14)), microbatch_size=4)
    cluster = flat_cluster(rng.randint(4, 6), 1.0)
    one = plain_plan(model, cluster, 3, effort=0.01)
    cluster = with_memory(cluster, max(one.require_predicted().peak_memory_gb.values()))
    whole, shared = (quick_plan(model, cluster, 3, shard_optimizer=flag) for flag in (False, True))
    assert check(shared, strict_memory=True).ok
    assert shared.iteration_ms <= whole.iteration_ms * (1 + 1e-12)


def test_parts_of_all_reduces_are_worth_an_operation():
    """Seven replicas of small layers: sixteen parts gained a thousandth, and cost 5 % when run."""
    made = plan(zoo.model("vgg19"), zoo.cluster("4x2-10g"), 8)
    cost = CostModel(made.model, made.cluster)
    work_ms = work_bound_ms(cost, 8)
    cut = [stage for stage in made.stages if stage.gradient_buckets > 1]
    assert cut
    for stage in cut:
        part_ms = cost.all_reduce_ms(stage, stage.gradient_buckets)
        assert part_ms >= work_ms / 500 * (1 - 1e-9)
