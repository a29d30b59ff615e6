"""How large a file may be, for reading as for writing: what is written can be read again.

Each limit leaves room for the largest valid input: 10,000 devices, 100,000 layers, a full matrix of
2,048 devices, 10,000,000 blocks. Within them every file is read in seconds and below 1 GB.
"""

from typing import NoReturn

from pipeplan.cluster import Cluster
from pipeplan.errors import ClusterError, InputError

__all__ = [
    "MAX_DEPTH",
    "MAX_JSON_BYTES",
    "MAX_YAML_BYTES",
    "MAX_YAML_VALUES",
    "require_json_size",
    "require_writable",
]

MAX_JSON_BYTES = 250_000_000
"""A schedule of 10,000,000 blocks takes up to 100 MB, all else up to `MAX_REST_BYTES`."""
MAX_REST_BYTES = 128_000_000
"""Of a JSON file besides the schedule; 4,200,000 numbers of 24 characters take 101 MB."""
MAX_MATRIX_NUMBERS = 4_200_000
"""In both matrices of a cluster together; 2,048 devices have 4,194,304 pairs."""
MAX_JSON_VALUES = 6_000_000
"""The matrices, and 100,000 layers with all their fields."""
MAX_JSON_TEXTS = 2_500_000
"""Texts and keys; 100,000 layers have 1,000,000."""
MAX_JSON_CONTAINERS = 400_000
"""Objects and lists; 100,000 layers, 4,096 devices and their matrices have 112,000."""
MAX_YAML_BYTES = 4_000_000
MAX_YAML_VALUES = 300_000
MAX_DEPTH = 32


def require_json_size(rest: bytes) -> None:
    """Refuse JSON, its schedule taken out, that is too large to be read."""
    # Hostile files are mostly commas, quotes and brackets. To count these is quick.
    if len(rest) > MAX_REST_BYTES:
        _refuse(f"is larger than {MAX_REST_BYTES / 1e6:g} MB, the limit for such a file")
    if rest.count(b",") > MAX_JSON_VALUES:
        _refuse(f"has more than {MAX_JSON_VALUES:,} values")
    if rest.count(b'"') > 2 * MAX_JSON_TEXTS:
        _refuse(f"has more than {MAX_JSON_TEXTS:,} texts and keys")
    if rest.count(b"[") + rest.count(b"{") > MAX_JSON_CONTAINERS:
        _refuse(f"has more than {MAX_JSON_CONTAINERS:,} objects and lists")


def require_writable(cluster: Cluster) -> None:
    """Refuse a cluster whose matrices are too large for a file, before anybody works with it."""
    num_full = int(isinstance(cluster.latency_us, tuple | list))
    num_full += cluster.document is None or "bandwidth_gb_per_s" in cluster.document
    if num_full * cluster.num_devices**2 > MAX_MATRIX_NUMBERS:
        raise ClusterError(
            f"devices: the matrices of {cluster.num_devices} devices have"
            f" {num_full * cluster.num_devices**2:,} numbers, more than the"
            f" {MAX_MATRIX_NUMBERS:,} that a file may hold;"
            " give the cluster in shorthand `hosts` and one latency_us"
        )


def _refuse(message: str) -> NoReturn:
    raise InputError(message)
