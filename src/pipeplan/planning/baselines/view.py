"""The cluster as published planners see it: equal devices, equal hosts, one or two bandwidths.

The published cost models do not know single links. Each assumes one bandwidth everywhere (flat),
or one inside a host and one between hosts (hierarchical). Most assume equal devices. This module
derives these numbers from the real cluster, once for all baselines. Their plans are then judged on
the real cluster.

- A bandwidth of a view is the harmonic mean over its ordered pairs of devices. So bytes divided by
  this bandwidth is the mean time over the pairs. `docs/baselines.md` compares other averages; most
  of them make the baselines slower. Latencies are left out, as published.
- The speed of a view is the median over its devices.
- Ranks run host by host, hosts in the order of their first device, as launchers number them.
- All baselines assume that any two devices can talk. If the cluster has missing links, a planner
  that replicates gets devices that can all talk to one another. A planner that builds a plain chain
  gets a chain of neighbours that can talk. Both are found greedily, because finding the largest is
  NP-hard. If no link is missing, both are the whole cluster.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import gcd, inf

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster import HostMatrix
from pipeplan.cost import BYTES_PER_MS_IN_GB_PER_S, CostModel, Floats, median, prefix_sums
from pipeplan.pipeline import Stage
from pipeplan.planning.problem import Draft, Problem
from pipeplan.schedules import SCHEDULES

__all__ = [
    "ClusterView",
    "chained_ranks",
    "execute",
    "fastest",
    "range_sums",
    "view_cluster",
]

MAX_SEEDS = 64
"""With missing links: from so many devices a clique or a chain is grown; the largest counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """Devices that can all talk to one another, and the few numbers that describe them."""

    ranks: tuple[int, ...]
    """The devices, host by host."""
    hosts: tuple[tuple[int, ...], ...]
    """The same devices, divided by host."""
    flat_bytes_per_ms: float
    """Between any two; infinite if there is only one device."""
    inside_bytes_per_ms: float
    """Between two devices of one host; the flat bandwidth if no host has two."""
    between_bytes_per_ms: float
    """Between two hosts; the flat bandwidth if there is only one host."""
    speed: float
    memory_bytes: float
    """Of the smallest device; infinite if no device has a limit."""

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self.ranks)

    @property
    def group_size(self) -> int:
        """The greatest common divisor of the hosts' numbers of devices."""
        return gcd(*(len(host) for host in self.hosts))

    @property
    def has_equal_hosts(self) -> bool:
        """Whether all hosts have the same number of devices."""
        return len({len(host) for host in self.hosts}) == 1


@lru_cache(maxsize=1)  # published planners ask one after the other
def view_cluster(cost: CostModel) -> ClusterView:
    """The view of the devices that can all talk to one another."""
    ranks = _connected_ranks(cost)
    host_of = [cost.cluster.devices[device].host for device in ranks]
    hosts: dict[str, list[int]] = {}
    for device, host in zip(ranks, host_of, strict=True):
        hosts.setdefault(host, []).append(device)
    flat, inside, between = _mean_rates(cost, ranks, host_of)
    limits = [cost.cluster.devices[device].memory_gb for device in ranks]
    return ClusterView(
        ranks=ranks,
        hosts=tuple(tuple(host) for host in hosts.values()),
        flat_bytes_per_ms=flat,
        inside_bytes_per_ms=inside,
        between_bytes_per_ms=between,
        speed=median(cost.speed_D[list(ranks)]),
        memory_bytes=min((limit * 1e9 for limit in limits if limit is not None), default=inf),
    )


def chained_ranks(cost: CostModel) -> tuple[int, ...]:
    """Devices in an order in which each can talk to the next one; if possible by rank."""
    ranks = _ranks(cost)
    if cost.is_connected:
        return tuple(ranks)
    connected_DD = cost.connected_DD()
    if all(connected_DD[u, v] for u, v in pairwise(ranks)):
        return tuple(ranks)
    chains = [_connected_ranks(cost)]
    chains += [_grow_chain(connected_DD, ranks, start) for start in ranks[:MAX_SEEDS]]
    return max(chains, key=len)


def range_sums(values_L: Floats) -> Floats:
    """Entry [i, j] is the sum over layers i..j-1, and zero if j <= i. Shape [L + 1, L + 1]."""
    before = prefix_sums(values_L)
    sums: Floats = np.maximum(before[None, :] - before[:, None], 0.0)
    return sums


def execute(problem: Problem, stages: Sequence[Stage], rule: str) -> Draft:
    """The stages under a schedule, timed by our simulator on the real cluster."""
    run = SCHEDULES[rule](problem.cost.pipeline_costs(stages), problem.num_microbatches)
    return Draft(stages=tuple(stages), codes=run.order_SM2, iteration_ms=run.iteration_ms)


def fastest(drafts: Sequence[Draft]) -> Draft:
    """The draft with the shortest iteration; the first of equals."""
    return min(drafts, key=lambda draft: draft.iteration_ms)


def _mean_rates(
    cost: CostModel, ranks: Sequence[int], host_of: Sequence[str]
) -> tuple[float, float, float]:
    """The mean rate of all pairs, of pairs inside hosts and of pairs between hosts."""
    if cost.host_links is not None:
        return _mean_rates_of_hosts(cost, cost.host_links, ranks)
    names = np.array(host_of)
    same_host = names[:, None] == names[None, :]
    different = ~np.eye(len(ranks), dtype=bool)
    bytes_per_ms = cost.rates_between(ranks, ranks)
    flat = _mean_rate(bytes_per_ms[different], inf)
    inside = _mean_rate(bytes_per_ms[same_host & different], flat)
    return flat, inside, _mean_rate(bytes_per_ms[~same_host], flat)


def _mean_rates_of_hosts(
    cost: CostModel, links: HostMatrix, ranks: Sequence[int]
) -> tuple[float, float, float]:
    """The same from the numbers of pairs, for clusters that are too large for a list of pairs."""
    _, first, sizes = np.unique(links.host_of_D[list(ranks)], return_index=True, return_counts=True)
    inside_H = [float(cost.rates_between([u], [u])[0, 0]) for u in np.array(ranks)[first]]
    pairs_H = [int(size) * (int(size) - 1) for size in sizes]
    num_between = len(ranks) * (len(ranks) - 1) - sum(pairs_H)
    between = links.between * BYTES_PER_MS_IN_GB_PER_S
    rates, counts = [*inside_H, between], [*pairs_H, num_between]
    flat = _harmonic_mean(rates, counts, inf)
    inside = _harmonic_mean(inside_H, pairs_H, flat)
    return flat, inside, between if num_between else flat


def _harmonic_mean(rates: Sequence[float], counts: Sequence[int], otherwise: float) -> float:
    """The harmonic mean of rates that occur so often; exact if all of them are equal."""
    used = [(rate, count) for rate, count in zip(rates, counts, strict=True) if count]
    if not used:
        return otherwise
    if len({rate for rate, _ in used}) == 1:
        return used[0][0]
    return sum(count for _, count in used) / sum(count / rate for rate, count in used)


def _mean_rate(bytes_per_ms: Floats, otherwise: float) -> float:
    """The harmonic mean; exact if all rates are equal, so that equal plans stay equal."""
    if not bytes_per_ms.size:
        return otherwise
    if (bytes_per_ms == bytes_per_ms[0]).all():
        return float(bytes_per_ms[0])
    return float(bytes_per_ms.size / (1 / bytes_per_ms).sum())


def _ranks(cost: CostModel) -> list[int]:
    first_of: dict[str, int] = {}
    for index, device in enumerate(cost.cluster.devices):
        first_of.setdefault(device.host, index)
    devices = cost.cluster.devices
    return sorted(range(len(devices)), key=lambda device: (first_of[devices[device].host], device))


def _connected_ranks(cost: CostModel) -> tuple[int, ...]:
    """The largest clique found: grown from each device, neighbours of high degree first."""
    ranks = _ranks(cost)
    if cost.is_connected:
        return tuple(ranks)
    connected_DD = cost.connected_DD()
    by_degree = sorted(ranks, key=lambda device: -int(connected_DD[device].sum()))
    best: set[int] = set()
    for start in by_degree[:MAX_SEEDS]:
        allowed = connected_DD[start].copy()
        clique = {start}
        for device in by_degree:
            if allowed[device] and device not in clique:
                clique.add(device)
                allowed &= connected_DD[device]
        if len(clique) > len(best):
            best = clique
    return tuple(device for device in ranks if device in best)


def _grow_chain(
    connected_DD: NDArray[np.bool_], ranks: Sequence[int], start: int
) -> tuple[int, ...]:
    """A chain from `start`: each step to the free neighbour with the fewest free neighbours."""
    free = set(ranks) - {start}
    chain = [start]
    while True:
        steps = [device for device in ranks if device in free and connected_DD[chain[-1], device]]
        if not steps:
            return tuple(chain)
        left = sorted(free)
        chain.append(min(steps, key=lambda device: int(connected_DD[device, left].sum())))
        free.remove(chain[-1])
