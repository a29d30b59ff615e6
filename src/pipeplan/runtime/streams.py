"""Streams, events and the choice of a GPU: all calls of torch.cuda that the runtime makes.

On CPUs everything here does nothing. Tests put a stand-in for `CudaStreams` in its place.
"""

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["CudaStreams", "HostStreams", "Mark", "Streams", "choose_cuda_device", "set_cuda_device"]

MS_IN_S = 1e3


class Mark:
    """A place in a stream's work: known to be passed, some time after it was set."""

    def wait(self) -> None:
        """Wait, on the host, until the device has passed it."""
        raise NotImplementedError

    def seconds_since(self, earlier: "Mark") -> float:
        """The device's time between two marks that it has passed."""
        raise NotImplementedError


class Streams:
    """What the runtime asks of a device's streams."""

    device: torch.device

    def receiving(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, work is queued on the stream for receives."""
        raise NotImplementedError

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Keep memory of the stream for receives until the computing stream has used it."""
        raise NotImplementedError

    def mark(self) -> Mark | None:
        """Mark this place of the computing stream; None if the host computes by itself."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        raise NotImplementedError


class HostStreams(Streams):
    """The CPU: what was called is done."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def receiving(self) -> contextlib.AbstractContextManager[Any]:
        """Nothing to do."""
        return contextlib.nullcontext()

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Nothing to do."""

    def mark(self) -> Mark | None:
        """None: the clock of the host tells."""
        return None

    def synchronize(self) -> None:
        """Nothing to do."""


class _CudaMark(Mark):
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _CudaMark)
        return float(earlier._event.elapsed_time(self._event)) / MS_IN_S


class CudaStreams(Streams):
    """One GPU: the current stream computes, another one receives."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.set_device(device)
        self._receiving = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def receiving(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, work is queued on the stream for receives."""
        return torch.cuda.stream(self._receiving)

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Keep memory of the stream for receives until the computing stream has used it."""
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def mark(self) -> Mark | None:
        """Record an event on the computing stream."""
        return _CudaMark()

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self.device)


def choose_cuda_device() -> torch.device | None:
    """This rank's GPU; None if there is none.

    It is the one that the default group was made for. Else it is torchrun's LOCAL_RANK. Else it is
    the one that the program has chosen by `torch.cuda.set_device`.
    """
    num_devices = torch.cuda.device_count()
    if not num_devices:
        return None
    if dist.is_initialized() and dist.group.WORLD is not None:
        bound: torch.device | None = dist.group.WORLD.bound_device_id
        if bound is not None:
            return bound
    local_rank = os.environ.get("LOCAL_RANK", "")
    if local_rank.isdecimal():
        return torch.device("cuda", int(local_rank) % num_devices)
    return torch.device("cuda", torch.cuda.current_device())


def set_cuda_device() -> torch.device | None:
    """Make this rank's GPU the current one, before the first collective; None without GPUs."""
    device = choose_cuda_device()
    if device is not None:
        torch.cuda.set_device(device)
    return device
