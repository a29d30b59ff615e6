"""A table of bandwidths in GB/s: row = sender, column = receiver.

::

    device,host,memory_gb,a,b
    a,h0,16,,12
    b,h0,16,12,

The columns `host`, `memory_gb` and `speed` may be there. The diagonal is ignored, 0 or an empty
cell is no path.
"""

from pipeplan.cluster import Cluster, Device
from pipeplan.documents.text import excerpt
from pipeplan.errors import ClusterError, InputError
from pipeplan.interop.hosts import require_devices
from pipeplan.interop.imported import Imported, ImportSettings
from pipeplan.interop.source_text import csv_rows, number_in

__all__ = ["read_matrix_csv"]

ABOUT_DEVICE = ("host", "memory_gb", "speed")


def read_matrix_csv(text: str, settings: ImportSettings) -> Imported:
    """The cluster whose bandwidths a table holds."""
    (_, header), *rows = csv_rows(text)
    names = [cells[0] for _, cells in rows]
    require_devices(len(names))
    for column in ABOUT_DEVICE:
        if header[1:].count(column) > 1:
            raise InputError(f"line 1: the column {column} stands twice")
    columns = [column for column in header[1:] if column not in ABOUT_DEVICE]
    if columns != names:
        wrong = next((n for n in names if n not in columns), None)
        reason = (
            f"there is no column {excerpt(wrong)}"
            if wrong is not None
            else f"there are {len(columns)} columns for {len(names)} rows, or in another order"
        )
        raise InputError(f"line 1: {reason}; columns name the same devices as rows")
    devices, matrix = [], []
    for number, cells in rows:
        if len(cells) != len(header):
            raise InputError(f"line {number}: has {len(cells)} cells for {len(header)} columns")
        given = dict(zip(header[1:], cells[1:], strict=True))
        devices.append(_device(cells[0], given, f"line {number}"))
        matrix.append(
            tuple(
                0.0
                if name == cells[0] or not given[name]
                else number_in(given[name], f"line {number}: {excerpt(name)}")
                for name in names
            )
        )
    cluster = Cluster(name=settings.name, devices=tuple(devices), bandwidth_gb_per_s=tuple(matrix))
    return Imported(result=cluster)


def _device(name: str, given: dict[str, str], where: str) -> Device:
    if not name:
        raise InputError(f"{where}: the device has no name; it stands in the first column")
    memory, speed = given.get("memory_gb", ""), given.get("speed", "")
    try:
        return Device(
            name=name,
            host=given.get("host", ""),
            memory_gb=number_in(memory, f"{where}: memory_gb") if memory else None,
            speed=number_in(speed, f"{where}: speed") if speed else 1.0,
        )
    except ClusterError as problem:
        raise ClusterError(f"{where}: {problem}") from None
