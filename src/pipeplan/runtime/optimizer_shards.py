"""Shares the optimizer out over the replicas of a group (`shard_optimizer` of a plan).

Each replica has an optimizer of some of the group's parameters, so that it keeps the moments of
these alone. Gradients are summed as ever, and whole on every replica. Then each replica steps its
own parameters, and gives the others their new values::

    replica 0   sum gradients | step a, b | a, b ->     | -> c
    replica 1   sum gradients | step c    | -> a, b     | c ->

That is exact for every optimizer that updates each parameter by itself; others are refused where
plans have several groups, and here too. Parameters are dealt out whole, the largest first, each to
the replica that has least. So shares are nearly equal unless one parameter is larger than a share.

Reference:
    Rajbhandari et al. 2020, "ZeRO", SC20, section 5.1: optimizer states are partitioned.
    Differs: by whole parameters, and gradients are all-reduced. So a step moves half as much again
    as an all-reduce; the plan counts a reduce-scatter and an all-gather, which move as much as it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.pipeline import Plan
from pipeplan.runtime.replica_setup import Replica

__all__ = ["OptimizerShards", "deal_out", "find_shards"]

PIECE_BYTES = 25e6
"""What is sent at once, at most; or one parameter."""


def deal_out(num_bytes: Mapping[str, int], num_shares: int) -> dict[str, int]:
    """The share of each name, such that shares have about the same bytes."""
    loads = [0] * num_shares
    share_of: dict[str, int] = {}
    for name in sorted(num_bytes, key=lambda name: (-num_bytes[name], name)):
        share = loads.index(min(loads))
        share_of[name] = share
        loads[share] += num_bytes[name]
    return share_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerShards:
    """Which replica of this rank's group updates which parameters."""

    named: Mapping[str, nn.Parameter]
    """The parameters of the group, by name."""
    share_of: Mapping[str, int]
    index: int
    """Which share is this rank's."""
    group: Any
    ranks: Sequence[int]
    """The rank of each share."""

    def own(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank updates."""
        return {name: p for name, p in self.named.items() if self.share_of[name] == self.index}

    def give_new_values(self) -> None:
        """Give all replicas the parameters as their owners have updated them."""
        under_way = []
        with torch.no_grad():
            for share, rank in enumerate(self.ranks):
                for piece in self._pieces(share):
                    flat = torch.cat([parameter.detach().reshape(-1) for parameter in piece])
                    work = dist.broadcast(flat, rank, group=self.group, async_op=True)
                    under_way.append((share, piece, flat, work))
            for share, piece, flat, work in under_way:
                work.wait()
                if share != self.index:
                    parts = torch.split(flat, [parameter.numel() for parameter in piece])
                    for parameter, values in zip(piece, parts, strict=True):
                        parameter.copy_(values.view_as(parameter))

    def _pieces(self, share: int) -> list[list[nn.Parameter]]:
        """The parameters of a share, as they are sent together."""
        pieces: list[list[nn.Parameter]] = []
        before, size = None, 0.0
        for name, parameter in self.named.items():
            if self.share_of[name] != share:
                continue
            kind = (parameter.dtype, parameter.device)
            if kind != before or size + parameter.nbytes > PIECE_BYTES:
                pieces.append([])
                size = 0.0
            pieces[-1].append(parameter)
            before, size = kind, size + parameter.nbytes
        return pieces


def find_shards(
    plan: Plan, replica: Replica | None, first_name_of: Mapping[str, str]
) -> OptimizerShards | None:
    """How this rank's group shares its optimizer out; None if it does not."""
    if not plan.shard_optimizer or replica is None or len(replica.ranks) == 1:
        return None
    named = {first_name_of[name]: parameter for name, parameter in replica.named.items()}
    return OptimizerShards(
        named=named,
        share_of=deal_out({name: p.nbytes for name, p in named.items()}, len(replica.ranks)),
        index=replica.ranks.index(dist.get_rank()),
        group=replica.group,
        ranks=replica.ranks,
    )
