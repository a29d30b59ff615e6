"""`pipeplan discover`."""

import click

from pipeplan.commands.import_files import assumed_from
from pipeplan.commands.paths import is_stdout, require_paths
from pipeplan.commands.progress import progress
from pipeplan.commands.shared import note
from pipeplan.documents.text import printable
from pipeplan.errors import InputError

__all__ = ["discover_command"]

MOST_PROCESSES = 1024


@click.command("discover")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False),
    help="The cluster file.",
)
@click.option(
    "--from",
    "sources",
    multiple=True,
    type=click.Path(),
    help="Read a recorded text of one host instead; may be repeated.",
)
@click.option(
    "--processes",
    type=click.IntRange(1, MOST_PROCESSES),
    help="Take so many processes on CPUs for devices.",
)
@click.option(
    "--hosts", help="Real names of equal hosts, such as node1,node2; by default this one's."
)
@click.option("--name", help="Of the cluster; by default the first host's.")
@click.option("--assume", help="GB/s by kind of link, such as NV=25,PCIE=24,SYS=10,CPU=2.")
def discover_command(
    output: str,
    sources: tuple[str, ...],
    processes: int | None,
    hosts: str | None,
    name: str | None,
    assume: str | None,
) -> None:
    """Write the cluster file of this machine: devices, memory, links, network cards.

    GPUs are found by nvidia-smi. Texts for --from: what 'nvidia-smi topo -m', 'nvidia-smi nvlink
    -s' and 'nvidia-smi --query-gpu=index,name,memory.total --format=csv' print, and the XML that
    NCCL writes to NCCL_TOPO_DUMP_FILE. To measure links, and for several hosts: torchrun ... -m
    pipeplan.measure.links.
    """
    if sources and processes is not None:
        raise InputError("--processes: stands beside --from; give one of them")
    inputs = {f"--from {source}": source for source in sources}
    require_paths(inputs=inputs, outputs={"-o": output})
    from pipeplan.documents.files import write_cluster
    from pipeplan.interop.discovery import (
        DiscoverySettings,
        discover_from_texts,
        discover_processes,
    )
    from pipeplan.interop.hosts import summary_of
    from pipeplan.interop.source_text import read_text
    from pipeplan.measure.machine import (
        gpu_texts,
        host_name,
        memory_bytes,
        network_cards_gb_per_s,
    )

    with progress("discovering"):
        names = _host_names(hosts, "h0" if sources else host_name())
        settings = DiscoverySettings(
            name=name or names[0],
            hosts=names,
            assumed_gb_per_s=assumed_from(assume or ""),
            cards_gb_per_s=() if sources else network_cards_gb_per_s(),
        )
        if processes is not None:
            found = discover_processes(processes, memory_bytes(), settings)
        else:
            texts = [(path, read_text(path)) for path in sources] or gpu_texts()
            if not texts:
                raise InputError(
                    "there is no nvidia-smi here; give --processes for processes on CPUs, or --from"
                    " for texts of another machine"
                )
            found = discover_from_texts(texts, settings)
        write_cluster(found.result, output)  # type: ignore[arg-type]
    for text in found.notes:
        note(f"note: {text}")
    if sources and hosts is None:
        note("note: the host is called h0; give --hosts: the runtime matches hosts by their names")
    if not is_stdout(output):
        click.echo(f"{printable(output)}: {summary_of(found.result)}")  # type: ignore[arg-type]


def _host_names(given: str | None, default: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in (default if given is None else given).split(","))
    for place, name in enumerate(names):
        if not name:
            raise InputError("--hosts: one of the names is empty; give such as node1,node2")
        if name in names[:place]:
            raise InputError(f"--hosts: {name!r} stands twice; names are unique")
    return names
