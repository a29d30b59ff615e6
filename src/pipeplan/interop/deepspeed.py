"""The cut for DeepSpeed: a list of bounds, and a subclass of PipelineModule that applies it."""

from pipeplan.interop.chain_shapes import require_1f1b
from pipeplan.interop.exported import Exported, ExportSettings
from pipeplan.interop.replica_grid import require_grid, require_same_recompute, title_of
from pipeplan.replaying import Replayed

__all__ = ["export_deepspeed"]

TEMPLATE = '''"""{title}

{ranks}
"""

from deepspeed.pipe import PipelineModule

PARTS = {parts}
"""Stage n holds the layers PARTS[n] .. PARTS[n + 1] - 1."""

CONFIG = {{
    "train_batch_size": {batch},
    "train_micro_batch_size_per_gpu": {samples},
    "gradient_accumulation_steps": {num_microbatches},
}}
"""To be merged into the configuration of DeepSpeed."""


class PlannedPipelineModule(PipelineModule):
    """A PipelineModule that is cut as planned; it takes {num_layers} layers."""

    def __init__(self, layers, **arguments):
        super().__init__(layers, num_stages=len(PARTS) - 1, **arguments)

    def _partition_layers(self, method="uniform"):
        if len(self._layer_specs) != PARTS[-1]:
            raise ValueError(f"the plan has {{PARTS[-1]}} layers, not {{len(self._layer_specs)}}")
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = list(PARTS)
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])
'''


def export_deepspeed(replayed: Replayed, settings: ExportSettings) -> Exported:
    """A Python file with the bounds and the class."""
    plan = replayed.plan
    grid = require_grid(plan)
    recompute = require_same_recompute(plan)
    require_1f1b(plan, "DeepSpeed")
    notes = [
        "DeepSpeed needs the model as a list with one entry for each layer of the plan",
        *grid.pair_notes,
    ]
    if recompute:
        notes.append("pass activation_checkpoint_interval to the class: the plan recomputes")
    text = TEMPLATE.format(
        title=title_of(plan, "Cut for DeepSpeed"),
        ranks="\n".join(grid.rank_lines),
        parts=[0, *(stage.layers.stop for stage in plan.stages)],
        batch=plan.microbatches * plan.model.microbatch_size,
        samples=grid.samples_each,
        num_microbatches=plan.microbatches,
        num_layers=plan.model.num_layers,
    )
    return Exported(data=text.encode(), notes=tuple(notes))
