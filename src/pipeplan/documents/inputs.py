"""The two inputs as documents: from the fields of a file to a model or a cluster, and back."""

import dataclasses
from typing import Any

from pipeplan.cluster import CLUSTER_FORMAT, Cluster, Duplex, HostGroup, Matrix, expand_hosts
from pipeplan.documents.conversion import convert
from pipeplan.documents.limits import require_writable
from pipeplan.documents.text import excerpt
from pipeplan.errors import ClusterError, InputError
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.shared_links import SharedLink, Uplinks

__all__ = [
    "Shorthand",
    "cluster_document",
    "fields_of",
    "model_document",
    "parse_cluster",
    "parse_model",
]

MODEL_FORMAT = "pipeplan.model/1"


def model_document(model: ModelProfile) -> dict[str, Any]:
    """The model profile as the file holds it."""
    if model.document is not None:
        return model.document
    document = {"format": MODEL_FORMAT, **_without_defaults(model)}
    document["layers"] = [_layer_document(layer) for layer in model.layers]
    return document


def _layer_document(layer: LayerProfile) -> dict[str, Any]:
    document = {
        name: value
        for name, value in _without_defaults(layer).items()
        if value != _settled_default(layer, name)
    }
    if layer.at:
        document["at"] = [_without_defaults(times) for times in layer.at]
    return document


def _settled_default(layer: LayerProfile, name: str) -> float | None:
    """What a field has if the file leaves it out, where another field says it."""
    if name in ("gradient_bytes", "activation_bytes"):
        return layer.output_bytes
    return layer.activation_bytes if name == "weight_grad_bytes" else None


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """The cluster as the file holds it; one that no file can hold is refused."""
    require_writable(cluster)
    if cluster.document is not None:
        return cluster.document
    document = {"format": CLUSTER_FORMAT, **_without_defaults(cluster)}
    document["bandwidth_gb_per_s"] = tuple(cluster.bandwidth_gb_per_s)
    document["devices"] = [
        {
            name: value
            for name, value in _without_defaults(device).items()
            if name != "host" or value != device.name
        }
        for device in cluster.devices
    ]
    if cluster.shared:
        document["shared"] = [_without_defaults(link) for link in cluster.shared]
    return document


def _without_defaults(noun: Any) -> dict[str, Any]:
    """The fields of a noun that differ from their defaults."""
    return {
        field.name: getattr(noun, field.name)
        for field in dataclasses.fields(noun)
        if field.init and getattr(noun, field.name) != field.default
    }


# ---------------------------------------------------------------------------- reading


def fields_of(document: Any, *expected: str) -> dict[str, Any]:
    """The fields besides `format`, which has to be one of the expected ones."""
    formats = " or ".join(map(repr, expected))
    if not isinstance(document, dict):
        raise InputError(f"format: is missing; a file holds one object with format {formats}")
    if "format" not in document:
        raise InputError(f"format: is missing; this reader takes {formats}")
    if document["format"] not in expected:
        raise InputError(f"format: {excerpt(document['format'])}; this reader takes {formats}")
    return {name: value for name, value in document.items() if name != "format"}


def parse_model(document: Any) -> ModelProfile:
    """The model profile that a document holds."""
    model = convert(fields_of(document, MODEL_FORMAT), ModelProfile)
    object.__setattr__(model, "document", document)
    return model


def parse_cluster(document: Any) -> Cluster:
    """The cluster that a document holds, shorthand expanded."""
    fields = fields_of(document, CLUSTER_FORMAT)
    if "hosts" not in fields:
        cluster = convert(fields, Cluster)
    else:
        for name in ("devices", "bandwidth_gb_per_s"):
            if name in fields:
                raise ClusterError(f"{name}: stands beside hosts, its shorthand; keep one of them")
        short = convert(fields, Shorthand)
        cluster = expand_hosts(
            short.name,
            short.hosts,
            between_hosts_gb_per_s=short.between_hosts_gb_per_s,
            latency_us=short.latency_us,
            duplex=short.duplex,
            uplink_gb_per_s=short.uplink_gb_per_s,
            shared=short.shared,
        )
    object.__setattr__(cluster, "document", document)
    return cluster


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shorthand:
    """A cluster file in shorthand."""

    name: str
    hosts: tuple[HostGroup, ...]
    between_hosts_gb_per_s: float | None = None
    latency_us: float | Matrix = 0.0
    duplex: Duplex = Duplex.FULL
    uplink_gb_per_s: Uplinks = None
    shared: tuple[SharedLink, ...] = ()
