"""How long a device works, between two marks; the only place that knows kinds of devices.

A CPU has done what a call has returned from, so that the host's clock tells. A GPU runs behind its
host. There, CUDA events in the stream tell what passed between them, on the device's own clock.
Estimates have a third clock (`roofline`), which adds up what operations would take.
"""

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "clock_of"]

MS_IN_S = 1e3


class Clock(Protocol):
    """Marks moments of a device's work."""

    def mark(self) -> Any:
        """This moment: behind all work that was given to the device so far."""

    def ms_between(self, start: Any, end: Any) -> float:
        """The milliseconds between two marks; waits until the device has reached the later one."""

    def flops_between(self, start: Any, end: Any) -> float:
        """The FLOPs between two marks; 0 where they are not counted."""


class HostClock:
    """The clock of a device that has worked when a call returns."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def ms_between(self, start: float, end: float) -> float:
        """The milliseconds between two marks."""
        return (end - start) * MS_IN_S

    def flops_between(self, start: float, end: float) -> float:
        """Not counted."""
        return 0.0


class CudaClock:
    """Events in the current stream of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """An event behind everything that was queued so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def ms_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """The milliseconds between two marks; the host waits for the later one."""
        end.synchronize()
        return float(start.elapsed_time(end))

    def flops_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Not counted."""
        return 0.0


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
