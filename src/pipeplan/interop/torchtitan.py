"""The parallelism of torchtitan as Python, with the order of blocks as a schedule CSV beside it.

A part of the model is a list of module names: `tok_embeddings`, `layers.0`, ..., `norm`, `output`.
With several parts a rank, torchtitan places part i on rank i % P, or, for the schedules that go so,
in a V. The schedule that is named decides this; the order itself is that of the CSV.
"""

import re
from collections import Counter

from pipeplan.documents.text import excerpt
from pipeplan.errors import InputError
from pipeplan.interop.chain_shapes import chain_of, chain_text, is_loop, is_v
from pipeplan.interop.exported import CannotExport, Exported, ExportSettings
from pipeplan.interop.layer_roles import Role, layer_roles
from pipeplan.interop.replica_grid import (
    require_grid,
    require_same_recompute,
    title_of,
)
from pipeplan.interop.torch_schedule import family_notes, plan_csv
from pipeplan.pipeline import Plan
from pipeplan.replaying import Replayed

__all__ = ["export_torchtitan", "module_names"]

NORM = re.compile(r"(?:.*[._])?(?:\w*norm|ln_f)(?:[._][0-9]+)?")
TEMPLATE = '''"""{title}

{ranks}
"""

from torchtitan.config import ParallelismConfig

MODULE_FQNS_PER_MODEL_PART = [
{parts}
]

PARALLELISM = ParallelismConfig(
    pipeline_parallel_degree={num_groups},
    module_fqns_per_model_part=MODULE_FQNS_PER_MODEL_PART,
    pipeline_parallel_schedule="{schedule}",  # says where parts lie; the file below has the order
    pipeline_parallel_schedule_csv={csv!r},
    num_pp_microbatches={num_microbatches},
    data_parallel_replicate_degree={num_replicas},
    data_parallel_shard_degree=1,
)
"""Older versions: pipeline_parallel_microbatch_size={samples} in place of num_pp_microbatches."""

LOCAL_BATCH_SIZE = {local_batch}
"""Samples of a data-parallel rank in one step; training.local_batch_size in older versions."""
'''


def export_torchtitan(replayed: Replayed, settings: ExportSettings) -> Exported:
    """A Python file with the parallelism, and the schedule beside it."""
    plan = replayed.plan
    grid = require_grid(plan)
    if grid.num_groups == 1:
        raise CannotExport("one stage is no pipeline, and torchtitan needs no layout for it")
    schedule = _placing_schedule(plan)
    modules = module_names(plan, settings)
    parts = [[name for layer in stage.layers for name in modules[layer]] for stage in plan.stages]
    for index, part in enumerate(parts):
        if not part:
            raise CannotExport(f"stage {index} holds no module of torchtitan")
    notes = [*grid.pair_notes, *family_notes(plan, grid.num_replicas)]
    if require_same_recompute(plan):
        notes.append("set activation_checkpoint.mode to full: the plan recomputes")
    csv_name = f"{settings.stem}.csv"
    text = TEMPLATE.format(
        title=title_of(plan, "Parallelism of torchtitan"),
        ranks="\n".join(grid.rank_lines),
        parts="\n".join(f"    {part!r}," for part in parts),
        num_groups=grid.num_groups,
        schedule=schedule,
        csv=csv_name,
        num_microbatches=plan.microbatches,
        num_replicas=grid.num_replicas,
        samples=grid.samples_each,
        local_batch=grid.samples_each * plan.microbatches,
    )
    return Exported(
        data=text.encode(),
        others={csv_name: plan_csv(plan).encode()},
        notes=tuple(notes),
    )


def _placing_schedule(plan: Plan) -> str:
    """The name of a schedule for which torchtitan places parts as the plan does."""
    chain = chain_of(plan)
    if is_loop(chain):
        return "1F1B" if len(chain) == max(chain) + 1 else "Interleaved1F1B"
    if is_v(chain):
        return "ZBVZeroBubble"
    raise CannotExport(
        f"stages lie on groups {chain_text(chain)}, and torchtitan puts part i on rank"
        f" i % {max(chain) + 1}, or parts in a V"
    )


def module_names(plan: Plan, settings: ExportSettings) -> list[tuple[str, ...]]:
    """For each layer the modules of torchtitan's decoders that it stands for."""
    roles = layer_roles(plan.model, settings.layer_map)
    heads = [i for i, role in enumerate(roles) if role is Role.HEAD]
    num_blocks = 0
    modules: list[tuple[str, ...]] = []
    for index, (layer, role) in enumerate(zip(plan.model.layers, roles, strict=True)):
        given = settings.layer_map.get(layer.name)
        if isinstance(given, tuple):
            modules.append(given)
        elif role is Role.BLOCK:
            modules.append((f"layers.{num_blocks}",))
        elif role is Role.EMBEDDING and index == 0:
            modules.append(("tok_embeddings",))
        elif role is Role.HEAD and len(heads) == 1:
            modules.append(("norm", "output"))
        elif (
            role is Role.HEAD
            and len(heads) == 2
            and NORM.fullmatch(plan.model.layers[heads[0]].name.lower())
        ):
            modules.append(("norm",) if index == heads[0] else ("output",))
        else:
            raise CannotExport(
                f"layer {excerpt(layer.name)} has no module in torchtitan's decoders;"
                " give --map with the list of its modules"
            )
        num_blocks += role is Role.BLOCK
    _require_once(modules)
    if re.fullmatch(r"layers\.\d+", modules[-1][-1]):
        raise CannotExport(
            "no layer stands for the modules behind the decoder's layers (norm, output); give --map"
            " with the list of the last layer's modules"
        )
    return modules


def _require_once(modules: list[tuple[str, ...]]) -> None:
    """Each layer has a module, and each module stands in one place."""
    if not all(modules):
        raise InputError("map: a layer has an empty list; name at least one module")
    counts = Counter(name for names in modules for name in names)
    for name, count in counts.items():
        if count > 1:
            raise InputError(
                f"map: the module {excerpt(name)} stands for {count} layers; give each module once"
            )
