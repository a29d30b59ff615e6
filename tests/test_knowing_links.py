"""Planning with shared links: knowing never costs, and nothing changes where there are none."""

import random
import time
from dataclasses import replace

import pytest

import pipeplan
from one_stage import make_problem, plan
from pipeplan import check, zoo
from pipeplan.cluster import Cluster
from pipeplan.cost import CostModel
from pipeplan.planning.baselines import BASELINES, GROUP_BASELINES
from pipeplan.planning.door import Attempt, attempt
from pipeplan.planning.limits import Limits
from pipeplan.planning.options import OptionArguments
from pipeplan.planning.planner.best import plan_best
from pipeplan.planning.planner.unshared import plan_knowing_links
from pipeplan.planning.problem import Draft, Problem, SearchInterrupted
from pipeplan.replaying import simulate
from pipeplan.simulator import run_plan, run_schedule
from shared_plans import random_cluster, random_model


def unshared(cluster: Cluster) -> Cluster:
    return replace(cluster, uplink_gb_per_s=None, shared=())


def keeps(made: Attempt, limits: Limits) -> bool:
    fits = made.broken.fits_memory or not limits.memory
    is_whole = made.broken.has_whole_samples or not limits.whole_samples
    return fits and is_whole and made.broken.constraint is None


def mixed_problem(rng: random.Random) -> Problem:
    model = replace(random_model(rng), microbatch_size=rng.choice([1, 2, 3, 4, 8]))
    cluster, microbatches = random_cluster(rng), rng.choice([1, 2, 4, 8, 16])
    state = 1 + model.optimizer_bytes_per_parameter_byte
    whole_gb = (
        sum(
            state * layer.parameter_bytes + microbatches * layer.activation_bytes
            for layer in model.layers
        )
        / 1e9
    )
    if rng.random() < 0.7:
        part = rng.uniform(0.1, 1.0)
        memories_gb = [whole_gb * part * rng.uniform(0.6, 1.3) for _ in cluster.devices]
        devices = tuple(
            replace(device, memory_gb=max(1e-5, memory_gb))
            for device, memory_gb in zip(cluster.devices, memories_gb, strict=True)
        )
        cluster = replace(cluster, devices=devices)
    options: OptionArguments = {"effort": 0.1, "divisible": rng.random() < 0.3}
    if rng.random() < 0.2:
        options["max_stages"] = rng.randint(1, 4)
    if rng.random() < 0.2:
        options["first_on"] = rng.choice(cluster.devices).name
    return make_problem(model, cluster, microbatches, **options)


class TestKnowing:
    @pytest.mark.parametrize("model", ["vgg19", "resnet152", "bert-large", "gpt2-xl"])
    @pytest.mark.parametrize("name", ["4x2-10g", "4x2-25g", "mixed-hosts"])
    def test_never_slower_than_not_knowing(self, model, name):
        cluster = zoo.cluster(name)
        options = {"effort": 0.2, "divisible": True, "ignore_memory": True}
        blind = plan(zoo.model(model), unshared(cluster), 8, **options)
        aware = plan(zoo.model(model), cluster, 8, **options)
        assert check(aware).ok
        really_ms = run_plan(replace(blind, cluster=cluster))[1].iteration_ms
        assert aware.iteration_ms <= really_ms * (1 + 1e-7)  # proofs are so exact
        # Sharing only lengthens transfers: the blind bound holds, and ours is no worse.
        assert aware.bound.lower_bound_ms >= blind.bound.lower_bound_ms * (1 - 1e-7)

    def test_a_card_that_matters_is_planned_for(self):
        """Replicas of the early layers of a CNN on two hosts flood their cards."""
        cluster, model = zoo.cluster("4x2-10g"), zoo.model("vgg19")
        options = {"divisible": True, "ignore_memory": True}
        blind = plan(model, unshared(cluster), 16, **options)
        aware = plan(model, cluster, 16, **options)
        really_ms = run_plan(replace(blind, cluster=cluster))[1].iteration_ms
        assert really_ms > 1.5 * aware.iteration_ms
        assert aware.bound.gap(aware.iteration_ms) < 1e-6

    def test_published_planners_plan_as_without_and_are_judged_with(self):
        cluster, model = zoo.cluster("4x2-10g"), zoo.model("vgg19")
        for planner in ("spp", "dapple", "pipedream", "alpa"):
            alone = plan(model, unshared(cluster), 8, planner)
            shared = plan(model, cluster, 8, planner)
            assert shared.iteration_ms >= alone.iteration_ms * (1 - 1e-9)
            assert check(shared).ok
            if planner != "spp":  # which keeps the fastest of its numbers of stages
                assert shared.stages == alone.stages

    def test_a_time_limit_is_kept(self):
        began_s = time.monotonic()
        made = plan(
            zoo.model("gpt2-xl"), zoo.cluster("8x8-100g"), 16, time_limit_s=0.4, effort=1000
        )
        assert check(made).ok
        assert time.monotonic() - began_s < 5  # a busy machine is slow

    def test_ctrl_c_without_links_gives_a_plan(self):
        """Stopped while it plans without links, planning gives the best plan so far."""
        cost = CostModel(zoo.model("vgg19"), zoo.cluster("4x2-10g"))
        problem = Problem(cost=cost, num_microbatches=4)

        def stopped(problem: Problem, starts, late) -> Draft:
            draft = plan_best(replace(problem, effort=0.05), starts, late)
            raise SearchInterrupted(replace(draft, schedule_guarantee_ms=1.0))

        with pytest.raises(SearchInterrupted) as caught:
            plan_knowing_links(problem, stopped, lambda _: ())
        draft = caught.value.draft
        assert draft.schedule_guarantee_ms != 1.0, "a guarantee without links is none"
        run = run_schedule(cost.pipeline_costs(draft.stages), draft.codes)
        assert draft.iteration_ms == pytest.approx(run.iteration_ms, abs=1e-9)

    def test_without_links_is_planned_only_where_the_optimum_is_not_proven(self):
        """VGG-19's plan is proven on four hosts, ResNet-152's is not."""
        for name, expected in (("vgg19", [True]), ("resnet152", [False, True])):
            cost = CostModel(zoo.model(name), zoo.cluster("4x2-10g"))
            limits = Limits(memory=False, whole_samples=False)
            problem = Problem(cost=cost, num_microbatches=16, limits=limits, effort=0.1)
            planned = []

            def plan_from(problem: Problem, starts, late, planned=planned) -> Draft:
                draft = plan_best(problem, starts, late)
                planned.append(problem.cost.contention is not None)
                return draft

            plan_knowing_links(problem, plan_from, lambda _: ())
            assert planned == expected

    @pytest.mark.parametrize("count", [40, pytest.param(1500, marks=pytest.mark.full)])
    def test_never_slower_than_a_published_plan_within_the_same_limits(self, count):
        """Shared links, speeds, little memory and constraints, all mixed."""
        num_within = 0
        for seed in range(count):
            problem = mixed_problem(random.Random(seed))
            best = attempt(problem, "best")
            if best.plan is not None:
                assert check(best.plan, strict_memory=problem.limits.memory).errors == ()
                assert keeps(best, problem.limits), seed
            for name in ("spp", *(name for name in BASELINES if name not in GROUP_BASELINES)):
                other = attempt(problem, name)
                if other.plan is None or not keeps(other, problem.limits):
                    continue
                num_within += 1
                assert best.plan is not None, (seed, name)
                assert best.plan.iteration_ms <= other.plan.iteration_ms * (1 + 1e-7) + 1e-9, (
                    seed,
                    name,
                )
        assert num_within > 2 * count

    def test_links_that_bind_nobody_cost_nothing(self):
        """With cards as fast as all pairs together the plan without them stays optimal."""
        cluster = replace(zoo.cluster("4x2-25g"), uplink_gb_per_s=1e3)
        alone = plan(zoo.model("bert-large"), unshared(cluster), 8)
        shared = plan(zoo.model("bert-large"), cluster, 8)
        assert shared.iteration_ms <= alone.iteration_ms * (1 + 1e-9)

    def test_clusters_without_links_never_meet_their_code(self, monkeypatch):
        """Plans without shared links are made, checked and simulated as if there were none."""

        def meets(*arguments, **named):
            raise AssertionError("code of shared links")

        for place in (
            "pipeplan.cost.Contention",
            "pipeplan.cost.CostModel._flows",
            "pipeplan._core.SharedLinks",
            "pipeplan._core.PlanFlows",
            "pipeplan._core.GroupFlows",
            "pipeplan.plain_sharing.Sharing.__init__",
        ):
            monkeypatch.setattr(place, meets)
        with pytest.raises(AssertionError, match="code of shared links"):
            plan(zoo.model("vgg19"), zoo.cluster("4x2-10g"), 4)
        cluster = unshared(zoo.cluster("4x2-10g"))
        made = [plan(zoo.model("vgg19"), cluster, 4, name) for name in ("best", "spp", "dapple")]
        made.append(pipeplan.plan(zoo.model("bert-large"), cluster, 4, positions=2, effort=0.1))
        for each in made:
            assert check(each).ok
            assert simulate(each).iteration_ms == each.iteration_ms
