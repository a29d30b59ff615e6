"""Tells errors of broken connections, which another rank has caused, from a rank's own errors."""

import torch.distributed as dist

__all__ = ["is_of_connection"]

CONNECTION_WORDS = ("gloo", "connection", "nccl", "socket", "broken pipe")


def is_of_connection(error: BaseException) -> bool:
    """Whether an error likely means that another rank has ended."""
    if isinstance(error, dist.DistError):  # of a store or a backend, whatever it says
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(
        word in text for word in CONNECTION_WORDS
    )
