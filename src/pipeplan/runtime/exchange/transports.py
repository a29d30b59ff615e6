"""Sends tensors from rank to rank: over gloo between CPUs, over NCCL between GPUs.

Gloo has one connection for each pair of ranks, and tells messages apart by tags. NCCL has no tags
and matches messages in order. So each channel gets one NCCL communicator for each direction, and
receives are posted in the order in which the sender sends.

A communicator queues its work behind what the current stream was given before. A send has to wait
for the computation of its tensor, so it is started on the computing stream. A receive needs nothing
from the computation. It is started on a stream of its own, which is idle::

    computing stream   |  B0  |  F2  |wait| B1 ...      waits for what it needs next, nothing else
    receives           |   gradient 1     |
    sends                     | output 2 |              nobody waits: kept until they are done

Communicators are made at the start, not by the first message: making one stops both hosts.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipeplan.errors import RuntimeMismatchError
from pipeplan.pipeline import Kind
from pipeplan.runtime.streams import CudaStreams, HostStreams, Streams, choose_cuda_device

__all__ = ["GlooTransport", "NcclTransport", "Transport", "make_transport"]


class Transport:
    """Sends and receives that return at once."""

    posts_ahead: bool
    """Whether receives may be posted in another order than that of the sends."""
    carries_notes = True
    """Whether numbers may ride with messages (`riding`). Then ranks end a step one by one."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.device = streams.device
        self.hosts: Any = dist.group.WORLD
        """A gloo group of all ranks, for what hosts tell each other."""

    def send(
        self, tensor: torch.Tensor, rank: int, tag: int, channel: int, kind: Kind
    ) -> dist.Work:
        """Start to send; the tensor must not change before the work is done."""
        raise NotImplementedError

    def receive(
        self, tensor: torch.Tensor, rank: int, tag: int, channel: int, kind: Kind
    ) -> dist.Work:
        """Start to receive into the tensor."""
        raise NotImplementedError

    def send_header(self, header: torch.Tensor, rank: int, tag: int) -> dist.Work:
        """Start to send memory of the host to another host."""
        # As dist.isend, without its checks, which take longer than the call.
        work: dist.Work = self.hosts.send([header], rank, tag)
        return work

    def receive_header(self, header: torch.Tensor, rank: int, tag: int) -> dist.Work:
        """Start to receive into memory of the host."""
        work: dist.Work = self.hosts.recv([header], rank, tag)
        return work

    def new_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory to receive into."""
        with self.streams.receiving():
            return torch.empty(shape, dtype=dtype, device=self.device)

    def take_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let the computation use what was received."""
        for tensor in tensors:
            self.streams.hand_over(tensor)

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        self.streams.synchronize()


class GlooTransport(Transport):
    """Between CPUs: one group, messages told apart by tags."""

    posts_ahead = True

    def send(
        self, tensor: torch.Tensor, rank: int, tag: int, channel: int, kind: Kind
    ) -> dist.Work:
        """Start to send."""
        return self.send_header(_real(tensor), rank, tag)

    def receive(
        self, tensor: torch.Tensor, rank: int, tag: int, channel: int, kind: Kind
    ) -> dist.Work:
        """Start to receive."""
        return self.receive_header(_real(tensor), rank, tag)

    def new_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory to receive into."""
        return torch.empty(shape, dtype=dtype)

    def take_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing to do."""


class NcclTransport(Transport):
    """Between GPUs: one communicator for each channel and direction, messages in order."""

    posts_ahead = False
    carries_notes = False

    def __init__(self, streams: Streams, stage_ranks: Sequence[Sequence[int]]) -> None:
        super().__init__(streams)
        self.hosts = dist.new_group(backend="gloo")
        # new_group demands that every rank makes every group, in the same order.
        self._groups = {
            (channel, kind): dist.new_group(
                sorted({*stage_ranks[channel], *stage_ranks[channel + 1]})
            )
            for channel in range(len(stage_ranks) - 1)
            if set(stage_ranks[channel]) != set(stage_ranks[channel + 1])  # else no messages
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        }
        self._make_communicators(stage_ranks)

    def send(
        self, tensor: torch.Tensor, rank: int, tag: int, channel: int, kind: Kind
    ) -> dist.Work:
        """Start to send, once the computing stream has made the tensor."""
        work = dist.isend(tensor, rank, group=self._groups[channel, kind])
        assert work is not None  # this rank is in the group
        return work

    def receive(
        self, tensor: torch.Tensor, rank: int, tag: int, channel: int, kind: Kind
    ) -> dist.Work:
        """Start to receive, whatever the computing stream does."""
        with self.streams.receiving():
            work = dist.irecv(tensor, rank, group=self._groups[channel, kind])
        assert work is not None  # this rank is in the group
        return work

    def _make_communicators(self, stage_ranks: Sequence[Sequence[int]]) -> None:
        """Send one byte between every pair, pair after pair in the same order on all ranks."""
        rank = dist.get_rank()
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for channel, kind in self._groups:
            for before in stage_ranks[channel]:
                for behind in stage_ranks[channel + 1]:
                    pair = (before, behind) if kind is Kind.FORWARD else (behind, before)
                    if rank == pair[0]:
                        self.send(byte, pair[1], 0, channel, kind).wait()
                    elif rank == pair[1]:
                        self.receive(byte, pair[0], 0, channel, kind).wait()
        self.streams.synchronize()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def make_transport(local_index: int, stage_ranks: Sequence[Sequence[int]]) -> Transport:
    """The transport that fits the default group's backend, with this rank's device."""
    if "nccl" not in str(dist.get_backend()):
        return GlooTransport(HostStreams())
    device = choose_cuda_device()
    if device is None:
        raise RuntimeMismatchError(
            "ranks: use NCCL, but this process sees no GPU; initialize torch.distributed with gloo"
        )
    return NcclTransport(CudaStreams(device), stage_ranks)
