"""One number for each pair of devices of a cluster of hosts, without a list of all pairs."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np

__all__ = ["HostMatrix"]


class HostMatrix(Sequence[tuple[float, ...]]):
    """The matrix of a cluster of hosts: one number inside each host, one between all hosts.

    It looks like a tuple of rows, but makes a row only when asked. So 10,000 devices take no more
    room than their list. Devices of a host share one row, and so do all lone devices: the diagonal
    is ignored, so a lone device needs no row of its own.
    """

    def __init__(self, sizes: Sequence[int], inside: Sequence[float], between: float) -> None:
        self.between = float(between)
        """Between devices of different hosts."""
        self.inside_H = np.array(inside, dtype=np.float64)
        """Inside each host; between hosts for a lone device."""
        self.host_of_D = np.repeat(np.arange(len(sizes)), sizes)
        self._start_H = [0, *np.cumsum(sizes).tolist()]
        self._last: tuple[int, tuple[float, ...]] = (-1, ())

    def __len__(self) -> int:
        return len(self.host_of_D)

    @overload
    def __getitem__(self, index: int) -> tuple[float, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[float, ...], ...]: ...
    def __getitem__(self, index: int | slice) -> tuple[float, ...] | tuple[tuple[float, ...], ...]:
        if isinstance(index, slice):
            return tuple(self[row] for row in range(*index.indices(len(self))))
        return self._row_of_host(int(self.host_of_D[index]))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, HostMatrix):
            return (
                self.between == other.between
                and self._start_H == other._start_H
                and bool((self.inside_H == other.inside_H).all())
            )
        if not isinstance(other, tuple | list) or len(other) != len(self):
            return False
        return all(mine == tuple(theirs) for mine, theirs in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"HostMatrix({len(self.inside_H)} hosts, {len(self)} devices)"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        same_host = self.host_of_D[:, None] == self.host_of_D[None, :]
        full = np.where(same_host, self.inside_H[self.host_of_D][:, None], self.between)
        return full if dtype is None else full.astype(dtype, copy=False)

    @cached_property
    def is_connected(self) -> bool:
        """Whether every two devices have a path."""
        return bool(self.inside_H.min() > 0) and (len(self.inside_H) == 1 or self.between > 0)

    def _row_of_host(self, host: int) -> tuple[float, ...]:
        start, end = self._start_H[host], self._start_H[host + 1]
        key = host if end - start > 1 else -2  # all lone devices share a row
        if self._last[0] != key:
            row = [self.between] * len(self)
            if end - start > 1:
                row[start:end] = [float(self.inside_H[host])] * (end - start)
            self._last = (key, tuple(row))
        return self._last[1]
