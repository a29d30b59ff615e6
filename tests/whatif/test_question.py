"""What if: the old plan after a change, a new one, and the outlook."""

import random
from dataclasses import replace

import pytest

from instances import random_cluster, random_model, random_schedule, random_stages
from one_stage import plan
from pipeplan import zoo
from pipeplan.checker import check
from pipeplan.cluster import HostGroup, expand_hosts
from pipeplan.errors import InputError
from pipeplan.pipeline import Plan
from pipeplan.planning.whatif.carrying import carry_over
from pipeplan.planning.whatif.changed_cluster import apply_changes, known_names
from pipeplan.planning.whatif.changes import Changes
from pipeplan.planning.whatif.outlook import ProspectKind, outlook
from pipeplan.planning.whatif.parsing import parse_changes
from pipeplan.planning.whatif.question import recorded_options, whatif
from pipeplan.replaying import replay_plan


@pytest.fixture(scope="module")
def bert() -> Plan:
    return plan(zoo.model("bert-large"), zoo.cluster("4x2-10g"), 8)


def random_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    num_layers, num_devices = rng.randint(1, 6), rng.randint(2, 6)
    stages = random_stages(rng, num_layers, num_devices, shares=True)
    microbatches = rng.randint(1, 6)
    return Plan(
        model=random_model(rng, num_layers),
        cluster=random_cluster(rng, num_devices),
        microbatches=microbatches,
        stages=stages,
        schedule=random_schedule(rng, len(stages), microbatches),
        planner="random",
    )


# ------------------------------------------------------------------------ the old plan


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_without_some_replicas_is_valid_and_replayed(seed):
    old = random_plan(seed)
    rng = random.Random(seed)
    lost = {rng.randrange(old.cluster.num_devices)}
    names = tuple(old.cluster.devices[n].name for n in lost)
    carried = carry_over(old, apply_changes(old.cluster, Changes(lose=names)))
    orphaned = [n for n, stage in enumerate(old.stages) if set(stage.devices) <= lost]
    if orphaned:
        assert carried.plan is None
        assert carried.problem.startswith(f"stage {orphaned[0]} has no device left (d")
        return
    assert check(carried.plan).ok
    for before, after in zip(old.stages, carried.plan.stages, strict=True):
        named = [old.cluster.devices[d].name for d in before.devices if d not in lost]
        assert [carried.plan.cluster.devices[d].name for d in after.devices] == named
        assert sum(after.device_shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("samples", "lost", "left"),
    [
        ((2, 1, 1), 0, (2, 2)),  # as even as can be, and so it stays
        ((2, 1, 1), 1, (2, 2)),
        ((6, 1, 1), 1, (7, 1)),  # in proportion to what they had
        ((4, 3, 1), 0, (6, 2)),
        ((1.5, 1.5, 1), 2, (2, 2)),  # parts of samples stay parts
        ((2.5, 1, 0.5), 0, (8 / 3, 4 / 3)),
    ],
)
def test_shares_are_redone_for_the_replicas_that_are_left(bert, samples, lost, left):
    whole = sum(samples)
    model = replace(bert.model, microbatch_size=int(whole))
    cluster = expand_hosts("three", [HostGroup(devices=3, bandwidth_gb_per_s=12.0)])
    made = plan(model, cluster, 2, planner="data-parallel")
    (stage,) = made.stages
    shared = replace(stage, shares=tuple(count / whole for count in samples))
    made = replace(made, stages=(shared,), predicted=None)
    name = cluster.devices[stage.devices[lost]].name
    carried = carry_over(made, apply_changes(cluster, Changes(lose=(name,)))).plan
    after = carried.stages[0].device_shares
    assert [share * whole for share in after] == pytest.approx(left)


def test_a_change_that_does_not_touch_the_plan_costs_nothing(bert):
    answer = whatif(bert, add=["1x2"])
    assert answer.cost == 0
    assert answer.cost_replanned < -0.05
    assert answer.won_back == pytest.approx(-answer.cost_replanned)
    assert answer.kept_problem is None


def test_a_straggler_costs_and_a_new_plan_wins_back(bert):
    answer = whatif(bert, slower={"h1d0": 0.5})
    assert answer.before.iteration_ms == pytest.approx(bert.iteration_ms)
    assert answer.kept.stages == bert.stages
    by_hand = replace(bert, cluster=answer.kept.cluster, predicted=None)
    assert answer.kept.iteration_ms == replay_plan(by_hand).plan.iteration_ms
    assert answer.cost > 0.3
    assert 0 <= answer.cost_replanned < answer.cost
    assert check(answer.replanned).ok
    assert answer.replanned.cluster.devices[2].speed == 0.5
    assert answer.document()["changes"] == ["h1d0 at 0.5x speed"]


def test_a_plan_that_lost_its_only_device_stops(bert):
    alone = plan(bert.model, bert.cluster, 8, stages=8)
    name = alone.cluster.devices[alone.stages[3].devices[0]].name
    answer = whatif(alone, lose=[name])
    assert answer.kept is None
    assert answer.kept_problem == f"stage 3 has no device left ({name})"
    # Eight stages were asked for, and seven devices are left.
    assert answer.replanned is None
    assert "stages: 8 is more than the 7 devices" in answer.replanned_problem
    assert answer.cost is None
    assert answer.won_back is None


def test_a_plan_that_does_not_fit_any_more_is_not_the_answer(bert):
    tight = expand_hosts(
        "tight",
        [HostGroup(count=4, devices=2, bandwidth_gb_per_s=12.0, memory_gb=9.0)],
        between_hosts_gb_per_s=1.25,
    )
    old = plan(bert.model, tight, 8)
    replicated = next(stage for stage in old.stages if stage.num_replicas > 1)
    answer = whatif(old, lose=[tight.devices[replicated.devices[0]].name])
    if answer.kept_problem is not None:
        assert " GB on " in answer.kept_problem
        assert not answer.is_kept_best
    assert not check(answer.replanned).warnings


def test_the_old_plan_stays_where_it_is_best(bert):
    answer = whatif(bert, slower={"h1d0": 1.0})
    assert answer.replanned.iteration_ms <= answer.kept.iteration_ms * (1 + 1e-9)
    assert answer.cost == 0


def test_a_cut_link_stops_the_plan_or_not(bert):
    pair = next(stage.devices for stage in bert.stages if stage.num_replicas > 1)[:2]
    names = tuple(bert.cluster.devices[n].name for n in pair)
    answer = whatif(bert, links={names: 0})
    assert answer.kept is None
    assert "needs a path from" in answer.kept_problem
    assert check(answer.replanned).ok


def test_a_question_without_a_change_is_refused(bert):
    with pytest.raises(InputError, match="names no change"):
        whatif(bert)


def test_the_options_of_the_plan_hold_for_the_new_one(bert):
    asked = plan(bert.model, bert.cluster, 8, stages=3, without=("h3d1", "h0d0"))
    assert recorded_options(asked) == {
        "effort": 1.0,
        "stages": 3,
        "without": ("h3d1", "h0d0"),
        "positions": 1,
        "split_backward": False,
    }
    answer = whatif(asked, lose=["h0d0"])
    assert len(answer.replanned.stages) == 3
    used = {
        answer.replanned.cluster.devices[d].name for s in answer.replanned.stages for d in s.devices
    }
    assert "h3d1" not in used
    first = plan(bert.model, bert.cluster, 8, first_on="h2d0")
    gone = whatif(first, lose=["h2d0"])
    assert gone.replanned_problem == "first_on: 'h2d0' is gone, and the plan asks for it"


def test_options_that_make_no_sense_are_left_out(bert):
    odd = replace(bert, options={"effort": "much", "stages": -1, "ignore_memory": 1, "x": object()})
    assert recorded_options(odd) == {"positions": 1, "split_backward": False}
    assert whatif(odd, slower={"h1d0": 0.5}).replanned is not None


# -------------------------------------------------------------------------- the outlook


def test_the_outlook_ranks_harm_and_help(bert):
    found = outlook(bert)
    harm = [each for each in found.prospects if each.kind.is_harm]
    gain = [each for each in found.prospects if not each.kind.is_harm]
    assert found.prospects == (*harm, *gain)
    assert {each.kind for each in harm} == {
        ProspectKind.STRAGGLER,
        ProspectKind.LOSS,
        ProspectKind.SLOW_LINK,
    }
    assert [each.what for each in gain if each.kind is ProspectKind.DEVICE]
    kept = [float("inf") if each.kept_ms is None else each.kept_ms for each in harm]
    assert kept == sorted(kept, reverse=True)
    replanned = [each.replanned_ms for each in gain]
    assert replanned == sorted(replanned)
    for each in found.prospects:
        if each.kept_problem is None and each.kept_ms is not None:
            assert each.replanned_ms <= each.kept_ms * (1 + 1e-9)


def test_every_option_of_the_outlook_gives_the_same_answer(bert):
    for each in outlook(bert).prospects:
        if each.options is None:
            continue
        option, _, text = each.options.partition(" ")
        field = {"--lose": "lose", "--slower": "slower", "--link": "links"}[option]
        changes = parse_changes(known_names(bert.cluster), **{field: [text]})
        kept = carry_over(bert, apply_changes(bert.cluster, changes)).plan
        assert (kept and kept.iteration_ms) == each.kept_ms


@pytest.mark.parametrize("cluster", ["1x8-pcie", "random-8", "mixed-hosts"])
def test_an_outlook_for_every_kind_of_cluster(cluster):
    made = plan(zoo.model("vgg19"), zoo.cluster(cluster), 4, effort=0.1)
    found = outlook(made)
    assert all(each.replanned_ms for each in found.prospects)
    hosts = [each.what for each in found.prospects if each.what.startswith("one more host")]
    assert bool(hosts) == (cluster != "1x8-pcie")  # links to a second host are not known there


def test_an_outlook_for_a_single_device():
    model = zoo.model("vgg19")
    made = plan(model, expand_hosts("one", [HostGroup(devices=1)]), 2)
    (only,) = outlook(made).prospects
    assert only.what == "h0d0 at half speed"
    assert only.kept_ms == pytest.approx(2 * made.iteration_ms)
