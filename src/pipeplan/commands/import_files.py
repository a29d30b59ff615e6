"""`pipeplan import`."""

from pathlib import PurePath

import click

from pipeplan.commands.paths import is_stdout, require_paths
from pipeplan.commands.progress import progress
from pipeplan.commands.shared import note
from pipeplan.documents.text import printable
from pipeplan.documents.writing import STANDARD_STREAM
from pipeplan.errors import InputError

__all__ = ["assumed_from", "import_command"]


@click.command("import")
@click.argument("file", type=click.Path())
@click.option("--from", "source_format", help="The file's format; recognised if left out.")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False),
    help="A model or cluster file.",
)
@click.option("--name", help="Of the model or cluster; by default the file's name.")
@click.option(
    "--microbatch-size", type=click.IntRange(1, 10**9), help="Samples in a microbatch (models)."
)
@click.option("--assume", help="GB/s by kind of link, such as NV=25,PCIE=24,SYS=10 (clusters).")
def import_command(
    file: str,
    source_format: str | None,
    output: str,
    name: str | None,
    microbatch_size: int | None,
    assume: str | None,
) -> None:
    """Read another program's FILE and write it as a model or a cluster.

    Models: pipedream, dapple, piper, torch-trace, layers-csv. Clusters: nvidia-topo, nccl,
    matrix-csv.
    """
    require_paths(inputs={"FILE": file}, outputs={"-o": output})
    from pipeplan.cluster import Cluster
    from pipeplan.documents.files import write_cluster, write_model
    from pipeplan.interop.imported import ImportSettings
    from pipeplan.interop.importing import import_text
    from pipeplan.interop.source_text import read_text

    settings = ImportSettings(
        name=name or _name_of(file),
        microbatch_size=microbatch_size,
        assumed_gb_per_s=assumed_from(assume or ""),
    )
    shown = "standard input" if file == STANDARD_STREAM else file
    with progress("importing"):
        text = read_text(file)
        try:
            imported = import_text(text, settings, source_format)
        except InputError as problem:
            raise type(problem)(f"{shown}: {problem}") from None
        result = imported.result
        if isinstance(result, Cluster):
            write_cluster(result, output)
            summary = f"cluster of {result.num_devices} devices"
        else:
            write_model(result, output)
            work_ms = sum(layer.forward_ms + layer.backward_ms for layer in result.layers)
            size_gb = sum(layer.parameter_bytes for layer in result.layers) / 1e9
            summary = (
                f"model of {result.num_layers} layers, {work_ms:.6g} ms a microbatch,"
                f" {size_gb:.4g} GB of parameters"
            )
    for text in imported.notes:
        note(f"note: {text}")
    if not is_stdout(output):
        click.echo(f"{printable(output)}: {summary}")


def _name_of(file: str) -> str:
    return "imported" if file == STANDARD_STREAM else PurePath(file).stem or "imported"


def assumed_from(text: str) -> dict[str, float]:
    """The bandwidths in a text like `NV=25,SYS=10`."""
    from pipeplan.interop.source_text import number_in
    from pipeplan.validation import BANDWIDTH_GB_PER_S, require_number

    assumed = {}
    for part in filter(None, text.split(",")):
        kind, value = (each.strip() for each in part.partition("=")[::2])
        assumed[kind] = number_in(value, f"assume: {kind}")
        require_number(InputError, f"assume: {kind}", assumed[kind], BANDWIDTH_GB_PER_S)
        if not assumed[kind]:
            raise InputError(f"assume: {kind}=0 would leave no such link; give GB/s above 0")
    return assumed
