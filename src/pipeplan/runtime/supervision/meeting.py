"""Where ranks meet before they make a pipeline together."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from pipeplan.runtime.supervision.arrival import Arrival
from pipeplan.runtime.supervision.launching import joined_processes
from pipeplan.runtime.supervision.options import WatchdogOptions
from pipeplan.splitting.torch_private import default_store

__all__ = ["meeting_ranks", "open_store"]

_MEETINGS = itertools.count()
"""Numbers the pipelines that this process has begun to make. All ranks make the same ones."""


@contextmanager
def meeting_ranks(options: WatchdogOptions) -> Iterator[None]:
    """Inside what all ranks do to make a pipeline; who does not come is named."""
    store = open_store(f"meeting/{next(_MEETINGS)}")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with Arrival(store, rank, num_ranks, "make their pipeline", options, joined_processes()):
        yield


def open_store(name: str) -> Any:
    """A client of the ranks' store, with a prefix of its own."""
    return dist.PrefixStore(f"pipeplan/{name}", default_store().clone())  # type: ignore[attr-defined]
