"""Training by a plan is ordinary training: gradients, losses and parameters, to rounding."""

import copy
import random

import pytest

torch = pytest.importorskip("torch")

from pipeplan.runtime import Pipeline  # noqa: E402
from pipeplan.runtime.supervision.watchdog import WatchdogOptions  # noqa: E402
from runtime.samples import make_case, random_plan  # noqa: E402
from runtime.workers import run_ranks, share_from_first  # noqa: E402

NUM_STEPS = 20
NUM_PLANS = 100
MAX_RANKS = 5


def batches(make_batch, plan, num_steps):
    generator = torch.Generator().manual_seed(11)
    rows = plan.microbatches * plan.model.microbatch_size
    # One row less than the plan's: microbatches of two sizes.
    rows -= plan.microbatches > 1 and plan.model.microbatch_size > max(
        stage.num_replicas for stage in plan.stages
    )
    return [make_batch(generator, rows) for _ in range(num_steps)]


def make_optimizer(parameters):
    # Not Adam: it turns the rounding of a gradient that is zero (a key's bias) into whole steps.
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train_alone(model, loss_fn, data):
    optimizer = make_optimizer(model.parameters())
    losses, first_gradients = [], {}
    for step, (inputs, targets) in enumerate(data):
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        if step == 0:
            first_gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, first_gradients, model.state_dict()


def as_doubles(batch):
    return tuple(part.double() if part.is_floating_point() else part for part in batch)


def compare_doubles(rank, cases):
    """For each plan, the parameters whose gradients are off by more than 1e-10, in float64."""
    findings = []
    for kind, plan in cases:
        model, _, loss_fn, make_batch = make_case(kind)
        reference = copy.deepcopy(model.double())
        data = as_doubles(batches(make_batch, plan, 1)[0])
        with Pipeline(
            plan, model, loss_fn, make_optimizer, watchdog=WatchdogOptions(hang_timeout_s=60)
        ) as pipeline:
            pipeline.step(*data)
            found = dict(pipeline.model.named_parameters()) if pipeline.model is not None else {}
        loss_fn(reference(data[0]), data[1]).backward()
        known = dict(reference.named_parameters(remove_duplicate=False))
        findings.append(
            [
                f"gradient of {name} off by {error:.2g}"
                for name, parameter in found.items()
                if (error := float((parameter.grad - known[name].grad).abs().max())) > 1e-10
            ]
        )
    return findings


def train_by_plans(rank, cases):
    """For each plan whether losses, gradients and parameters are those of one process."""
    findings = []
    for kind, plan in cases:
        model, _, loss_fn, make_batch = make_case(kind)
        reference = copy.deepcopy(model)
        data = batches(make_batch, plan, NUM_STEPS)
        with Pipeline(
            plan, model, loss_fn, make_optimizer, watchdog=WatchdogOptions(hang_timeout_s=60)
        ) as pipeline:
            losses = [pipeline.step(*data[0])]
            gradients = (
                {n: p.grad.clone() for n, p in pipeline.model.named_parameters()}
                if pipeline.model is not None
                else {}
            )
            losses += [pipeline.step(*batch) for batch in data[1:]]
            state = pipeline.full_state_dict()
        known = dict(reference.named_parameters(remove_duplicate=False))
        first = {id(p): n for n, p in reversed(list(known.items()))}
        alone, expected, expected_state = share_from_first(
            lambda: train_alone(reference, loss_fn, data)  # noqa: B023 - called at once
        )
        problems = []
        if losses != pytest.approx(alone, rel=1e-5, abs=1e-6):
            problems.append(f"losses {losses} != {alone}")
        for name, gradient in gradients.items():
            wanted = expected[first[id(known[name])]]
            error = (gradient - wanted).norm() / (wanted.norm() + 1e-12)
            if error > 1e-5:
                problems.append(f"gradient of {name} off by {error:.2g}")
        if rank == 0:
            if set(state) != set(expected_state):
                problems.append(f"state has {sorted(set(state) ^ set(expected_state))}")
            for name, value in expected_state.items():
                if not torch.allclose(state[name], value, rtol=1e-3, atol=1e-4):
                    problems.append(f"{name} differs after {NUM_STEPS} steps")
        findings.append(problems)
    return findings


def random_cases(count, seed=3):
    rng = random.Random(seed)
    cases = []
    for index in range(count):
        kind = ("mlp", "transformer", "tied")[index % 3]
        names = make_case(kind)[1]
        cases.append((kind, random_plan(rng, names, MAX_RANKS)))
    return cases


def check_cases(cases, train=train_by_plans):
    # All plans share one process group, which saves most of the time.
    for rank, findings in enumerate(run_ranks(MAX_RANKS, train, cases, timeout_s=600)):
        for (kind, plan), problems in zip(cases, findings, strict=True):
            assert not problems, f"rank {rank}, {kind}, {plan.stages}: {problems}"


def test_a_tenth_of_the_random_plans():
    check_cases(random_cases(NUM_PLANS)[::10])


@pytest.mark.full
def test_all_random_plans():
    check_cases(random_cases(NUM_PLANS))


def test_gradients_in_float64_of_a_few_random_plans():
    check_cases(random_cases(NUM_PLANS, seed=4)[::20], compare_doubles)


@pytest.mark.full
def test_gradients_in_float64_of_all_random_plans():
    check_cases(random_cases(NUM_PLANS, seed=4), compare_doubles)
