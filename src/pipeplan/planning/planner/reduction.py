"""A problem with constraints as a smaller one without: fewer layers to cut, fewer devices to use.

Layers that share a stage become one layer. The model loses only the cuts that are not allowed, so
nothing else changes: times, memory and bounds of the smaller problem are those of the plans that
keep the constraints. Devices that stay unused are left out of the cluster. The number of stages and
the devices of the first and the last stage remain limits; kernels know them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeplan.cluster import Cluster, HostMatrix, Matrix
from pipeplan.cost import CostModel
from pipeplan.pipeline import BoundLimit
from pipeplan.planning.limits import Limits
from pipeplan.planning.planner.coarsening import merged_model
from pipeplan.planning.problem import Draft, Planner, Problem, SearchInterrupted

__all__ = ["plan_within_limits", "without_devices"]


def plan_within_limits(problem: Problem, planner: Planner) -> Draft:
    """The draft that `planner` makes for the smaller problem, as one of the whole problem."""
    limits, cost = problem.limits, problem.cost
    devices = [u for u in range(problem.cluster.num_devices) if u not in limits.without]
    ends = [
        end for end in range(1, problem.model.num_layers + 1) if end - 1 not in limits.no_cut_after
    ]
    if limits.without:
        cost = CostModel(cost.model, without_devices(problem.cluster, devices))
    if limits.no_cut_after:
        cost = cost.with_model(merged_model(cost, ends))
    smaller = replace(
        problem,
        cost=cost,
        limits=replace(
            limits,
            no_cut_after=frozenset(),
            without=frozenset(),
            first_on=None if limits.first_on is None else devices.index(limits.first_on),
            last_on=None if limits.last_on is None else devices.index(limits.last_on),
        ),
    )
    try:
        draft = planner(smaller)
    except SearchInterrupted as stop:
        raise SearchInterrupted(_restored(stop.draft, limits, devices, ends)) from None
    return _restored(draft, limits, devices, ends)


def _restored(draft: Draft, limits: Limits, devices: Sequence[int], ends: Sequence[int]) -> Draft:
    """The draft with the layers and devices of the whole problem."""
    bound = draft.bound
    if bound is not None and limits.has_constraints:
        bound = replace(bound, limits=(*bound.limits, BoundLimit.CONSTRAINTS))
    starts = [0, *ends]
    stages = tuple(
        replace(
            stage,
            layers=range(starts[stage.layers.start], starts[stage.layers.stop]),
            devices=tuple(devices[u] for u in stage.devices),
        )
        for stage in draft.stages
    )
    return replace(draft, stages=stages, bound=bound)


def without_devices(cluster: Cluster, kept: Sequence[int]) -> Cluster:
    """The cluster with only these devices, given in rising order."""
    devices = tuple(cluster.devices[u] for u in kept)
    names = {name for device in devices for name in (device.name, device.host)}
    uplinks = cluster.uplink_gb_per_s
    if isinstance(uplinks, Mapping):
        uplinks = {host: gb_per_s for host, gb_per_s in uplinks.items() if host in names}
    members = [tuple(name for name in link.members if name in names) for link in cluster.shared]
    return Cluster(
        name=cluster.name,
        devices=devices,
        uplink_gb_per_s=uplinks or None,
        shared=tuple(
            replace(link, members=mine)
            for link, mine in zip(cluster.shared, members, strict=True)
            if mine
        ),
        bandwidth_gb_per_s=_bandwidth(cluster, kept),
        latency_us=_latency(cluster, kept),
        duplex=cluster.duplex,
    )


def _latency(cluster: Cluster, kept: Sequence[int]) -> float | Matrix:
    if isinstance(cluster.latency_us, tuple | list):
        return _rows(cluster.latency_us, kept)
    return cluster.latency_us


def _bandwidth(cluster: Cluster, kept: Sequence[int]) -> Matrix | HostMatrix:
    links = cluster.bandwidth_gb_per_s
    if not isinstance(links, HostMatrix):
        return _rows(links, kept)
    sizes = Counter(links.host_of_D[list(kept)].tolist())
    return HostMatrix(
        sizes=list(sizes.values()),
        inside=[
            float(links.inside_H[host]) if size > 1 else links.between
            for host, size in sizes.items()
        ],
        between=links.between,
    )


def _rows(matrix: Matrix, kept: Sequence[int]) -> Matrix:
    return tuple(tuple(matrix[u][v] for v in kept) for u in kept)
