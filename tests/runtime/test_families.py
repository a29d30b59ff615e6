"""Training by plans with several stages a rank and split backwards is ordinary training."""

import copy
import random

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from family_plans import causal_orders, random_group_stages, random_kinds  # noqa: E402
from instances import flat_cluster  # noqa: E402
from pipeplan.pipeline import Plan, Schedule  # noqa: E402
from pipeplan.profile import LayerProfile, ModelProfile  # noqa: E402
from pipeplan.runtime import Pipeline  # noqa: E402
from pipeplan.runtime.supervision.watchdog import WatchdogOptions  # noqa: E402
from runtime.samples import (  # noqa: E402
    WIDTH,
    TinyLanguageModel,
    make_mlp,
    mlp_loss,
    token_loss,
)
from runtime.workers import run_ranks  # noqa: E402

MAX_RANKS = 5
NUM_PLANS = 60
KINDS = ("mlp", "tied", "shared", "transformer")


class SharedLayers(nn.Sequential):
    """Layers 0, 2 and 5 share a weight, 1 and 3 another one; a layer knows dropout."""

    def __init__(self):
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(7)]
        for other in (2, 5):
            layers[other][0].weight = layers[0][0].weight
        layers[3][0].bias = layers[1][0].bias
        super().__init__(*layers, nn.Linear(WIDTH, 4))


def make_case(kind):
    """A model, its layer names, its loss and a function that makes batches."""
    torch.manual_seed(5)
    if kind in ("mlp", "shared"):
        model = make_mlp(8) if kind == "mlp" else SharedLayers()
        names = [name for name, _ in model.named_children()]

        def batch(generator, rows):
            sizes = ((rows, WIDTH), (rows, 4))
            return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes)

        return model.double(), names, mlp_loss, batch
    model = TinyLanguageModel(6, tied=kind == "tied")
    names = ["before", *(f"blocks.{i}" for i in range(6)), "behind"]

    def token_batch(generator, rows):
        tokens = torch.randint(17, (rows, 6), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return model.double(), names, token_loss, token_batch


def profile_of(names, rows):
    return ModelProfile(
        name="sample",
        microbatch_size=rows,
        layers=tuple(
            LayerProfile(
                name=name,
                forward_ms=1 + i % 3,
                backward_ms=2,
                weight_grad_ms=1,
                output_bytes=1e5,
                parameter_bytes=1e5,
            )
            for i, name in enumerate(names)
        ),
    )


def random_plan(rng, names):
    """Any chain of groups, replicas and shares, any causal order of F, B, I and W."""
    cluster = flat_cluster(MAX_RANKS, 1.0)
    profile = profile_of(names, rng.randint(3, 6))
    while True:
        num_stages = rng.randint(2, len(names))
        stages = random_group_stages(rng, profile, cluster, num_stages)
        if max(stage.num_replicas for stage in stages) <= 3:
            break
    microbatches = rng.randint(1, 5)
    kinds = random_kinds(rng, num_stages, microbatches)
    return Plan(
        model=profile,
        cluster=cluster,
        microbatches=microbatches,
        stages=stages,
        schedule=Schedule(causal_orders(rng, stages, kinds)),
        planner="test",
    )


def random_cases(count, seed=7):
    rng = random.Random(seed)
    kinds = [KINDS[index % len(KINDS)] for index in range(count)]
    return [(kind, random_plan(rng, make_case(kind)[1])) for kind in kinds]


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def compare(rank, cases):
    """For each plan what differs from one process in two steps, in float64."""
    findings = []
    for number, (kind, plan) in enumerate(cases):
        model, _, loss_fn, make_batch = make_case(kind)
        reference = copy.deepcopy(model)
        known = dict(reference.named_parameters(remove_duplicate=False))
        optimizer = make_optimizer(reference.parameters())
        generator, problems = torch.Generator().manual_seed(number), []
        rows = plan.microbatches * plan.model.microbatch_size - (number % 2)
        options = {"watchdog": WatchdogOptions(hang_timeout_s=60), "clip_norm": 100.0}
        with Pipeline(plan, model, loss_fn, make_optimizer, **options) as pipeline:
            for step in range(2):
                data = make_batch(generator, rows)
                loss = pipeline.step(*data)
                optimizer.zero_grad()
                expected = loss_fn(reference(data[0]), data[1])
                expected.backward()
                expected = expected.detach()
                norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
                if abs(loss - float(expected)) > 1e-10:
                    problems.append(f"step {step}: loss {loss}, not {float(expected)}")
                if abs(pipeline.gradient_norm - float(norm)) > 1e-9:
                    problems.append(f"step {step}: norm {pipeline.gradient_norm}, not {norm}")
                named = pipeline.model.named_parameters() if pipeline.model is not None else ()
                for name, parameter in named:
                    error = float((parameter.grad - known[name].grad).abs().max())
                    if not error <= 1e-10:
                        problems.append(f"step {step}: gradient of {name} off by {error:.2g}")
                optimizer.step()
            evaluated = pipeline.evaluate(*data)
            with torch.no_grad():
                expected = float(loss_fn(reference(data[0]), data[1]))
            if abs(evaluated - expected) > 1e-10:
                problems.append(f"evaluation {evaluated}, not {expected}")
            state = pipeline.full_state_dict()
            if rank == 0 and set(state) != set(reference.state_dict()):
                problems.append(f"state has {sorted(set(state) ^ set(reference.state_dict()))}")
        findings.append(problems)
    return findings


def check_cases(cases):
    make_optimizer([nn.Parameter(torch.zeros(1))])  # loads modules before ranks are forked
    for rank, findings in enumerate(run_ranks(MAX_RANKS, compare, cases, timeout_s=900)):
        for (kind, plan), problems in zip(cases, findings, strict=True):
            assert not problems, f"rank {rank}, {kind}, {plan.stages}: {problems}"


def test_a_dozen_of_the_random_plans():
    cases = random_cases(NUM_PLANS)[::5]
    assert sum(plan.uses_families for _, plan in cases) >= 10
    check_cases(cases)


@pytest.mark.full
def test_all_random_plans():
    check_cases(random_cases(NUM_PLANS))
