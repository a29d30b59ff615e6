"""What one emulated device does while links are measured."""

import msgspec
import torch
import torch.distributed as dist

from pipeplan.cluster import Cluster
from pipeplan.documents.inputs import cluster_document
from pipeplan.measure.all_links import measure_links
from pipeplan.splitting.torch_private import without_torch_log
from pipeplan.testbed.orders import Answer, LinksOrder, Way
from pipeplan.testbed.pacing import pace_sockets
from pipeplan.testbed.system_calls import take_host_name
from pipeplan.testbed.topology import Topology

__all__ = ["measure_rank"]


def measure_rank(order: LinksOrder, cluster: Cluster, topology: Topology, rank: int) -> bytes:
    """Join the other ranks, measure, and return the answer; that of rank 0 counts.

    With namespaces the machine is called as the device's host, as it would be there.
    """
    torch.set_num_threads(1)
    if order.way is Way.NAMESPACES:
        take_host_name(cluster.devices[topology.devices[rank]].host)
    with without_torch_log():  # no emulated host has a name server
        dist.init_process_group("gloo")
    if order.way is Way.PACING:
        pace_sockets(topology, rank)
    measured = measure_links(
        name=cluster.name,
        seconds=order.seconds,
        one_at_a_time=order.one_at_a_time,
        group=dist.group.WORLD,
    )
    dist.barrier()  # rank 0 holds the store
    dist.destroy_process_group()
    answer = Answer(cluster=cluster_document(measured.cluster), notes=list(measured.notes))
    return msgspec.json.encode(answer)
