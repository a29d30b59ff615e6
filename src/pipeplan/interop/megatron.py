"""Arguments for Megatron-LM: an uneven cut as `--pipeline-model-parallel-layout`.

In the layout, `E` is the embedding, `t` a transformer block, `L` the loss with all that comes
behind the last block. `|` stands between stages. Stage i of the layout runs on pipeline rank
i % P. If there are more stages than ranks, Megatron-LM runs interleaved 1F1B (virtual pipeline).
"""

from itertools import pairwise

from pipeplan.interop.chain_shapes import require_1f1b
from pipeplan.interop.exported import CannotExport, Exported, ExportSettings
from pipeplan.interop.layer_roles import Role, layer_roles
from pipeplan.interop.replica_grid import (
    ReplicaGrid,
    require_grid,
    require_same_recompute,
    title_of,
)
from pipeplan.pipeline import Plan
from pipeplan.replaying import Replayed

__all__ = ["export_megatron", "layout_of"]

CONFLICTING = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
)


def export_megatron(replayed: Replayed, settings: ExportSettings) -> Exported:
    """Arguments of Megatron-LM, as an array for a shell script."""
    plan = replayed.plan
    grid = require_grid(plan)
    recompute = require_same_recompute(plan)
    roles = layer_roles(plan.model, settings.layer_map)
    layout = layout_of(plan, roles)
    require_1f1b(plan, "Megatron-LM")
    arguments = [f"--pipeline-model-parallel-size {grid.num_groups}"]
    if grid.num_groups > 1:
        arguments.append(f'--pipeline-model-parallel-layout "{layout}"')
    arguments += [
        f"--num-layers {roles.count(Role.BLOCK)}",
        f"--micro-batch-size {grid.samples_each}",
        f"--global-batch-size {plan.microbatches * plan.model.microbatch_size}",
    ]
    notes = grid.pair_notes
    if recompute:
        arguments.append("--recompute-granularity full --recompute-method uniform")
        arguments.append("--recompute-num-layers 1")
        notes.append("Megatron-LM keeps the input of each block, the plan that of each stage")
    if plan.shard_optimizer:
        arguments.append("--use-distributed-optimizer")
    if any(stage.gradient_buckets > 1 for stage in plan.stages):
        arguments.append("--overlap-grad-reduce")
        notes.append("Megatron-LM decides by itself how many buckets gradients have")
    return Exported(data=_script(plan, grid, arguments).encode(), notes=tuple(notes))


def layout_of(plan: Plan, roles: tuple[Role, ...]) -> str:
    """The layout string; refused if the embedding or the loss is cut in two."""
    for role, word in ((Role.EMBEDDING, "embedding"), (Role.HEAD, "loss")):
        if role not in roles:
            raise CannotExport(f"the model has no layer for the {word}, and Megatron-LM needs one")
    for stage, behind in pairwise(plan.stages):
        before, after = roles[stage.layers[-1]], roles[behind.layers[0]]
        if before is after and before is not Role.BLOCK:
            raise CannotExport(f"the layers of the {before} lie in two stages")
    return "|".join(_stage_text([roles[layer] for layer in stage.layers]) for stage in plan.stages)


def _stage_text(roles: list[Role]) -> str:
    embedding = "E" if Role.EMBEDDING in roles else ""
    loss = "L" if Role.HEAD in roles else ""
    return f"{embedding}{'t' * roles.count(Role.BLOCK)}{loss}"


def _script(plan: Plan, grid: ReplicaGrid, arguments: list[str]) -> str:
    num_ranks = grid.num_groups * grid.num_replicas
    lines = [
        f"# {title_of(plan, 'Arguments of Megatron-LM')}",
        f"# {num_ranks} ranks, {grid.num_replicas} data-parallel. Ranks run on these devices:",
        *(f"#   {line}" for line in grid.rank_lines),
        *(_conflicts() if grid.num_groups > 1 else ()),
        "PIPELINE_ARGS=(",
        *(f"    {argument}" for argument in arguments),
        ")",
    ]
    return "\n".join(lines) + "\n"


def _conflicts() -> list[str]:
    """What may not stand beside a layout, as comments."""
    return [
        "# Leave out, since the layout replaces them:",
        *(f"#   {flag}" for flag in CONFLICTING),
    ]
