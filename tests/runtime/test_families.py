"""Training by plans with several stages a rank and split backwards is ordinary training."""

import copy
import json
import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from families.samples import schedule_of  # noqa: E402
from family_plans import causal_orders, random_group_stages, random_kinds  # noqa: E402
from instances import flat_cluster  # noqa: E402
from pipeplan import zoo  # noqa: E402
from pipeplan.errors import RuntimeMismatchError  # noqa: E402
from pipeplan.pipeline import Plan, Schedule, Stage  # noqa: E402
from pipeplan.planning.door import plan as plan_with  # noqa: E402
from pipeplan.profile import LayerProfile, ModelProfile  # noqa: E402
from pipeplan.runtime import Pipeline  # noqa: E402
from pipeplan.runtime.supervision.watchdog import WatchdogOptions  # noqa: E402
from runtime.samples import (  # noqa: E402
    WIDTH,
    TinyLanguageModel,
    cut_plan,
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


class CrossedLayers(nn.Sequential):
    """Two pairs of layers share weights of one size; one pair lies inside of the other."""

    def __init__(self):
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(7)]
        for first, other in ((1, 6), (3, 4)):
            layers[other][0].weight = layers[first][0].weight
        super().__init__(*layers, nn.Linear(WIDTH, 4))


CHAINS = {"mlp": lambda: make_mlp(8), "shared": SharedLayers, "crossed": CrossedLayers}


def make_case(kind):
    """A model, its layer names, its loss and a function that makes batches."""
    torch.manual_seed(5)
    if kind in CHAINS:
        model = CHAINS[kind]()
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
        shard_optimizer=rng.random() < 0.3,
    )


def planned_plan(rng, names):
    """What `best` makes of some layers of a known model, on devices and links that differ."""
    known = zoo.model(rng.choice(["bert-large", "vgg19", "resnet152", "transformer-big"]))
    taken = sorted(rng.sample(range(known.num_layers), len(names)))
    layers = zip(taken, names, strict=True)
    model = replace(
        known,
        microbatch_size=rng.randint(3, 6),
        layers=tuple(replace(known.layers[index], name=name, at=()) for index, name in layers),
        tied=(),
    )
    cluster = flat_cluster(MAX_RANKS)
    rates = [
        [rng.choice([0.5, 1.25, 3.0, 12.0]) for _ in range(MAX_RANKS)] for _ in cluster.devices
    ]
    speeds = rng.choice([(1.0,), (1.0, 2.0)])
    devices = [replace(device, speed=rng.choice(speeds)) for device in cluster.devices]
    cluster = replace(cluster, devices=tuple(devices), bandwidth_gb_per_s=tuple(map(tuple, rates)))
    options = {"positions": "auto", "split_backward": True}
    return plan_with(model, cluster, rng.randint(2, 6), "best", **options)


def random_cases(count, seed=7):
    """Every third of them is made by the planner."""
    rng = random.Random(seed)
    kinds = [KINDS[index % len(KINDS)] for index in range(count)]
    make = [planned_plan if index % 3 == 1 else random_plan for index in range(count)]
    return [(kind, make(rng, make_case(kind)[1])) for kind, make in zip(kinds, make, strict=True)]


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
    cases = random_cases(12)
    assert sum(plan.uses_families for _, plan in cases) >= 10
    assert any(s.gradient_buckets > 5 and s.num_replicas > 1 for _, p in cases for s in p.stages)
    check_cases(cases)


@pytest.mark.full
@pytest.mark.parametrize("part", range(6))
def test_all_random_plans(part):
    check_cases(random_cases(NUM_PLANS)[part::6])


def written_plan(names, cuts, chain, orders, rows=4, microbatches=2, **changes):
    """A plan with stages at these cuts on these groups, by orders such as `0F0 1F0 1I0`."""
    ends = [*cuts[1:], len(names)]
    stages = tuple(
        Stage(layers=range(a, b), devices=devices, **changes)
        for a, b, devices in zip(cuts, ends, chain, strict=True)
    )
    num_devices = 1 + max(device for devices in chain for device in devices)
    return Plan(
        model=profile_of(names, rows),
        cluster=flat_cluster(num_devices, 1.0),
        microbatches=microbatches,
        stages=stages,
        schedule=schedule_of(*orders),
        planner="test",
    )


def test_ranks_sum_shared_weights_in_one_order():
    """Rank 0 is done with stage 2 first, rank 1 with stage 3: with other pairs of shared weights.

    They were exchanged for each other, at the start and in each step.
    """
    orders = (
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    )
    names = [str(i) for i in range(8)]
    for chain in ([(0,), (1,), (0,), (1,)], [(0,), (1, 2), (0,), (1, 2)]):
        check_cases([("crossed", written_plan(names, [0, 2, 4, 6], chain, orders))])


V_ORDERS = (
    "0F0 0F1 3F0 3I0 3F1 3I1 3W0 0I0 3W1 0W0 0I1 0W1",
    "1F0 2F0 1F1 2F1 2I0 1B0 2W0 2I1 1I1 2W1 1W1",
)


def v_plan(names, **changes):
    """Stages 0 and 3 on ranks 0 and 1, stages 1 and 2 on rank 2."""
    chain = [(0, 1), (2,), (2,), (1, 0)]
    return written_plan(names, [0, 2, 3, 6], chain, V_ORDERS, **changes)


def flat_plan(names):
    return cut_plan(names, [0, 3], [1, 2], 2, 4)


class Dropping(nn.Sequential):
    """Layers with dropout and batch normalisation, which remembers."""

    def __init__(self):
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(7)]
        layers[4].append(nn.BatchNorm1d(WIDTH))
        super().__init__(*layers, nn.Linear(WIDTH, 4))


def seeded(make):
    torch.manual_seed(9)
    return make()


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, 4, generator=generator)


def scene_checkpoints_resume_under_another_plan(rank, folder):
    names = [str(i) for i in range(8)]
    adam = torch.optim.AdamW

    def train(plan, first, last):
        model = seeded(lambda: make_mlp(8))
        with Pipeline(plan, model, mlp_loss, adam) as pipeline:
            assert pipeline.load(folder) == (first > 0)
            losses = [pipeline.step(*batch_of(step)) for step in range(first, last)]
            pipeline.save(folder)
            return losses, pipeline.full_state_dict()

    train(v_plan(names), 0, 2)
    train(flat_plan(names), 2, 3)
    resumed, state = train(v_plan(names), 3, 4)
    model = seeded(lambda: make_mlp(8))
    optimizer = adam(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = batch_of(step)
        loss = mlp_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    assert resumed[0] == pytest.approx(float(loss.detach()), rel=1e-5)
    if rank == 0:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def scene_traces_name_stages_and_halves(rank, folder):
    names = [str(i) for i in range(8)]
    with Pipeline(v_plan(names), seeded(lambda: make_mlp(8)), mlp_loss, torch.optim.SGD) as found:
        assert found.stages == ((0, 3), (0, 3), (1, 2))[rank]
        found.step(*batch_of(0))
        found.write_trace(folder / "trace.json")
    if rank == 0:
        events = json.loads((folder / "trace.json").read_text())["traceEvents"]
        seen = {(event["name"], event.get("cat")) for event in events}
        wanted = {("3I1", "input gradient"), ("0W0", "weight gradient"), ("1B0", "backward")}
        assert wanted <= seen
        assert any("stages 1, 2" in str(event.get("args")) for event in events)


def scene_recomputation_and_dropout(rank, folder):
    """Recomputation changes nothing, though layers drop and remember; a run repeats itself."""
    names = [str(i) for i in range(8)]
    found = []
    for changes in ({}, {"recompute": True}, {}):
        plan, model = v_plan(names, **changes), seeded(Dropping)
        with Pipeline(plan, model, mlp_loss, torch.optim.SGD, verify="off") as pipeline:
            losses = [pipeline.step(*batch_of(step)) for step in range(2)]
            state = {n: t.clone() for n, t in pipeline.model.state_dict().items()}
            found.append((losses, state))
    for losses, state in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-6)
        for name, value in state.items():
            torch.testing.assert_close(value, found[0][1][name], rtol=1e-5, atol=1e-6)


def scene_accumulation_clipping_and_half_precision(rank, folder):
    names = [str(i) for i in range(8)]
    for dtype in (None, torch.bfloat16, torch.float16):
        model = seeded(lambda: make_mlp(8))
        alone = copy.deepcopy(model)
        options = {"clip_norm": 0.1, "amp_dtype": dtype, "verify": "off" if dtype else "first-step"}
        with Pipeline(v_plan(names), model, mlp_loss, torch.optim.SGD, **options) as pipeline:
            pipeline.step(*batch_of(0), update=False)
            pipeline.step(*batch_of(1))
        both = [torch.cat(parts) for parts in zip(batch_of(0), batch_of(1), strict=True)]
        mlp_loss(alone(both[0]), both[1]).backward()
        norm = float(nn.utils.clip_grad_norm_(alone.parameters(), 0.1))
        assert pipeline.gradient_norm == pytest.approx(norm, rel=0.05 if dtype else 1e-5)
        known = dict(alone.named_parameters())
        for name, parameter in pipeline.model.named_parameters():
            tolerance = {"rtol": 0.2, "atol": 0.01} if dtype else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(parameter.grad, known[name].grad, **tolerance)


def scene_all_reduces_in_parts_start_inside_the_last_weight_half(rank, folder):
    names = [str(i) for i in range(8)]
    alone = seeded(lambda: make_mlp(8).double())
    data = [tensor.double() for tensor in batch_of(0)]
    mlp_loss(alone(data[0]), data[1]).backward()
    known = dict(alone.named_parameters())
    model = seeded(lambda: make_mlp(8).double())
    plan = v_plan(names, gradient_buckets=3)
    with Pipeline(plan, model, mlp_loss, torch.optim.SGD) as pipeline:
        pipeline.step(*data)
        for name, parameter in pipeline.model.named_parameters():
            torch.testing.assert_close(parameter.grad, known[name].grad, rtol=1e-10, atol=1e-12)
        reducer = pipeline._replica.reducer
        num_parts = len(reducer._buckets)
        assert reducer.started_inside == num_parts
        assert 2 * 2 <= num_parts <= 2 * 3 if rank < 2 else not num_parts


def scene_sharded_optimizers_update_alike(rank, folder):
    """Each replica keeps its share of the moments; checkpoints hold all of them."""
    names = [str(i) for i in range(8)]

    def groups(name, parameter):
        return {"weight_decay": 0.0 if name.endswith("bias") else 0.1}

    def train(plan, first, last):
        model = seeded(lambda: make_mlp(8).double())
        with Pipeline(plan, model, mlp_loss, adam, clip_norm=1.0, param_groups_fn=groups) as made:
            assert made.load(folder) == (first > 0)
            for step in range(first, last):
                made.step(*[tensor.double() for tensor in batch_of(step)])
            kept = {n: set(made.optimizer.state[p]) for n, p in made.model.named_parameters()}
            made.save(folder)
            return made.full_state_dict(), {name for name, slots in kept.items() if slots}

    adam = torch.optim.AdamW
    sharded = replace(v_plan(names), shard_optimizer=True)
    _, kept = train(sharded, 0, 2)
    train(flat_plan(names), 2, 3)
    train(sharded, 3, 4)
    state, kept_later = train(replace(flat_plan(names), shard_optimizer=True), 4, 5)
    found = [None] * 3
    torch.distributed.all_gather_object(found, (kept, kept_later))
    (zero, _), (one, later_one), (_, later_two) = found
    assert zero
    assert one
    assert not zero & one
    assert zero | one == {f"{i}.0.{p}" for i in (0, 1, 6) for p in ("weight", "bias")} | {
        "7.weight",
        "7.bias",
    }
    assert later_one
    assert later_two
    assert not later_one & later_two
    model = seeded(lambda: make_mlp(8).double())
    decayed = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    others = [p for n, p in model.named_parameters() if n.endswith("bias")]
    optimizer = adam(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    )
    for step in range(5):
        optimizer.zero_grad()
        inputs, targets = (tensor.double() for tensor in batch_of(step))
        mlp_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if rank == 0:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11)


class OneNorm(torch.optim.SGD):
    """Divides by the norm over all its parameters."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)

    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm([p.grad for p in held if p.grad is not None])
        for parameter in held:
            if parameter.grad is not None:
                parameter.grad.div_(norm)
        super().step()


class Counting(TinyLanguageModel):
    """Counts its forwards, outside of its layers."""

    def __init__(self):
        super().__init__(6)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, tokens):
        self.count += 1
        return super().forward(tokens)


class Carrying(TinyLanguageModel):
    """Adds the embedding to what a later layer gives."""

    def forward(self, tokens):
        first = self.embed(tokens)
        x = first
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first))


def scene_refusals(rank, folder):
    names = ["before", *(f"blocks.{i}" for i in range(6)), "behind"]
    tokens = torch.randint(17, (8, 5), generator=torch.Generator().manual_seed(0))
    plan = v_plan(names)
    for model, line in (
        (seeded(Counting), "'count' changes in each forward, outside"),
        (seeded(lambda: Carrying(6)), "found by comparing"),
    ):
        pipeline = Pipeline(plan, model, token_loss, torch.optim.SGD)
        with pytest.raises(RuntimeMismatchError, match=line):
            pipeline.step(tokens, tokens)
        pipeline.close()
    sharded = replace(flat_plan(names), shard_optimizer=True)
    with pytest.raises(RuntimeMismatchError, match="OneNorm updates a parameter by what other"):
        Pipeline(sharded, seeded(lambda: TinyLanguageModel(6)), token_loss, OneNorm)


def scene_the_comparison_sees_both_halves(rank, folder):
    """A second half that adds nothing is found, on whatever stage of a rank it is."""
    names = [str(i) for i in range(8)]
    for stage in (1, 3):
        model = seeded(lambda: make_mlp(8))
        pipeline = Pipeline(v_plan(names), model, mlp_loss, torch.optim.SGD)
        for part in pipeline._replica.parts:
            if part.stage == stage:
                part.runner.backward_weight = lambda microbatch: None
        with pytest.raises(RuntimeMismatchError, match="found by comparing"):
            pipeline.step(*batch_of(0))
        pipeline.close()


SCENES = [value for name, value in sorted(globals().items()) if name.startswith("scene_")]


def run_scene(rank, scene, folder):
    scene(rank, folder)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__.removeprefix("scene_"))
def test_scenes(scene, tmp_path):
    make_optimizer([nn.Parameter(torch.zeros(1))])
    run_ranks(3, run_scene, scene, tmp_path)
