"""Every foreign format that can be read, by its name, and which one a text is in."""

from collections.abc import Mapping
from types import MappingProxyType

from pipeplan.documents.text import nearest
from pipeplan.errors import InputError
from pipeplan.interop.imported import Imported, ImportSettings, Reader
from pipeplan.interop.layers_csv import is_layers_csv, read_layers_csv
from pipeplan.interop.matrix_csv import read_matrix_csv
from pipeplan.interop.nccl_topology import is_nccl_topology, read_nccl_topology
from pipeplan.interop.nvidia_topo import is_nvidia_topo, read_nvidia_topo
from pipeplan.interop.pipedream_graph import is_pipedream_graph, read_pipedream_graph
from pipeplan.interop.piper_json import read_piper_json
from pipeplan.interop.torch_trace import read_torch_trace

__all__ = ["READERS", "import_text", "recognise"]

READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "pipedream": read_pipedream_graph,
        "dapple": read_pipedream_graph,
        "piper": read_piper_json,
        "torch-trace": read_torch_trace,
        "layers-csv": read_layers_csv,
        "nvidia-topo": read_nvidia_topo,
        "nccl": read_nccl_topology,
        "matrix-csv": read_matrix_csv,
    }
)

CLUSTERS = ("nvidia-topo", "nccl", "matrix-csv")
"""The formats that become clusters; the others become models."""
TAKES_ASSUMED = ("nvidia-topo", "nccl")
"""The formats that name links by their kind, without a bandwidth."""
OWN_MARK_WITHIN = 1000
"""Our own files say what they are within so many characters."""


def import_text(text: str, settings: ImportSettings, source_format: str | None = None) -> Imported:
    """The model or the cluster in a text, whose format is recognised unless it is given."""
    chosen = source_format or recognise(text)
    if chosen not in READERS:
        raise InputError(f"from: {chosen!r} is no format{nearest(chosen, READERS)}")
    if settings.assumed_gb_per_s and chosen not in TAKES_ASSUMED:
        raise InputError(f"assume: does not apply to {chosen}; leave it out")
    if settings.microbatch_size is not None and chosen in CLUSTERS:
        raise InputError(f"microbatch-size: does not apply to {chosen}; leave it out")
    return READERS[chosen](text, settings)


def recognise(text: str) -> str:
    """The name of the format that a text seems to be in, from its first characters."""
    begin = text.lstrip()[:1]
    if not begin:
        raise InputError("is empty")
    if begin in ("{", "["):
        if '"pipeplan.' in text[:OWN_MARK_WITHIN]:
            raise InputError("is a file of pipeplan itself; it needs no import")
        return "torch-trace" if '"traceEvents"' in text else "piper"
    if is_nccl_topology(text):
        return "nccl"
    if is_pipedream_graph(text):
        return "pipedream"
    if is_layers_csv(text):
        return "layers-csv"
    if is_nvidia_topo(text):
        return "nvidia-topo"
    first = next(line for line in text.splitlines() if line.strip())
    if any(delimiter in first for delimiter in ",;\t"):
        return "matrix-csv"
    raise InputError(f"is in no format that is known; give --from, one of {', '.join(READERS)}")
