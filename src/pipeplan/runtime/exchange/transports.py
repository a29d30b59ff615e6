"""Sends tensors from rank to rank: over gloo between CPUs, over NCCL between GPUs.

Gloo has one connection for each pair of ranks, and tells messages apart by tags. NCCL has no tags
and matches messages in order. So each channel gets one NCCL communicator for each direction, and
receives are posted in the order in which the sender sends. A communicator queues its work on its
own stream. Waiting for that work stops the computing stream, but never the host.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from pipeplan.pipeline import Kind

__all__ = ["GlooTransport", "NcclTransport", "Transport", "make_transport"]


class Transport:
    """Sends and receives that return at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

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

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""


class GlooTransport(Transport):
    """Between CPUs: one group, messages told apart by tags."""

    def send(
        self, tensor: torch.Tensor, rank: int, tag: int, channel: int, kind: Kind
    ) -> dist.Work:
        """Start to send."""
        work = dist.isend(tensor, rank, tag=tag)
        assert work is not None  # this rank is in the group
        return work

    def receive(
        self, tensor: torch.Tensor, rank: int, tag: int, channel: int, kind: Kind
    ) -> dist.Work:
        """Start to receive."""
        work = dist.irecv(tensor, rank, tag=tag)
        assert work is not None  # this rank is in the group
        return work


class NcclTransport(Transport):
    """Between GPUs: one communicator for each channel and direction, messages in order."""

    def __init__(self, device: torch.device, stage_ranks: Sequence[Sequence[int]]) -> None:
        super().__init__(device)
        # new_group demands that every rank makes every group, in the same order.
        self._groups = {
            (channel, kind): dist.new_group(
                sorted({*stage_ranks[channel], *stage_ranks[channel + 1]})
            )
            for channel in range(len(stage_ranks) - 1)
            for kind in Kind
        }

    def send(
        self, tensor: torch.Tensor, rank: int, tag: int, channel: int, kind: Kind
    ) -> dist.Work:
        """Start to send."""
        work = dist.isend(tensor, rank, group=self._groups[channel, kind])
        assert work is not None  # this rank is in the group
        return work

    def receive(
        self, tensor: torch.Tensor, rank: int, tag: int, channel: int, kind: Kind
    ) -> dist.Work:
        """Start to receive."""
        work = dist.irecv(tensor, rank, group=self._groups[channel, kind])
        assert work is not None  # this rank is in the group
        return work

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self.device)


def make_transport(local_index: int, stage_ranks: Sequence[Sequence[int]]) -> Transport:
    """The transport that fits the default group's backend, with this rank's device."""
    if "nccl" in str(dist.get_backend()):
        device = torch.device("cuda", local_index % max(torch.cuda.device_count(), 1))
        torch.cuda.set_device(device)
        return NcclTransport(device, stage_ranks)
    return GlooTransport(torch.device("cpu"))
