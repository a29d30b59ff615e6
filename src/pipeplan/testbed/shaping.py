r"""The emulated network as commands of `ip` and `tc`.

::

    rank 0 [eth0] --- port0 \
    rank 1 [eth0] --- port1 -- shared0 [up0]--[down0] \
                                                        switch
    rank 2 [eth0] ------------------------------ port2 /

Each rank has a namespace; all bridges are in one more. A rank's `eth0` has one class for each
destination, with the rate of the pair. A shared link is a bridge with one pair of devices to the
next larger one. `up` limits what leaves it and `down` what enters it, with one class for each pair
of ranks. They borrow from the link in turns, so rates are max-min fair.

Rates count headers, so targets are raised by what headers take. Packets are as large as the rate of
their pair allows; the route to each destination says how large. Acknowledgements have a class of
their own without a limit: in a queue behind data they would slow down the other direction.
"""

from collections.abc import Iterator, Sequence

from pipeplan.testbed.topology import MOST_PACKET_BYTES, Topology

__all__ = ["SETTINGS", "address", "rank_link", "rank_shaping", "switch_links", "switch_shaping"]

ETHERNET_BYTES, HEADER_BYTES = 14, 52
"""Of each packet: the frame's header, and those of IP and TCP with time stamps."""
LEAST_BURST_BYTES, BURST_S = 4000, 64e-6
UNSHAPED_BYTES_PER_S = 12.5e9
ALMOST_NOTHING = 100.0
"""Bytes a second: less is not possible."""
UNSHAPED, LINK, FIRST_CLASS = 0x1, 0x2, 0x10
MTU = MOST_PACKET_BYTES
QUEUE_PACKETS = 4000
RTO_MIN = "10s"
"""No packet is ever lost. But one may wait in a queue for longer than the kernel expects, who would
send it again: on a crowded link, an eighth of the data was sent twice."""
ACKNOWLEDGEMENT = "match ip protocol 6 0xff match u16 0x0000 0xff80 at 2 match u8 0x10 0xff at 33"
"""TCP, less than 128 bytes, no flag but ACK. Small packets of data have the flag PSH. They must not
overtake the data before them: the receiver would take that for lost, and the sender slow down."""
SETTINGS = {
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
    "net/ipv4/tcp_early_retrans": "0",
    "net/ipv4/tcp_rmem": "4096 8388608 16777216",
    "net/ipv4/tcp_wmem": "4096 1048576 1048576",
    "net/ipv6/conf/all/disable_ipv6": "1",
}
"""Kernel settings of each rank's namespace."""


def address(rank: int) -> str:
    """The address of a rank, inside the emulated network only."""
    return f"10.77.0.{rank + 1}"


def switch_links(topology: Topology, process_ids: Sequence[int]) -> Iterator[str]:
    """Commands of `ip` that make all bridges, and a link into each rank's namespace."""
    yield "link set lo up"
    yield from _bridge("switch")
    for index, switch in enumerate(topology.switches):
        yield from _bridge(f"shared{index}")
        yield f"link add up{index} mtu {MTU} type veth peer name down{index} mtu {MTU}"
        yield f"link set up{index} master shared{index} up"
        yield f"link set down{index} master {_bridge_name(switch.parent)} up"
    for rank, process_id in enumerate(process_ids):
        inner = [i for i, switch in enumerate(topology.switches) if rank in switch.ranks]
        yield (
            f"link add port{rank} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {process_id}"
        )
        yield f"link set port{rank} master {_bridge_name(inner[-1] if inner else None)} up"


def _bridge(name: str) -> Iterator[str]:
    yield f"link add {name} mtu {MTU} type bridge stp_state 0 mcast_snooping 0"
    yield f"link set {name} up"


def _bridge_name(shared: int | None) -> str:
    return "switch" if shared is None else f"shared{shared}"


def rank_link(topology: Topology, rank: int) -> Iterator[str]:
    """Commands of `ip` inside a rank's namespace."""
    yield "link set lo up"
    yield f"addr add {address(rank)}/16 dev eth0"
    # One packet at a time: the kernel would hand several to a limit as one.
    yield f"link set eth0 mtu {MTU} gso_max_segs 1 up"
    for other in range(topology.num_ranks):
        if topology.bytes_per_s[rank][other]:
            size = topology.packet_bytes(rank, other)
            yield f"route add {address(other)}/32 dev eth0 mtu lock {size} rto_min {RTO_MIN}"


def rank_shaping(topology: Topology, rank: int) -> Iterator[str]:
    """Commands of `tc` that limit what a rank sends to each other one."""
    yield from _root("eth0")
    for other, bytes_per_s in enumerate(topology.bytes_per_s[rank]):
        if bytes_per_s:
            number = FIRST_CLASS + other
            gross = bytes_per_s * _gross(topology.packet_bytes(rank, other))
            yield _class("eth0", "1:", number, gross, gross)
            yield _queue("eth0", number)
            yield _filter("eth0", number, f"match ip dst {address(other)}/32")


def switch_shaping(topology: Topology) -> Iterator[str]:
    """Commands of `tc` that limit what goes into and out of each shared link."""
    for index, switch in enumerate(topology.switches):
        outside = [rank for rank in range(topology.num_ranks) if rank not in switch.ranks]
        going = [(inner, outer) for inner in switch.ranks for outer in outside]
        coming = [(outer, inner) for inner, outer in going]
        yield from _share(topology, f"up{index}", switch.out_bytes_per_s, going)
        yield from _share(topology, f"down{index}", switch.in_bytes_per_s, coming)


def _share(
    topology: Topology, device: str, bytes_per_s: float, pairs: Sequence[tuple[int, int]]
) -> Iterator[str]:
    """One limit for all pairs, which share it evenly."""
    sizes = [topology.packet_bytes(*pair) for pair in pairs]
    gross = bytes_per_s * sum(map(_gross, sizes)) / len(sizes)
    yield from _root(device)
    yield _class(device, "1:", LINK, gross, gross)
    for position, (source, target) in enumerate(pairs):
        number = FIRST_CLASS + position
        # All is borrowed from the link. With a rate of its own, a class has a packet to itself.
        yield _class(device, f"1:{LINK:x}", number, ALMOST_NOTHING, gross)
        yield _queue(device, number)
        yield _filter(
            device, number, f"match ip src {address(source)}/32 match ip dst {address(target)}/32"
        )


def _root(device: str) -> Iterator[str]:
    yield f"qdisc add dev {device} root handle 1: htb default {UNSHAPED:x}"
    yield _class(device, "1:", UNSHAPED, UNSHAPED_BYTES_PER_S, UNSHAPED_BYTES_PER_S)
    yield _queue(device, UNSHAPED)
    yield (
        f"filter add dev {device} parent 1: protocol ip prio 1 u32 {ACKNOWLEDGEMENT}"
        f" flowid 1:{UNSHAPED:x}"
    )


def _gross(packet_bytes: int) -> float:
    """How many bytes a packet has for each byte of data."""
    return (packet_bytes + ETHERNET_BYTES) / (packet_bytes - HEADER_BYTES)


def _class(
    device: str, parent: str, number: int, bytes_per_s: float, most_bytes_per_s: float
) -> str:
    return (
        f"class add dev {device} parent {parent} classid 1:{number:x} htb"
        f" rate {round(bytes_per_s * 8)}bit ceil {round(most_bytes_per_s * 8)}bit"
        f" burst {_burst(bytes_per_s)}b cburst {_burst(most_bytes_per_s)}b"
        f" quantum {MTU + ETHERNET_BYTES}"
    )


def _burst(bytes_per_s: float) -> int:
    if bytes_per_s == ALMOST_NOTHING:
        return round(ALMOST_NOTHING)  # the kernel counts a burst in time, up to about a minute
    return round(max(LEAST_BURST_BYTES, BURST_S * bytes_per_s))


def _queue(device: str, number: int) -> str:
    return f"qdisc add dev {device} parent 1:{number:x} pfifo limit {QUEUE_PACKETS}"


def _filter(device: str, number: int, match: str) -> str:
    return f"filter add dev {device} parent 1: protocol ip prio 2 u32 {match} flowid 1:{number:x}"
