"""The zoo in the terminal: its models and clusters with their key figures."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType

from pipeplan.report.tables import Column, fitted_table
from pipeplan.report.units import humanise_count
from pipeplan.zoo import ClusterFigures, ModelFigures

__all__ = ["render_zoo"]

MODEL_HEADINGS = ("model", "layers", "parameters", "FLOPs", "batch", "tokens", "profiled for")
CLUSTER_HEADINGS = ("cluster", "hosts", "devices", "links GB/s", "memory GB", "description")
LEAST_DESCRIPTION = 12


def render_zoo(
    models: Sequence[ModelFigures], clusters: Sequence[ClusterFigures], console: Console
) -> RenderableType:
    """All ready inputs with their key figures."""
    model_rows = [
        [
            model.name,
            str(model.num_layers),
            humanise_count(model.parameters),
            humanise_count(model.forward_flops),
            str(model.microbatch_size),
            str(model.sequence_length or ""),
            f"{model.device} {model.precision}",
        ]
        for model in models
    ]
    cluster_rows = [
        [
            cluster.name,
            str(cluster.num_hosts),
            str(cluster.num_devices),
            _span(cluster.slowest_link_gb_per_s, cluster.fastest_link_gb_per_s),
            _span(cluster.smallest_memory_gb, cluster.largest_memory_gb),
            cluster.description,
        ]
        for cluster in clusters
    ]
    return Group(
        fitted_table(_columns(MODEL_HEADINGS), model_rows, console.width, gap=2),
        "",
        fitted_table(_columns(CLUSTER_HEADINGS), cluster_rows, console.width, gap=2),
    )


def _columns(headings: Sequence[str]) -> list[Column]:
    return [
        Column(
            heading=heading,
            is_number=heading not in ("model", "cluster", "profiled for", "description"),
            wraps=heading == "description",
            least=LEAST_DESCRIPTION if heading == "description" else None,
        )
        for heading in headings
    ]


def _span(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "unlimited"
    return f"{low:.3g}" if low == high else f"{low:.3g}..{high:.3g}"
