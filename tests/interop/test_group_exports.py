"""Plans with several stages a group: exported as they are, or refused with the nearest plan."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from command_line import run_command
from family_plans import causal_orders, random_family_plan, random_kinds, split_model
from instances import random_cluster, random_model
from interop.samples import STYLES, named_layers
from interop.test_exporting import (
    exported,
    megatron_arguments,
    parse_layout,
    run_python,
    stand_in,
)
from pipeplan.checker import check
from pipeplan.documents.files import read_plan, write_plan
from pipeplan.group_schedules import group_orders
from pipeplan.interop.chain_shapes import chain_of, has_1f1b_order, is_loop, is_v
from pipeplan.interop.exported import CannotExport, ExportSettings
from pipeplan.interop.exporting import FORMATS, export_plan
from pipeplan.interop.grid_plan import nearest_grid_plan
from pipeplan.pipeline import Kind, Plan, Schedule, Stage
from pipeplan.replaying import replay_plan

FEW, MANY = range(20), range(20, 520)
SEEDS = [*FEW, *(pytest.param(seed, marks=pytest.mark.full) for seed in MANY)]
ORDERS = ("interleaved-1f1b", "any", "whole")


def group_plan(rng: random.Random, *, shape: str = "loop", order: str | None = None) -> Plan:
    """A valid plan whose stages lie in a loop, a V, or anyhow, with equal replicas."""
    size, replicas = rng.randint(2, 3), rng.randint(1, 2)
    chain = {
        "loop": [*range(size)] * rng.randint(2, 3),
        "v": [*range(size), *range(size - 1, -1, -1)],
        "any": [0, 1, *(rng.randrange(size) for _ in range(4)), size - 1],
    }[shape]
    size = max(chain) + 1
    model = random_model(rng, len(chain) + rng.randint(2, 6))
    model = replace(
        split_model(rng, model),
        microbatch_size=replicas * rng.randint(1, 3),
        layers=split_model(
            rng, replace(model, layers=named_layers(model, rng.choice(list(STYLES))))
        ).layers,
    )
    cluster = random_cluster(rng, size * replicas + rng.randint(0, 1))
    devices = rng.sample(range(cluster.num_devices), size * replicas)
    inner = range(1, model.num_layers)
    cuts = [0, *sorted(rng.sample(inner, len(chain) - 1)), model.num_layers]
    stages = tuple(
        Stage(
            layers=range(cuts[n], cuts[n + 1]),
            devices=tuple(devices[group * replicas : (group + 1) * replicas]),
        )
        for n, group in enumerate(chain)
    )
    chosen = order or rng.choice(ORDERS if shape == "loop" else ORDERS[1:])
    microbatches = size * rng.randint(1, 3) if shape == "loop" else rng.randint(1, 6)
    if chosen == "interleaved-1f1b":
        schedule = Schedule.from_group_codes(group_orders(chosen, stages, microbatches))
    else:
        kinds = random_kinds(rng, len(stages), microbatches)
        if chosen == "whole":
            kinds = dict.fromkeys(kinds, (Kind.FORWARD, Kind.BACKWARD))
        schedule = Schedule(causal_orders(rng, stages, kinds))
    return Plan(
        model=model,
        cluster=cluster,
        microbatches=microbatches,
        stages=stages,
        schedule=schedule,
        planner="random",
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_megatron_gets_interleaved_plans(seed):
    """Segment i of the layout is stage i, on rank i % P; letters are layers."""
    plan = group_plan(random.Random(seed), order="interleaved-1f1b")
    size = len(plan.groups)
    arguments = megatron_arguments(exported(plan, "megatron").data.decode())
    assert int(arguments["--pipeline-model-parallel-size"]) == size
    segments = parse_layout(arguments["--pipeline-model-parallel-layout"], size)
    assert [len(segment) for segment in segments] == [len(stage.layers) for stage in plan.stages]
    assert [n % size for n in range(len(segments))] == chain_of(plan)
    assert int(arguments["--num-layers"]) == "".join(segments).count("t")
    micro, total = (int(arguments[f"--{word}-batch-size"]) for word in ("micro", "global"))
    assert total == plan.microbatches * plan.model.microbatch_size
    assert total // (micro * plan.groups[0].num_replicas) == plan.microbatches


def test_megatron_says_sharded_optimizers_and_buckets():
    plan = group_plan(random.Random(1), order="interleaved-1f1b")
    stages = tuple(replace(stage, gradient_buckets=3) for stage in plan.stages)
    done = exported(replace(plan, stages=stages, shard_optimizer=True), "megatron")
    text = done.data.decode()
    assert "    --use-distributed-optimizer\n    --overlap-grad-reduce\n" in text
    assert "Megatron-LM decides by itself how many buckets gradients have" in done.notes
    assert "--overlap-grad-reduce" not in exported(plan, "megatron").data.decode()


def swapped(plan: Plan) -> Plan:
    """The plan with the last two backwards of the last group in another order."""
    orders = [list(order) for order in plan.schedule.orders]
    places = [i for i, block in enumerate(orders[-1]) if block.kind is Kind.BACKWARD]
    a, b = places[-2:]
    orders[-1][a], orders[-1][b] = orders[-1][b], orders[-1][a]
    return replace(plan, schedule=Schedule(orders))


def test_the_names_of_microbatches_do_not_matter_but_their_order_does():
    for seed in range(40):
        rng = random.Random(seed)
        plan = group_plan(rng, order="interleaved-1f1b")
        names = rng.sample(range(plan.microbatches), plan.microbatches)
        orders = [
            [replace(block, microbatch=names[block.microbatch]) for block in order]
            for order in plan.schedule.orders
        ]
        assert has_1f1b_order(replace(plan, schedule=Schedule(orders)))
        assert not has_1f1b_order(swapped(plan))


@pytest.mark.parametrize("shape", ["loop", "v"])
@pytest.mark.parametrize("seed", SEEDS)
def test_torchtitan_gets_loops_and_vs(seed, shape):
    """Every module once; parts lie where the plan has them; the CSV names the same places."""
    plan = group_plan(random.Random(seed), shape=shape)
    done = exported(plan, "torchtitan", stem="titan")
    modules = {
        "torchtitan": stand_in("torchtitan"),
        "torchtitan.config": stand_in("torchtitan.config", ParallelismConfig=SimpleNamespace),
    }
    made = run_python(done.data.decode(), **modules)["PARALLELISM"]
    parts, size = made.module_fqns_per_model_part, made.pipeline_parallel_degree
    num_blocks = plan.model.num_layers - 2
    expected = ["tok_embeddings", *(f"layers.{n}" for n in range(num_blocks)), "norm", "output"]
    assert [name for part in parts for name in part] == expected
    placed = [placed_on(rank, size, len(parts), made) for rank in range(size)]
    assert placed == [group.stages for group in plan.groups]
    text = done.others["titan.csv"].decode()
    assert text == exported(plan, "torch-csv").data.decode()
    for rank, row in enumerate(text.splitlines()):
        stages = {int(cell.rstrip("0123456789")[:-1]) for cell in row.split(",") if cell}
        assert stages == set(plan.groups[rank].stages)
    assert made.num_pp_microbatches == plan.microbatches
    assert made.data_parallel_replicate_degree == plan.groups[0].num_replicas


def placed_on(rank: int, size: int, num_parts: int, made: SimpleNamespace) -> tuple[int, ...]:
    """Where torchtitan puts parts: in a loop, or in a V for two schedules."""
    assert num_parts % size == 0
    if made.pipeline_parallel_schedule in ("ZBVZeroBubble", "DualPipeV"):
        assert num_parts == 2 * size
        return (rank, num_parts - 1 - rank)
    return tuple(rank + turn * size for turn in range(num_parts // size))


@pytest.mark.parametrize(
    "target", ["megatron", "torchtitan", "torch-csv", "grid-plan", "deepspeed"]
)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_refusal_names_a_plan_that_can_be_exported(seed, target, tmp_path):
    rng = random.Random(seed)
    plan = group_plan(rng, shape=rng.choice(["loop", "v", "any"]))
    if rng.random() < 0.4:
        plan = random_family_plan(rng, max_stages=5, max_microbatches=4, shared=False)
        if plan.model.num_layers < 3:
            return
        layers = named_layers(plan.model, rng.choice(list(STYLES)))
        plan = replace(plan, model=replace(plan.model, layers=layers))
    try:
        export_plan(plan, target, ExportSettings())
    except CannotExport as problem:
        message = str(problem)
    else:
        return
    assert message.startswith(f"{target}: ")
    assert "\n" not in message
    if "no plan of this model and cluster can be exported" in message:
        return
    assert "; the nearest plan is " in message
    assert ": add --nearest" in message
    done = export_plan(plan, target, ExportSettings(), take_nearest=True)
    assert "exported is the nearest plan: " in done.notes[0]
    if target == "grid-plan":
        (tmp_path / "plan.json").write_bytes(done.data)
        assert check(read_plan(tmp_path / "plan.json")).ok


@pytest.mark.parametrize(
    ("target", "shape", "order", "part"),
    [
        ("megatron", "loop", "any", "which Megatron-LM does not do"),
        ("megatron", "loop", "whole", "the order of blocks is not interleaved 1F1B"),
        ("megatron", "v", "whole", "Megatron-LM puts stage i on rank i % "),
        ("torchtitan", "any", "whole", "torchtitan puts part i on rank i % "),
        ("deepspeed", "loop", "whole", "several stages a device, which"),
        ("chakra", "loop", "whole", "several stages a device, which"),
    ],
)
def test_reasons(target, shape, order, part):
    rng = random.Random(3)
    while True:
        plan = group_plan(rng, shape=shape, order=order)
        chain = chain_of(plan)
        has_split = any(block.kind is Kind.WEIGHT_GRADIENT for o in plan.schedule for block in o)
        if (is_loop(chain), is_v(chain)) == (shape == "loop", shape == "v") and has_split == (
            order == "any"
        ):
            break
    with pytest.raises(CannotExport) as raised:
        export_plan(plan, target, ExportSettings())
    assert part in str(raised.value)
    assert "the nearest plan is" in str(raised.value)


def test_an_interleaved_plan_stays_interleaved_where_only_the_order_differs():
    """The nearest plan may keep several stages a group."""
    kept = 0
    for seed in range(60):
        plan = group_plan(random.Random(seed), order="whole")
        try:
            export_plan(plan, "megatron", ExportSettings())
        except CannotExport as problem:
            kept += " groups x " in str(problem)
    assert kept > 3


def test_microbatches_that_are_no_multiple_are_refused():
    plan = group_plan(random.Random(5), order="interleaved-1f1b")
    kinds = dict.fromkeys(
        ((stage, m) for stage in range(plan.num_stages) for m in range(len(plan.groups) + 1)),
        (Kind.FORWARD, Kind.BACKWARD),
    )
    orders = Schedule(causal_orders(random.Random(0), plan.stages, kinds))
    odd = replace(plan, microbatches=len(plan.groups) + 1, schedule=orders)
    with pytest.raises(CannotExport, match="microbatches are no multiple of the"):
        exported(odd, "megatron")


def test_uniform_replicas_keep_groups_unless_another_order_is_asked():
    plan = group_plan(random.Random(4), order="interleaved-1f1b")
    plan = replay_plan(plan).plan
    assert nearest_grid_plan(plan, "interleaved-1f1b") is plan
    assert nearest_grid_plan(plan).iteration_ms <= plan.iteration_ms
    other = nearest_grid_plan(plan, "1f1b")
    assert not other.uses_families
    assert has_1f1b_order(other)


def test_formats_that_know_groups():
    assert {name for name, each in FORMATS.items() if each.takes_groups} == {
        "csv",
        "grid-plan",
        "megatron",
        "torch-csv",
        "torchtitan",
    }


def test_split_backwards_with_replicas_come_with_a_warning():
    rng = random.Random(0)
    while True:
        plan = group_plan(rng, order="any")
        has_split = any(block.kind is Kind.WEIGHT_GRADIENT for o in plan.schedule for block in o)
        if has_split and plan.groups[0].num_replicas == 2:
            break
    for target in ("torch-csv", "torchtitan"):
        assert any("DistributedDataParallel" in note for note in exported(plan, target).notes)


def test_the_command_exports_an_interleaved_plan(tmp_path, capfd):
    plan = group_plan(random.Random(2), order="interleaved-1f1b")
    source, script = tmp_path / "plan.json", tmp_path / "args.sh"
    write_plan(plan, source)
    code, _, _ = run_command(capfd, "export", source, "--to", "megatron", "-o", script)
    assert code == 0
    text = script.read_text()
    assert f"# {len(plan.groups) * plan.groups[0].num_replicas} ranks" in text
    assert "stages 0, " in text
    source.unlink()
    write_plan(group_plan(random.Random(2), shape="v"), source)
    code, out, err = run_command(capfd, "export", source, "--to", "megatron", "-o", script)
    assert (code, out, len(err.splitlines())) == (3, "", 1)


def test_notes_name_only_what_the_plan_has():
    plan = group_plan(random.Random(1))
    buckets = tuple(replace(stage, gradient_buckets=2) for stage in plan.stages)
    whole = tuple(replace(stage, gradient_buckets=1) for stage in plan.stages)
    for stages, shards in ((buckets, False), (whole, True), (whole, False)):
        changed = replace(plan, stages=stages, shard_optimizer=shards, predicted=None)
        text = " ".join(exported(changed, "torch-csv").notes)
        assert ("gradient buckets" in text) == (stages is buckets)
        assert ("the optimizer is sharded" in text) == shards
