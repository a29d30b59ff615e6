"""Exports are understood by others and give back the plan, or are refused with the nearest plan."""

import csv
import io
import json
import random
import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from command_line import run_command
from hostile_names import NAMES
from interop.samples import STYLES, any_plan, grid_plan
from one_stage import plan as make_plan
from pipeplan import zoo
from pipeplan.checker import check
from pipeplan.documents.files import read_plan, write_plan
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.interop.chain_shapes import has_1f1b_order
from pipeplan.interop.exported import CannotExport, ExportSettings
from pipeplan.interop.exporting import FORMATS, export_plan, parse_layer_map
from pipeplan.interop.grid_plan import nearest_grid_plan
from pipeplan.interop.nearest import find_nearest
from pipeplan.pipeline import Plan, Stage
from pipeplan.replaying import replay_plan, simulate

FEW, MANY = range(30), range(30, 530)
SEEDS = [*FEW, *(pytest.param(seed, marks=pytest.mark.full) for seed in MANY)]
FRAMEWORKS = ("torch-csv", "torchtitan", "megatron", "deepspeed", "grid-plan")


def exported(plan: Plan, target: str, **settings):
    return export_plan(plan, target, ExportSettings(**settings))


def cuts_of(plan: Plan) -> list[int]:
    return [0, *(stage.layers.stop for stage in plan.stages)]


# --------------------------------------------------------------------------- megatron


def parse_layout(layout: str, pipeline_size: int) -> list[str]:
    """The stages of a layout in order, by the documented grammar.

    `E` embedding, `t` decoder layer, `m` MTP, `L` loss; `|` splits stages; commas are cosmetic;
    `x*n` and `(...)*n` repeat. E is first and L last, each once; the number of stages is a multiple
    of the pipeline size.
    """
    text = layout.replace(",", "")
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda m: m[1] * int(m[2]), text)
    text = re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), text)
    stages = text.split("|")
    assert len(stages) % pipeline_size == 0
    flat = "".join(stages)
    assert set(flat) <= set("EtmL")
    assert flat[0] == "E"
    assert flat[-1] == "L"
    assert flat.count("E") == flat.count("L") == 1
    return stages


def megatron_arguments(text: str) -> dict[str, str]:
    inside = text[text.index("PIPELINE_ARGS=(") : text.rindex(")")]
    return dict(re.findall(r"(--[a-z-]+) \"?([^\s\"]+)", inside))


def test_the_parser_knows_the_documented_example():
    stages = parse_layout("Et*3|(tt|)*29,m|L", 16)
    assert len(stages) == 32
    assert stages[0] == "Ettt"
    assert stages[1:30] == ["tt"] * 29
    assert stages[30:] == ["m", "L"]


@pytest.mark.parametrize("seed", SEEDS)
def test_megatron_layouts_give_back_the_cut(seed):
    plan = grid_plan(random.Random(seed), rule="1f1b")
    arguments = megatron_arguments(exported(plan, "megatron").data.decode())
    assert int(arguments["--pipeline-model-parallel-size"]) == len(plan.stages)
    num_layers = int(arguments["--num-layers"])
    assert num_layers == plan.model.num_layers - 2
    whole = f"E{'t' * num_layers}L"
    layout = arguments.get("--pipeline-model-parallel-layout", whole)
    stages = parse_layout(layout, len(plan.stages))
    assert "".join(stages) == whole  # one letter for each layer
    ends = [0]
    for stage in stages:
        ends.append(ends[-1] + len(stage))
    assert ends == cuts_of(plan)
    replicas = plan.stages[0].num_replicas
    micro, total = (int(arguments[f"--{word}-batch-size"]) for word in ("micro", "global"))
    assert total == plan.microbatches * plan.model.microbatch_size
    assert total // (micro * replicas) == plan.microbatches


def test_megatron_joins_the_layers_of_embedding_and_head():
    plan = grid_plan(random.Random(5), rule="1f1b", max_stages=1)
    names = ["wte", "wpe", *(f"h.{n}" for n in range(plan.model.num_layers - 4)), "ln_f", "lm_head"]
    plan = renamed(plan, names)
    cut = split_at(plan, 2)
    layout = megatron_arguments(exported(cut, "megatron").data.decode())
    assert layout["--pipeline-model-parallel-layout"].startswith("E|t")
    for place, word in ((1, "embedding"), (plan.model.num_layers - 1, "loss")):
        with pytest.raises(CannotExport, match=f"the layers of the {word} lie in two stages"):
            exported(split_at(plan, place), "megatron")


def renamed(plan: Plan, names: list[str]) -> Plan:
    layers = tuple(
        replace(layer, name=name) for layer, name in zip(plan.model.layers, names, strict=True)
    )
    return replace(plan, model=replace(plan.model, layers=layers))


def split_at(plan: Plan, place: int) -> Plan:
    """Two stages on one device each, in 1F1B order."""
    assert plan.cluster.num_devices > 1, "the sample needs two devices"
    stages = (
        Stage(layers=range(place), devices=(0,)),
        Stage(layers=range(place, plan.model.num_layers), devices=(1,)),
    )
    half = replace(plan, stages=stages)
    from pipeplan.cost import CostModel
    from pipeplan.pipeline import Schedule
    from pipeplan.schedules import SCHEDULES

    costs = CostModel(plan.model, plan.cluster).pipeline_costs(stages)
    order = SCHEDULES["1f1b"](costs, plan.microbatches).order_SM2
    return replace(half, schedule=Schedule.from_codes(order))


# -------------------------------------------------------------- torchtitan and deepspeed


def run_python(text: str, **modules: ModuleType) -> dict:
    """The names that a Python file defines, with stand-ins for the modules it imports."""
    space: dict = {"__name__": "exported"}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        exec(compile(text, "exported.py", "exec"), space)  # noqa: S102
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    return space


def stand_in(name: str, **names: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


@pytest.mark.parametrize("seed", SEEDS)
def test_torchtitan_covers_every_module_once(seed):
    plan = grid_plan(random.Random(seed))
    if len(plan.stages) == 1:
        with pytest.raises(CannotExport, match="one stage is no pipeline"):
            exported(plan, "torchtitan")
        return
    done = exported(plan, "torchtitan", stem="titan")
    modules = {
        "torchtitan": stand_in("torchtitan"),
        "torchtitan.config": stand_in("torchtitan.config", ParallelismConfig=SimpleNamespace),
    }
    made = run_python(done.data.decode(), **modules)["PARALLELISM"]
    parts = made.module_fqns_per_model_part
    num_blocks = plan.model.num_layers - 2
    expected = ["tok_embeddings", *(f"layers.{n}" for n in range(num_blocks)), "norm", "output"]
    assert [name for part in parts for name in part] == expected
    head_has_two = [*[0] * (len(parts) - 1), 1]
    sizes = [len(part) - extra for part, extra in zip(parts, head_has_two, strict=True)]
    assert sizes == [len(stage.layers) for stage in plan.stages]
    assert made.pipeline_parallel_degree == len(plan.stages)
    assert made.num_pp_microbatches == plan.microbatches
    assert made.data_parallel_replicate_degree == plan.stages[0].num_replicas
    assert made.pipeline_parallel_schedule_csv == "titan.csv"
    assert done.others == {"titan.csv": exported(plan, "torch-csv").data}


class PipelineModule:
    """As much of DeepSpeed's class as the partition needs, for one rank."""

    rank = 0

    def __init__(self, layers, num_stages, **arguments):
        self._layer_specs = list(layers)
        self.global_rank = type(self).rank
        per_stage = arguments["ranks"] // num_stages
        self._topo = SimpleNamespace(
            get_coord=lambda rank: SimpleNamespace(pipe=rank // per_stage),
            get_dim=lambda axis: num_stages,
        )
        self._partition_layers(method="parameters")

    def _set_bounds(self, start=None, stop=None):
        self.bounds = (start, stop)


@pytest.mark.parametrize("seed", SEEDS)
def test_deepspeed_covers_every_layer_once(seed):
    plan = grid_plan(random.Random(seed), rule="1f1b")
    modules = {
        "deepspeed": stand_in("deepspeed"),
        "deepspeed.pipe": stand_in("deepspeed.pipe", PipelineModule=PipelineModule),
    }
    space = run_python(exported(plan, "deepspeed").data.decode(), **modules)
    replicas, planned = plan.stages[0].num_replicas, space["PlannedPipelineModule"]
    layers = range(plan.model.num_layers)
    for stage, expected in enumerate(plan.stages):
        for replica in range(replicas):
            planned.rank = stage * replicas + replica
            made = planned(layers, ranks=replicas * len(plan.stages))
            assert range(*made.bounds) == expected.layers
            assert made.parts == cuts_of(plan)
    with pytest.raises(ValueError, match="layers, not"):
        planned(range(plan.model.num_layers + 1), ranks=replicas * len(plan.stages))
    config = space["CONFIG"]
    assert config["gradient_accumulation_steps"] == plan.microbatches
    total = config["train_micro_batch_size_per_gpu"] * replicas * plan.microbatches
    assert config["train_batch_size"] == total == plan.microbatches * plan.model.microbatch_size


# ------------------------------------------------------------------------------ timeline


@pytest.mark.parametrize("seed", FEW)
def test_the_timeline_as_a_table(seed):
    plan = any_plan(random.Random(seed))
    rows = list(csv.DictReader(io.StringIO(exported(plan, "csv").data.decode())))
    timeline = simulate(plan)
    assert max(float(row["end_ms"]) for row in rows) == pytest.approx(timeline.iteration_ms)
    num_sent = 2 * (len(plan.stages) - 1) * plan.microbatches
    num_reduced = sum(stage.num_replicas > 1 for stage in plan.stages)
    assert len(rows) == 2 * len(plan.stages) * plan.microbatches + num_sent + num_reduced
    starts = [float(row["start_ms"]) for row in rows]
    assert starts == sorted(starts)


# ------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("target", FRAMEWORKS)
@pytest.mark.parametrize("seed", SEEDS)
def test_plans_are_exported_or_refused_with_a_plan_that_can_be(seed, target):
    plan = any_plan(random.Random(seed))
    settings = ExportSettings()
    try:
        export_plan(plan, target, settings)
    except CannotExport as problem:
        message = str(problem)
    else:
        return
    assert message.startswith(f"{target}: ")
    nearest = find_nearest(
        replay_plan(plan),
        lambda each: FORMATS[target].export(each, settings),
        FORMATS[target].rules,
    )
    if nearest is None:
        assert message.endswith("no plan of this model and cluster can be exported")
        assert target == "torchtitan"  # which needs two stages
        return
    assert "the nearest plan is" in message
    assert message.endswith("add --nearest")
    assert check(nearest.plan).ok
    FORMATS[target].export(nearest, settings)
    done = export_plan(plan, target, settings, take_nearest=True)
    assert done.data == FORMATS[target].export(nearest, settings).data
    assert "exported is the nearest plan" in done.notes[0]


@pytest.mark.parametrize("target", FRAMEWORKS)
def test_plans_that_can_be_exported_are_their_own_nearest_or_slower(target):
    """The search finds something at least as fast as an exportable plan with its stages."""
    for seed in FEW:
        plan = grid_plan(random.Random(seed), rule="1f1b")
        if len(plan.stages) == 1:
            continue
        replayed = replay_plan(plan)
        found = find_nearest(
            replayed, lambda each: FORMATS[target].export(each, ExportSettings()), ("1f1b",)
        )
        assert found.plan.iteration_ms <= replayed.plan.iteration_ms * (1 + 1e-9)


@pytest.mark.parametrize(
    ("change", "target", "part"),
    [
        ({"devices": (0, 1)}, "torch-csv", "stages have 2, 1 replicas"),
        ({"shares": (0.75, 0.25), "devices": (0, 1)}, "deepspeed", "replicas"),
        ({"recompute": True}, "megatron", "some stages recompute activations and others do not"),
        ({"recompute": True}, "deepspeed", "some stages recompute"),
    ],
)
def test_reasons(change, target, part):
    plan = two_stages(4)
    first, second = plan.stages
    plan = replace(plan, stages=(replace(first, **change), second))
    with pytest.raises(InfeasibleError, match=part):
        exported(plan, target)


def two_stages(num_devices: int) -> Plan:
    rng = random.Random(1)
    while True:
        plan = grid_plan(rng, rule="1f1b", max_stages=2, max_replicas=1)
        if len(plan.stages) == 2 and plan.cluster.num_devices >= 4:
            stages = (
                replace(plan.stages[0], devices=(0,)),
                replace(plan.stages[1], devices=(num_devices - 1,)),
            )
            return replace(plan, stages=stages)


def test_uneven_shares_and_odd_samples_are_refused():
    rng = random.Random(2)
    while True:
        plan = grid_plan(rng, rule="1f1b", max_stages=1, max_replicas=2)
        if plan.stages[0].num_replicas == 2:
            break
    uneven = replace(plan, stages=(replace(plan.stages[0], shares=(0.75, 0.25)),))
    with pytest.raises(CannotExport, match="the replicas of stage 0 have different shares"):
        exported(uneven, "deepspeed")
    even = replace(plan, stages=(replace(plan.stages[0], shares=(0.5, 0.5)),))
    assert exported(even, "deepspeed").data == exported(plan, "deepspeed").data
    odd = replace(plan, model=replace(plan.model, microbatch_size=3))
    with pytest.raises(CannotExport, match="3 samples cannot be divided among 2 replicas"):
        exported(odd, "deepspeed")


@pytest.mark.parametrize("model", zoo.MODEL_NAMES)
def test_models_of_the_zoo_are_recognised_or_refused(model):
    plan = make_plan(zoo.model(model), zoo.cluster("4x2-10g"), 8, planner="grid")
    chains = {"bert-large", "bert-48", "xlnet-large", "gpt2-xl", "llama-7b", "llama-70b"}
    if model in chains | {"mixtral-8x7b"}:
        done = export_plan(plan, "megatron", ExportSettings(), take_nearest=True)
        assert b"--num-layers" in done.data
    else:
        with pytest.raises(CannotExport, match="no plan of this model and cluster"):
            exported(plan, "megatron")


@pytest.mark.parametrize("style", STYLES)
def test_names_are_recognised(style):
    plan = two_stages(4)
    first, block, last = STYLES[style]
    blocks = [block.format(n) for n in range(plan.model.num_layers - 2)]
    assert b"|" in exported(renamed(plan, [first, *blocks, last]), "megatron").data


def test_two_stacks_and_strange_names_need_a_map():
    plan = two_stages(4)
    blocks = [f"decoder.{n}" for n in range(plan.model.num_layers - 3)]
    with pytest.raises(CannotExport, match="two stacks of blocks, 'encoder' and 'decoder'"):
        exported(renamed(plan, ["embed", "encoder.0", *blocks, "head"]), "megatron")
    strange = renamed(plan, ["embed", "mixer", *blocks, "head"])
    with pytest.raises(CannotExport, match=r"layer 'mixer' is unknown, where the embedding"):
        exported(strange, "megatron")
    done = exported(strange, "megatron", layer_map={"mixer": "decoder"})
    layout = megatron_arguments(done.data.decode())["--pipeline-model-parallel-layout"]
    assert layout.replace("|", "") == f"E{'t' * (plan.model.num_layers - 2)}L"
    with pytest.raises(CannotExport, match="is loss, where the decoder is expected"):
        exported(plan, "megatron", layer_map={plan.model.layers[2].name: "loss"})


def test_maps_name_modules_of_torchtitan():
    plan = two_stages(4)
    name = plan.model.layers[-1].name
    with pytest.raises(InputError, match=r"'layers\.0' stands for 2 layers"):
        exported(plan, "torchtitan", layer_map={name: ("norm", "layers.0")})
    with pytest.raises(InputError, match="empty list"):
        exported(plan, "torchtitan", layer_map={name: ()})
    with pytest.raises(InfeasibleError, match="behind the decoder's layers"):
        exported(plan, "torchtitan", layer_map={name: "decoder"})
    done = exported(plan, "torchtitan", layer_map={name: ("norm", "lm_head")})
    assert b"'norm', 'lm_head']" in done.data
    names = [layer.name for layer in plan.model.layers]
    two_heads = renamed(plan, [*names[:-2], "model.norm", "lm_head"])
    flat = exported(two_heads, "torchtitan").data.replace(b"],\n    [", b", ")
    assert b"'norm', 'output']" in flat
    with pytest.raises(CannotExport, match=r"layer 'pooler' has no module"):
        exported(renamed(plan, [*names[:-2], "pooler", "cls"]), "torchtitan")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[]", "is not an object"),
        ('{"a": "attention"}', "'attention' is neither a list of modules nor one of embedding"),
        ('{"a": [1]}', "'a': [1] is neither"),
        ('{"a": ', "is not JSON"),
        (r'{"\ud800": "loss"}', "holds half a character"),
    ],
)
def test_impossible_maps_are_refused(text, part):
    with pytest.raises(InputError) as raised:
        parse_layer_map(text)
    assert part in str(raised.value)


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
@pytest.mark.parametrize("target", ["megatron", "torchtitan", "deepspeed", "csv"])
def test_hostile_names_stay_in_comments_and_cells(name, target):
    plan = two_stages(4)
    devices = [replace(plan.cluster.devices[0], name=name), *plan.cluster.devices[1:]]
    plan = replace(
        plan,
        model=replace(plan.model, name=name),
        cluster=replace(plan.cluster, name=name, devices=tuple(devices)),
    )
    plain = two_stages(4)
    text, usual = (exported(p, target).data.decode() for p in (plan, plain))
    assert len(text.splitlines()) == len(usual.splitlines())
    if target == "megatron":
        code = [line for line in text.splitlines() if not line.startswith("#")]
        assert code == [line for line in usual.splitlines() if not line.startswith("#")]
    elif target == "csv":
        cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
        assert not any(cell.startswith(("=", "+", "@")) for cell in cells)
    else:
        assert text.count('"""') == usual.count('"""')
        assert text.split('"""', 2)[2] == usual.split('"""', 2)[2]


# -------------------------------------------------------------------------------- command


@pytest.fixture
def plan_file(tmp_path):
    made = make_plan(zoo.model("bert-large"), zoo.cluster("4x2-10g"), microbatches=8)
    write_plan(made, tmp_path / "bert.plan.json")
    return tmp_path / "bert.plan.json"


def test_the_command_refuses_with_exit_code_3(plan_file, tmp_path, capfd):
    output = tmp_path / "megatron.sh"
    code, out, err = run_command(capfd, "export", plan_file, "--to", "megatron", "-o", output)
    assert (code, out) == (3, "")
    assert len(err.splitlines()) == 1
    assert "is not 1F1B" in err
    assert "the nearest plan is 4 stages x 2 replicas" in err
    assert not output.exists()
    code, out, err = run_command(
        capfd, "export", plan_file, "--to", "megatron", "-o", output, "--nearest"
    )
    assert (code, out) == (0, f"written: {output}\n")
    assert "exported is the nearest plan: 4 stages x 2 replicas" in err
    assert "--pipeline-model-parallel-layout" in output.read_text()


def test_the_command_writes_two_files_for_torchtitan(plan_file, tmp_path, capfd):
    code, out, err = run_command(capfd, "export", plan_file, "--to", "torchtitan")
    assert (code, out) == (2, "")
    assert "-o: is missing; torchtitan has 2 files" in err
    output = tmp_path / "titan.py"
    code, out, err = run_command(capfd, "export", plan_file, "--to", "torchtitan", "-o", output)
    assert (code, out) == (0, f"written: {output}, {tmp_path / 'titan.csv'}\n")
    code, out, err = run_command(
        capfd, "check", plan_file, "--schedule", tmp_path / "titan.csv", "--json"
    )
    assert (code, err) == (0, "")
    verdict = json.loads(out)
    assert verdict["iteration_ms"] == pytest.approx(read_plan(plan_file).iteration_ms)
    assert verdict["ours"]["gain"] == 0


def test_the_command_checks_schedules(plan_file, tmp_path, capfd):
    source = tmp_path / "mine.csv"
    gpipe = make_plan(
        zoo.model("bert-large"), zoo.cluster("4x2-10g"), 8, planner="best", schedule="gpipe"
    )
    source.write_bytes(exported(gpipe, "torch-csv").data)
    code, out, err = run_command(capfd, "check", plan_file, "--schedule", source)
    assert code == 0
    assert out.startswith(f"{source}: valid: 4 stages, 8 microbatches, ")
    assert "the plan's own order takes" in out
    assert "% less" in out
    source.write_text(source.read_text().replace("2F3,", "", 1))
    code, out, err = run_command(capfd, "check", plan_file, "--schedule", source, "--json")
    assert code == 2
    assert not json.loads(out)["ok"]
    assert "stage 2: 2F3 is missing" in err or "stage 2: 2B3 stands before" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--to", "megatrom"), "did you mean 'megatron'?"),
        (("--to", "megatron", "--map", "missing.json"), "missing.json: cannot be read"),
        (("--to", "csv", "--map", "MAP"), "map: does not apply to csv"),
        (("--to", "megatron", "--map", "MAP"), "map: 'nothing' is no layer of the model"),
    ],
)
def test_the_command_refuses_other_settings(plan_file, capfd, arguments, part):
    roles = plan_file.with_name("roles.json")
    roles.write_text('{"nothing": "decoder"}')
    given = [roles if each == "MAP" else each for each in arguments]
    code, out, err = run_command(capfd, "export", plan_file, *given)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert part in err


def test_the_nearest_plan_can_be_kept(plan_file, tmp_path, capfd):
    free = {"divisible": True, "ignore_memory": True}
    unequal = make_plan(zoo.model("gpt2-xl"), zoo.cluster("4x2-25g"), microbatches=8, **free)
    write_plan(unequal, plan_file)
    output = tmp_path / "grid.plan.json"
    arguments = ("export", plan_file, "--to", "grid-plan", "-o", output)
    code, out, err = run_command(capfd, *arguments)
    assert (code, out) == (3, "")
    assert "and all need the same number; the nearest plan is" in err
    assert run_command(capfd, *arguments, "--nearest")[0] == 0
    kept = read_plan(output)
    assert check(kept).ok
    assert len({stage.num_replicas for stage in kept.stages}) == 1
    assert f"{kept.iteration_ms:.6g} ms" in err
    assert run_command(capfd, "export", output, "--to", "torch-csv")[0] == 0


@pytest.mark.parametrize("cluster", ["4x2-10g", "random-8"])
@pytest.mark.parametrize("model", ["bert-large", "vgg19", "gpt2-xl"])
def test_the_nearest_plan_is_never_worse_than_the_best_grid(model, cluster):
    """Without limits on memory; 8 samples can be divided among each number of replicas."""
    profile, where = zoo.model(model, microbatch_size=8), zoo.cluster(cluster)
    devices = tuple(replace(device, memory_gb=None) for device in where.devices)
    where = replace(where, devices=devices)
    best, grid = (make_plan(profile, where, 8, planner=name) for name in ("best", "grid"))
    found = nearest_grid_plan(best, "1f1b")
    assert found.iteration_ms <= grid.iteration_ms * (1 + 1e-9)
    assert nearest_grid_plan(best).iteration_ms <= found.iteration_ms * (1 + 1e-9)


def test_plans_with_uniform_replicas(tmp_path, capfd):
    output = tmp_path / "equal.plan.json"
    arguments = ("plan", "gpt2-xl", "4x2-25g", "-m", 8, "--uniform-replicas", "-o", output)
    arguments += ("--divisible", "--ignore-memory")
    code, _, err = run_command(capfd, *arguments)
    assert code == 0
    assert re.search(r"note: equal replicas cost [0-9.]+ %: [0-9.]+ ms without", err)
    made = read_plan(output)
    assert check(made).ok
    assert made.bound is not None
    assert made.options["uniform_replicas"]
    assert len({stage.num_replicas for stage in made.stages}) == 1
    assert run_command(capfd, *arguments, "--schedule", "1f1b")[0] == 0
    assert run_command(capfd, "export", output, "--to", "megatron")[0] == 0
    limits = {"divisible": True, "ignore_memory": True}
    free = make_plan(zoo.model("gpt2-xl"), zoo.cluster("4x2-25g"), microbatches=8, **limits)
    assert made.iteration_ms > free.iteration_ms


def test_a_plan_with_equal_replicas_stays(plan_file):
    made = read_plan(plan_file)
    assert nearest_grid_plan(made) is made
    assert has_1f1b_order(nearest_grid_plan(made, "1f1b"))
    with pytest.raises(InputError, match="'mine' cannot be searched"):
        nearest_grid_plan(made, "mine")


def test_the_command_writes_traces(plan_file, tmp_path, capfd):
    output = tmp_path / "trace.json"
    assert run_command(capfd, "export", plan_file, "--to", "chrome-trace", "-o", output)[0] == 0
    assert json.loads(output.read_text())["traceEvents"]


def test_an_unknown_format_is_answered_with_all_formats(plan_file, capfd):
    code, _, err = run_command(capfd, "export", plan_file, "--to", "foo")
    assert code == 2
    assert all(name in err for name in (*FORMATS, "chrome-trace"))


def test_files_beside_the_output_are_not_overwritten(plan_file, tmp_path, capfd):
    output = tmp_path / "run.py"
    arguments = ("export", plan_file, "--to", "torchtitan", "-o", output)
    code, out, err = run_command(capfd, *arguments)
    assert code == 0, err
    others = [path for path in tmp_path.iterdir() if path != output and path.name in out]
    assert others
    output.unlink()
    others[0].write_text("mine")
    code, _, err = run_command(capfd, *arguments)
    assert (code, others[0].read_text(), output.exists()) == (2, "mine", False)
    assert "is there already, and torchtitan writes it beside -o" in err
    others[0].unlink()
    assert [run_command(capfd, *arguments)[0] for _ in range(2)] == [0, 0]
