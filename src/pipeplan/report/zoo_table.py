"""The zoo in the terminal: its models and clusters with their key figures."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from pipeplan.report.units import humanise_count
from pipeplan.zoo import ClusterFigures, ModelFigures

__all__ = ["render_zoo"]


def render_zoo(
    models: Sequence[ModelFigures], clusters: Sequence[ClusterFigures]
) -> RenderableType:
    """All ready inputs with their key figures."""
    model_table = _table(
        "model", "layers", "parameters", "FLOPs", "batch", "tokens", "profiled for"
    )
    for model in models:
        model_table.add_row(
            model.name,
            str(model.num_layers),
            humanise_count(model.parameters),
            humanise_count(model.forward_flops),
            str(model.microbatch_size),
            str(model.sequence_length or ""),
            f"{model.device} {model.precision}",
        )
    cluster_table = _table("cluster", "hosts", "devices", "links GB/s", "memory GB", "description")
    for cluster in clusters:
        cluster_table.add_row(
            cluster.name,
            str(cluster.num_hosts),
            str(cluster.num_devices),
            _span(cluster.slowest_link_gb_per_s, cluster.fastest_link_gb_per_s),
            _span(cluster.smallest_memory_gb, cluster.largest_memory_gb),
            cluster.description,
        )
    return Group(model_table, "", cluster_table)


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        is_text = heading in ("model", "cluster", "profiled for", "description")
        table.add_column(
            heading, justify="left" if is_text else "right", no_wrap=heading != "description"
        )
    return table


def _span(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "unlimited"
    return f"{low:.3g}" if low == high else f"{low:.3g}..{high:.3g}"
