"""Plans of the second version as nouns and as files."""

import json
import pickle
import random
from dataclasses import replace

import pytest

import pipeplan as pp
from families.samples import bucket_example, format_example, schedule_of
from instances import random_plan
from pipeplan.checker import structural_errors
from pipeplan.documents.files import plan_document
from pipeplan.documents.json_text import to_json
from pipeplan.documents.plans import parse_plan
from pipeplan.errors import InputError, PlanFileError, ScheduleError
from pipeplan.pipeline import Block, Group, Kind, Schedule, pack_codes, unpack_codes


def as_file(plan, path):
    pp.write_plan(plan, path)
    return json.loads(path.read_text())


# ----------------------------------------------------------------------------- nouns


def test_groups_are_numbered_by_their_first_stages():
    plan = format_example()
    assert plan.groups == (Group(stages=(0, 3), devices=(0,)), Group(stages=(1, 2), devices=(1,)))
    assert bucket_example().groups == (Group(stages=(0, 1), devices=(0, 1)),)
    assert plan.num_used_devices == bucket_example().num_used_devices == 2


def test_codes_of_groups_hold_stage_kind_and_microbatch():
    schedule = format_example().schedule
    assert not schedule.is_by_stage
    stages, kinds, microbatches = unpack_codes(schedule.group_codes(0))
    assert stages.tolist() == [0, 0, 0, 3, 3, 3, 3, 3, 3, 0, 0, 0]
    assert kinds.tolist() == [0, 0, 0, 0, 1, 0, 1, 0, 1, 1, 1, 1]
    assert microbatches.tolist() == [0, 1, 2, 0, 0, 1, 1, 2, 2, 0, 1, 2]
    again = Schedule.from_group_codes([schedule.group_codes(g) for g in range(2)])
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert pickle.loads(pickle.dumps(schedule)) == schedule  # noqa: S301
    assert schedule.block(0, 4) == Block(Kind.BACKWARD, 3, 0)
    assert repr(schedule) == "<Schedule of 2 groups, 24 blocks>"
    with pytest.raises(ScheduleError, match="several stages"):
        schedule.codes(0)
    with pytest.raises(ScheduleError, match="several stages"):
        schedule.to_codes()


def test_a_schedule_of_whole_backwards_by_stage_is_the_same_however_it_is_made():
    codes = [pack_codes(0, [0, 1], 0), pack_codes(1, [0, 1], 0)]
    assert Schedule.from_group_codes(codes) == Schedule.from_codes([[0, -1], [0, -1]])
    assert schedule_of("0F0 0B0", "1F0 1B0") == Schedule.from_codes([[0, -1], [0, -1]])
    by_stage = Schedule.from_codes([[0, -1], [0, -1]])
    assert [by_stage.group_codes(n).tolist() for n in range(2)] == [row.tolist() for row in codes]
    with pytest.raises(InputError, match=r"schedule\[1\]\[0\]"):
        Schedule.from_group_codes([[0], [-1]])


# ----------------------------------------------------------------------------- files


@pytest.mark.parametrize("make", [format_example, bucket_example])
def test_what_is_written_is_read(make, tmp_path):
    plan = make()
    document = as_file(plan, tmp_path / "a.plan.json")
    assert document["format"] == "pipeplan.plan/2"
    again = pp.read_plan(tmp_path / "a.plan.json")
    assert (again.stages, again.schedule) == (plan.stages, plan.schedule)
    assert again.shard_optimizer == plan.shard_optimizer
    pp.write_plan(again, tmp_path / "b.plan.json")
    assert (tmp_path / "a.plan.json").read_bytes() == (tmp_path / "b.plan.json").read_bytes()
    assert parse_plan(document).schedule == plan.schedule  # as YAML gives it: lists of texts


def test_blocks_name_their_stage_where_the_group_has_several(tmp_path):
    document = as_file(format_example(), tmp_path / "a.plan.json")
    assert document["schedule"][0][:4] == ["0F0", "0F1", "0F2", "3F0"]
    plan = format_example()
    one_each = replace(
        plan,
        stages=tuple(replace(stage, devices=(n,)) for n, stage in enumerate(plan.stages[:2])),
        schedule=schedule_of("0F0 0I0 0W0", "1F0 1B0"),
    )
    assert plan_document(one_each)["schedule"] == [["F0", "I0", "W0"], ["F0", "B0"]]


def test_a_plan_that_uses_nothing_new_stays_of_the_first_version():
    """Whichever version it is read from, its bytes are the same."""
    for seed in range(20):
        plan = random_plan(random.Random(seed))
        document = plan_document(plan)
        assert document["format"] == "pipeplan.plan/1"
        read = parse_plan(json.loads(to_json({**document, "format": "pipeplan.plan/2"})))
        assert to_json(plan_document(read)) == to_json(document)


def test_a_bound_for_families_is_written_in_the_words_of_the_version(tmp_path):
    plan = random_plan(random.Random(1))
    predicted = pp.Prediction(
        iteration_ms=1.0,
        bubble_fraction=0.0,
        peak_memory_gb={},
        bound=pp.Bound(lower_bound_ms=1.0, scope="families"),
    )
    document = plan_document(replace(plan, predicted=predicted))
    assert document["predicted"]["bound_scope"] == "even-shares"
    families = plan_document(replace(format_example(), predicted=predicted))
    assert families["predicted"]["bound_scope"] == "families"
    document["predicted"]["bound_scope"] = "families"
    with pytest.raises(PlanFileError, match=r"predicted\.bound_scope: 'families': is not part of"):
        parse_plan(json.loads(to_json(document)))


CHANGES = {
    "format: 'pipeplan.plan/3'; this reader takes 'pipeplan.plan/1' or 'pipeplan.plan/2'": {
        "format": "pipeplan.plan/3"
    },
    "shard_optimizer: is not part of 'pipeplan.plan/1'": {
        "format": "pipeplan.plan/1",
        "shard_optimizer": False,
    },
    "stages[1].gradient_buckets: is not part of 'pipeplan.plan/1'": {"format": "pipeplan.plan/1"},
    "shard_optimizer: 1 is not true or false": {"shard_optimizer": 1},
    "schedule: has 2 orders for 1 groups of devices; give one for each": {
        "schedule": [["0F0"], ["1F0"]]
    },
    "schedule[0][1]: 'F0' does not name its stage, but the group has stages 0, 1; write 0F0": {
        "schedule": [["0F0", "F0", "1F0", "1F1"]]
    },
    "schedule[0]: has 3 blocks for 2 microbatches in 2 stages": {
        "schedule": [["0F0", "1F0", "1F1"]]
    },
    "schedule[0][0]: '00F0' is no block; write F0, B0, I0 or W0": {"schedule": [["00F0"]]},
    "schedule[0][0]: '0X0' is no block": {"schedule": [["0X0"]]},
}


@pytest.mark.parametrize("message", CHANGES)
def test_files_are_refused_with_path_value_and_remedy(message):
    document = {**plan_document(bucket_example()), **CHANGES[message]}
    if message.startswith("stages"):
        del document["shard_optimizer"]
    with pytest.raises(InputError) as caught:
        parse_plan(json.loads(to_json(document)))
    assert message in str(caught.value)


def test_blocks_of_the_second_version_are_refused_in_the_first(tmp_path):
    path = tmp_path / "a.plan.json"
    document = {**as_file(format_example(), path), "format": "pipeplan.plan/1"}
    path.write_text(json.dumps(document))
    with pytest.raises(PlanFileError, match=r"stages\[2\]\.devices: 'd1' already serves stage 1"):
        pp.read_plan(path)
    document["stages"] = document["stages"][:2]
    path.write_text(json.dumps(document))
    with pytest.raises(PlanFileError, match=r"schedule\[0\]\[0\]: '0F0' is no block of format"):
        pp.read_plan(path)


@pytest.mark.parametrize("buckets", [0, 1001, 1.5, True])
def test_buckets_have_limits(buckets):
    document = plan_document(bucket_example())
    document["stages"][1]["gradient_buckets"] = buckets
    with pytest.raises(InputError, match=r"stages\[1\]\.gradient_buckets"):
        parse_plan(json.loads(to_json(document)))


def test_stages_have_all_devices_in_common_or_none():
    document = plan_document(bucket_example())
    document["stages"][1]["devices"] = ["d1"]
    with pytest.raises(InputError, match=r"stages\[1\]\.devices: 'd1' also serves stages\[0\]"):
        parse_plan(json.loads(to_json(document)))


def test_weight_gradients_have_bytes_and_a_default(tmp_path):
    layer = bucket_example().model.layers[0]
    assert layer.weight_grad_bytes == layer.activation_bytes == 5e6
    model = replace(bucket_example().model, layers=(replace(layer, weight_grad_bytes=7e6),))
    pp.write_model(bucket_example().model, tmp_path / "a.model.json")
    assert "weight_grad_bytes" not in (tmp_path / "a.model.json").read_text()
    pp.write_model(model, tmp_path / "b.model.json")
    assert pp.read_model(tmp_path / "b.model.json") == model
    with pytest.raises(InputError, match=r"weight_grad_bytes: -1 is negative"):
        replace(layer, weight_grad_bytes=-1.0)


# ----------------------------------------------------------------- what the checker says


def changed(plan, *orders, **changes):
    return replace(plan, **({"schedule": schedule_of(*orders)} if orders else {}), **changes)


def with_stage(plan, index, **changes):
    stages = list(plan.stages)
    stages[index] = replace(stages[index], **changes)
    return replace(plan, stages=tuple(stages))


GOOD = "0F0 1F0 1I0 0F1 1F1 1B1 1W0 0B0 0I1 0W1"
WRONG = {
    "schedule[0][2]: 2F0 is not a block of this group": GOOD.replace("1I0", "2F0"),
    "schedule[0][2]: 1I2 is not a block of this group": GOOD.replace("1I0", "1I2"),
    "schedule[0][4]: 1F0 stands at 1 already": GOOD.replace("1F1", "1F0"),
    "schedule[0]: does not hold every block: 1W0 missing": GOOD.replace("1W0 ", ""),
    "schedule[0]: does not hold every block: 0F1 and 0B1 missing": GOOD.replace("0F1 ", "").replace(
        " 0I1 0W1", ""
    ),
    "schedule[0]: 0B0 stands beside I0 or W0; keep B, or I and W": f"{GOOD} 0W0",
    "schedule[0]: 1W0 stands before 1I0": GOOD.replace("1I0", "x")
    .replace("1W0", "1I0")
    .replace("x", "1W0"),
    "schedule[0]: 1I0 stands before 1F0": GOOD.replace("1F0 1I0", "1I0 1F0"),
}


@pytest.mark.parametrize("message", WRONG)
def test_incomplete_orders_are_refused(message):
    assert message in structural_errors(changed(bucket_example(), WRONG[message]))


def test_the_example_has_no_errors():
    assert structural_errors(bucket_example()) == []
    assert structural_errors(format_example()) == []


def test_stages_of_a_group_have_the_same_shares():
    plan = with_stage(bucket_example(), 1, shares=(0.75, 0.25))
    assert structural_errors(plan) == [
        "stages[1].shares: device 1 takes 0.75, but 0.5 in stages[0]; a device has one share in all"
        " its stages"
    ]
    plan = with_stage(plan, 0, shares=(0.25, 0.75))  # the order of the names is free
    assert structural_errors(plan) == []


def test_backwards_are_cut_only_where_the_model_says_how():
    plan = bucket_example()
    layers = (replace(plan.model.layers[0], weight_grad_ms=None), plan.model.layers[1])
    unknown = replace(plan, model=replace(plan.model, layers=layers))
    assert structural_errors(unknown) == [
        "model.layers[0].weight_grad_ms: is missing, but stage 0 cuts its backwards in I and W;"
        " add it"
    ]
    assert structural_errors(changed(unknown, GOOD.replace("0I1 0W1", "0B1"))) == []


def test_neighbours_of_one_group_need_no_path():
    plan = bucket_example()
    one = with_stage(with_stage(plan, 0, devices=(0,)), 1, devices=(0,))
    cut = replace(plan.cluster, bandwidth_gb_per_s=((0, 0), (0, 0)))
    assert structural_errors(replace(one, cluster=cut)) == []
    errors = structural_errors(replace(plan, cluster=cut))
    assert "stages[0].devices: needs a path from 'd0' to 'd1', but the cluster has none" in errors
