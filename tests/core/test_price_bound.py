"""The bound by prices of devices against an enemy: all plans, planted plans, and cases by hand."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from core.test_any_shares import optimum_ms, tiny_problem
from core.test_relaxed_bound import known_ms, planted
from enemies import Enemy, enemy_cluster, enemy_model, fastest_known_ms
from instances import model_of
from pipeplan import _core
from pipeplan.cluster import Cluster, Device
from pipeplan.cost import CostModel
from pipeplan.pipeline import Bound, BoundLimit, BoundScope, Stage
from pipeplan.planning.door import make_problem, plan

STEPS = 2e7


def priced(problem, proved_ms: float, limit_ms: float, steps: float = STEPS) -> float:
    instance = problem.bound_instance(problem.kernel_instance())
    return _core.price_bound(instance, proved_ms, limit_ms, steps)


def work_ms(problem) -> float:
    cost = problem.cost.with_least_times()
    work = float((cost.forward_ms_L + cost.backward_ms_L).sum())
    return problem.num_microbatches * work / float(cost.speed_D.sum())


def problem_of(model, speeds, rates, num_microbatches, latency_us=0.0, **options):
    cluster = Cluster(
        name="c",
        devices=tuple(Device(name=f"d{u}", speed=speed) for u, speed in enumerate(speeds)),
        bandwidth_gb_per_s=tuple(tuple(map(float, row)) for row in rates),
        latency_us=latency_us,
    )
    return make_problem(model, cluster, num_microbatches, **options).within_samples()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("count", [15, pytest.param(800, marks=pytest.mark.full)])
def test_no_plan_with_any_shares_is_below_it(whole, memory, count):
    """All plans under all schedules. The work bound, or next to nothing, is what it starts from."""
    raised = 0
    for seed in range(count):
        rng = random.Random(seed)
        problem = tiny_problem(rng, whole=whole, memory=memory)
        optimum = optimum_ms(rng, problem, whole=whole)
        if not 0 < optimum < math.inf:
            continue
        start = rng.choice([1.0, 0.9, 0.3]) * min(optimum, max(work_ms(problem), 1e-6))
        limit_ms = optimum * rng.choice([1.0, 1.001, 1.5, 20.0])
        bound_ms = priced(problem, min(start, optimum), limit_ms, rng.choice([1e4, STEPS]))
        assert bound_ms <= optimum * (1 + 1e-9), seed
        raised += bound_ms > start * 1.05
    assert raised > 0.1 * count


@pytest.mark.parametrize("count", [25, pytest.param(2000, marks=pytest.mark.full)])
def test_no_plan_of_a_mixture_is_below_it(count):
    """Structured links, cards, measured times, free layers, extreme speeds; all placements."""
    for seed in range(count):
        rng = random.Random(f"mixture {seed}")
        model = enemy_model(rng, rng.randint(1, 4))
        cluster = enemy_cluster(rng, model, rng.choice([1, 2, 3, 3]))
        M, whole = rng.choice([1, 2, 3, 30]), rng.random() < 0.5
        problem = make_problem(model, cluster, M, divisible=not whole, ignore_memory=True)
        problem = problem.within_samples()
        enemy = Enemy(model=model, cluster=cluster, num_microbatches=M)
        limits = (BoundLimit.WHOLE_SAMPLES,) if whole else ()
        scope = Bound(lower_bound_ms=0.0, scope=BoundScope.ANY, limits=limits)
        least = fastest_known_ms(rng, enemy, scope, most=200)
        if not 0 < least < math.inf:
            continue
        start = least * rng.choice([1e-6, 0.1, 0.5])
        assert priced(problem, start, least * rng.choice([1.01, 3.0])) <= least * (1 + 1e-9), seed


@pytest.mark.parametrize("num_devices", [6, 11, 16, 25, 40])
@pytest.mark.parametrize("count", [5, pytest.param(150, marks=pytest.mark.full)])
def test_no_planted_plan_is_below_it(num_devices, count):
    """Stages that use just the devices and links that they need; even shares."""
    for seed in range(count):
        rng = random.Random(seed)
        model, cluster, stages = planted(rng, num_devices, rng.randint(1, min(6, num_devices)))
        model = replace(model, microbatch_size=rng.choice([1, 64, 840]))
        M, whole = rng.choice([1, 4, 16]), rng.random() < 0.5
        samples = model.microbatch_size
        if whole and any(samples % stage.num_replicas for stage in stages):
            continue
        known = known_ms(CostModel(model, cluster), stages, M)
        problem = make_problem(model, cluster, M, divisible=not whole).within_samples()
        bound_ms = priced(problem, known * 0.2, known * rng.choice([1.0, 1.3]))
        assert bound_ms <= known * (1 + 1e-9), seed


def awkward_instance(rng: random.Random):
    """Few devices; much latency and one heavy layer, or works and bytes of all kinds."""
    V, L = rng.randint(2, 5), rng.randint(2, 7)
    speeds = [rng.choice([1.0, 1.0, 2.0, 3.0, rng.uniform(0.5, 3)]) for _ in range(V)]
    speeds[0] += 1e-6
    is_late = rng.random() < 0.6
    parameters = [rng.choice([0, 0, 1e6, 1e7, 1e15]) for _ in range(L)]
    if is_late:
        works = [rng.choice([1e-3, 1e-2, 0.1, 1, rng.uniform(0, 3)]) for _ in range(L - 1)]
        layers = [(work, 0) for work in (*works, rng.uniform(5, 30))]
    else:
        works = [rng.choice([0.5, 1, 2, 5, rng.uniform(0, 10)]) for _ in range(L)]
        layers = [(work, rng.choice([0, 1e5, 1e6])) for work in works]
    model = model_of(*((*layer, p) for layer, p in zip(layers, parameters, strict=True)))
    cluster = Cluster(
        name="awkward",
        devices=tuple(Device(name=f"d{u}", speed=speed) for u, speed in enumerate(speeds)),
        bandwidth_gb_per_s=tuple(
            tuple(rng.choice([1.0, 10.0, 100.0]) for _ in speeds) for _ in speeds
        ),
        latency_us=rng.choice([500.0, 1e3, 3e3, 1e4] if is_late else [0.0, 0.0, 1e3, 5e3]),
    )
    return replace(model, microbatch_size=rng.choice([1, 2, 4])), cluster


@pytest.mark.parametrize(
    "seeds",
    [(*range(60), 132, 221), pytest.param(range(2000), marks=pytest.mark.full)],
    ids=["few", "many"],
)
def test_no_plan_that_best_finds_is_below_it(seeds):
    """With limits just above the plan, whatever is dropped wrongly leaves nothing below them."""
    for seed in seeds:
        rng = random.Random(seed)
        model, cluster = awkward_instance(rng)
        options = {"divisible": rng.random() < 0.5, "positions": 1, "split_backward": False}
        M = rng.choice([1, 2, 4, 8])
        known = plan(model, cluster, M, effort=0.1, **options).iteration_ms
        problem = make_problem(model, cluster, M, **options).within_samples()
        for slack in (1.0003, 1.003, 1.05):
            bound_ms = priced(problem, known * 0.7, known * slack)
            assert bound_ms <= known * (1 + 1e-9), (seed, slack)


def test_a_pair_carries_the_product_of_two_shares():
    """Four devices send to four: each pair carries a sixteenth."""
    model = replace(model_of((40, 1.6e8, 0), (40, 0, 0)), microbatch_size=4)
    problem = problem_of(model, [1.0] * 7 + [1.0 + 1e-6], [[1.0] * 8] * 8, 8)
    halves = (
        Stage(layers=range(1), devices=(0, 1, 2, 3)),
        Stage(layers=range(1, 2), devices=(4, 5, 6, 7)),
    )
    known = known_ms(problem.cost, halves, 8)
    assert known == pytest.approx(9 * 20 + 20)
    assert 0.9 * known <= priced(problem, 0.7 * known, 1.05 * known) <= known * (1 + 1e-9)


def test_whole_samples_do_not_melt():
    """Three devices share four samples: one of them takes two."""
    model = replace(model_of((12, 0, 0)), microbatch_size=4)
    problem = problem_of(model, [1.0, 1.0, 1.0 + 1e-6], [[1e3] * 3] * 3, 8)
    known = 8 * 24 / 2
    bound_ms = priced(problem, work_ms(problem), 1.2 * known)
    assert 0.98 * known <= bound_ms <= known * (1 + 1e-9)


def test_a_fast_device_serves_once():
    """Every layer wants the one fast device, which can have but one of them."""
    speeds, layers = [1.0, 1.01, 1.02, 1.03, 4.0], [(1, 0, 1e15)] * 5
    problem = problem_of(model_of(*layers), speeds, [[1e3] * 5] * 5, 64)
    best = (Stage(layers=range(1), devices=(3,)), Stage(layers=range(1, 5), devices=(4,)))
    known = known_ms(problem.cost, best, 64)
    bound_ms = priced(problem, work_ms(problem), 1.2 * known)
    assert 0.95 * known <= bound_ms <= known * (1 + 1e-9)


def test_a_fast_ring_serves_once():
    """Two pairs are needed, and just one has a fast link: the other all-reduce takes long."""
    rates = [[0.1] * 4 for _ in range(4)]
    rates[0][1] = rates[1][0] = 100.0
    model = replace(model_of((10, 0, 1e7), (10, 0, 1e7)), microbatch_size=2)
    problem = problem_of(model, [1.0, 1.0, 1.0, 1.0 + 1e-6], rates, 8)
    bounds = [
        priced(replace(problem, cost=CostModel(model, cluster)), 80.0, 200.0)
        for cluster in (
            problem.cluster,
            replace(problem.cluster, bandwidth_gb_per_s=((100.0,) * 4,) * 4),
        )
    ]
    assert bounds[0] > bounds[1] * 1.1


def test_an_all_reduce_overlaps_the_backwards_in_front():
    """The second stage reduces while the first one still runs its backward."""
    model = replace(model_of((20, 0, 1e15), (200, 0, 3e7)), microbatch_size=2)
    problem = problem_of(model, [1.0, 1.0, 1.0 + 1e-6], [[1.0] * 3] * 3, 1)
    stages = (Stage(layers=range(1), devices=(0,)), Stage(layers=range(1, 2), devices=(1, 2)))
    known = known_ms(problem.cost, stages, 1)
    assert known == pytest.approx(20 + 200 + 30)
    assert 0.95 * known <= priced(problem, 0.7 * known, 1.2 * known) <= known * (1 + 1e-9)


@pytest.mark.parametrize("num_layers", [129, 300])
def test_prices_of_some_cuts_are_proved_on_all(num_layers):
    """The best plan is cut where the search for prices does not look."""
    for seed in range(3):
        rng = random.Random(seed)
        speeds = [1.0, 2.0, 3.0, 5.0]
        cuts = [0, *sorted(rng.sample(range(1, num_layers), 3)), num_layers]
        layers = []
        for (first, end), speed in zip(itertools.pairwise(cuts), speeds, strict=True):
            layers += [(speed / (end - first), 0, 1e15)] * (end - first)
        problem = problem_of(model_of(*layers), speeds, [[1e3] * 4] * 4, 256)
        stages = tuple(
            Stage(layers=range(first, end), devices=(u,))
            for u, (first, end) in enumerate(itertools.pairwise(cuts))
        )
        known = known_ms(problem.cost, stages, 256)
        for start, limit in ((0.5, 1.5), (0.99, 1.001)):
            assert priced(problem, known * start, known * limit) <= known * (1 + 1e-9)


def test_it_starts_from_what_is_known_and_is_the_same_every_time():
    rng = random.Random(5)
    rates = [[10.0 ** rng.uniform(0, 2) for _ in range(20)] for _ in range(20)]
    speeds = [rng.uniform(0.4, 1.0) for _ in range(20)]
    model = replace(model_of(*[(1, 1e6, 2e7)] * 30), microbatch_size=16)
    problem = problem_of(model, speeds, rates, 8)
    start = work_ms(problem)
    bounds = [priced(problem, start, 2 * start, steps) for steps in (STEPS, STEPS, 0)]
    assert bounds[0] == bounds[1] > 1.05 * start
    assert bounds[2] >= start
    assert priced(problem, 0.0, 2 * start) == 0.0
    assert priced(problem, start, math.inf) == start
    assert priced(problem, start, start) == start


def test_a_range_of_heads_keeps_its_least_head():
    """A slower device makes the first stage cheaper, and its head a little longer.

    Both heads are mostly latency, so most of the time they are in one range. The limit lies just
    above the only plan that is so fast: there the longer head leaves the second stage too little
    time. If the cheaper label's head were kept, nothing would be left within the limit. The second
    stage's device has just the fastest rate of its option, or the option would leave more time.
    """
    c, M, step = 40.0, 256, 0.004  # ms of latency; `kFinestStep` of rates
    speeds = (1.0, 1.2, 1.2 * math.exp(241 * step) * (1 + 1e-7) - 2.2)
    for k in range(20):
        model = model_of((0.02 * c, 0, 1e15), ((0.6 + 0.01 * k) * 1.2 * c, 0, 1e15))
        problem = problem_of(
            replace(model, microbatch_size=1), speeds, [[1e6] * 3] * 3, M, latency_us=1e3 * c
        )
        stages = tuple(Stage(layers=range(n, n + 1), devices=(n,)) for n in range(2))
        known = known_ms(problem.cost, stages, M)
        bound_ms = priced(problem, 0.995 * known, (1 + 2e-6) * known)
        assert 0.999 * known <= bound_ms <= known * (1 + 1e-9), k
