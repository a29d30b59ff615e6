"""Where the boxes of the cluster picture stand: hosts on a ring, devices inside their host."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pipeplan.report.analysis.plan_analysis import PlanAnalysis
from pipeplan.report.names import short_text

__all__ = ["HEIGHT", "WIDTH", "Box", "Layout", "lay_out"]

WIDTH, HEIGHT = 860.0, 430.0
MAX_DEVICE_NODES = 64
"""With more devices the cluster shows hosts alone."""
MAX_HOST_LABELS = 40
MAX_ROOMY_DEVICES = 16
"""Up to this many devices have their names inside their boxes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A host or a device: a rectangle around a middle, with what is written in and about it."""

    x: float
    y: float
    width: float
    height: float
    caption: str
    """What stands in or beside the box; empty where there is no room."""
    name: str
    title: str = ""
    """What it tells when the pointer is over it."""
    stages: tuple[int, ...] = ()
    speed: str = ""
    """Of a device, where speeds differ: `2.5x`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All boxes of the picture."""

    hosts: list[Box]
    nodes: list[Box]
    """A box for each device; for each host where `only_hosts`."""
    only_hosts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """Sizes that depend on how many boxes there are."""

    node_width: float
    node_height: float
    spread: float
    roomy: bool
    alone: bool
    """One host fills the picture; its devices stand on the ring."""
    on_ring: Callable[[int], tuple[float, float]]


def lay_out(analysis: PlanAnalysis) -> Layout:
    """Hosts on a ring, in the order in which the pipeline visits them."""
    devices, hosts = analysis.plan.cluster.devices, analysis.hosts
    only_hosts = len(devices) > MAX_DEVICE_NODES
    stages_of = {d: group.stages for group in analysis.groups for d in group.devices}
    stage_of = {device: stages[0] for device, stages in stages_of.items()}
    members: list[list[int]] = [[] for _ in hosts]
    for device, host in enumerate(analysis.host_of):
        members[host].append(device)
    unused = analysis.num_stages
    for mine in members:
        mine.sort(key=lambda device: (stage_of.get(device, unused), device))
    order = sorted(range(len(hosts)), key=lambda h: (stage_of.get(members[h][0], unused), h))
    room = _room(len(devices), [len(mine) for mine in members], only_hosts, analysis.has_speeds)
    boxes: dict[int, Box] = {}
    nodes: dict[int, Box] = {}
    for slot, host in enumerate(order):
        x, y = (WIDTH / 2, HEIGHT / 2 + 6) if room.alone else room.on_ring(slot)
        mine = members[host]
        boxes[host] = _host_box(analysis, host, mine, x, y, room)
        if only_hosts:
            stages = tuple(sorted({stage for d in mine for stage in stages_of.get(d, ())}))
            nodes[host] = _host_node(hosts[host], len(mine), stages, x, y, room, len(hosts))
        else:
            for device, node in _device_nodes(analysis, mine, stages_of, x, y, room):
                nodes[device] = node
    return Layout(
        hosts=[boxes[host] for host in range(len(hosts))],
        nodes=[nodes[number] for number in range(len(nodes))],
        only_hosts=only_hosts,
    )


def _room(num_devices: int, host_sizes: list[int], only_hosts: bool, has_speeds: bool) -> _Room:
    roomy, alone = num_devices <= MAX_ROOMY_DEVICES, len(host_sizes) == 1
    width, height = (78.0 if has_speeds else 64.0, 34.0) if roomy else (24.0, 20.0)
    if only_hosts:
        width = max(6.0, min(46.0, 1000.0 / len(host_sizes)))
        height = width * 0.7
    slots = host_sizes[0] if alone else len(host_sizes)

    def on_ring(slot: int) -> tuple[float, float]:
        angle = math.pi + 2 * math.pi * slot / max(slots, 1)
        return (
            WIDTH / 2 + (WIDTH / 2 - 110) * math.cos(angle),
            HEIGHT / 2 + 6 + (HEIGHT / 2 - 68) * math.sin(angle),
        )

    return _Room(
        node_width=width,
        node_height=height,
        spread=14.0 if roomy else 5.0,
        roomy=roomy,
        alone=alone,
        on_ring=on_ring,
    )


def _grid(count: int) -> tuple[int, int]:
    """Columns and rows of a grid for so many devices."""
    columns = math.ceil(math.sqrt(count))
    return columns, math.ceil(count / columns)


def _host_box(
    analysis: PlanAnalysis, host: int, mine: list[int], x: float, y: float, room: _Room
) -> Box:
    columns, rows = _grid(len(mine))
    width = columns * (room.node_width + room.spread) + room.spread
    height = rows * (room.node_height + room.spread) + room.spread
    if room.alone:
        width, height = WIDTH - 40, HEIGHT - 44
    name = analysis.hosts[host]
    # A host that is one device of the same name needs no second caption.
    is_device = len(mine) == 1 and analysis.plan.cluster.devices[mine[0]].name == name
    return Box(
        x=x,
        y=y,
        width=width,
        height=height,
        caption="" if is_device else short_text(name, 22),
        name=short_text(name),
    )


def _host_node(
    name: str,
    num_devices: int,
    stages: tuple[int, ...],
    x: float,
    y: float,
    room: _Room,
    num_hosts: int,
) -> Box:
    held = _ranges(stages) if stages else "none"
    return Box(
        x=x,
        y=y,
        width=room.node_width,
        height=room.node_height,
        caption=short_text(name, 7) if num_hosts <= MAX_HOST_LABELS else "",
        name=short_text(name),
        title=f"{short_text(name)}: {num_devices} devices, stages {held}",
        stages=stages,
    )


def _ranges(stages: tuple[int, ...]) -> str:
    """The stages by number; of many the first and the last."""
    if len(stages) > 12:
        return f"{stages[0]} to {stages[-1]} ({len(stages)} of them)"
    return ", ".join(map(str, stages))


def _device_nodes(
    analysis: PlanAnalysis,
    mine: list[int],
    stages_of: dict[int, tuple[int, ...]],
    x: float,
    y: float,
    room: _Room,
) -> list[tuple[int, Box]]:
    columns, rows = _grid(len(mine))
    nodes = []
    for position, device in enumerate(mine):
        row, column = divmod(position, columns)
        at_x = x + (column - (columns - 1) / 2) * (room.node_width + room.spread)
        at_y = y + (row - (rows - 1) / 2) * (room.node_height + room.spread)
        if room.alone and len(mine) > 1:
            at_x, at_y = room.on_ring(position)
        stages = stages_of.get(device, ())
        name = analysis.plan.cluster.devices[device].name
        speed = analysis.plan.cluster.devices[device].speed
        noun = "stages" if len(stages) > 1 else "stage"
        held = f"{noun} {_ranges(stages)}" if stages else "unused"
        at_speed = f", speed {speed:g}" if analysis.has_speeds else ""
        node = Box(
            x=at_x,
            y=at_y,
            width=room.node_width,
            height=room.node_height,
            caption=short_text(name, 10) if room.roomy else "",
            name=short_text(name),
            title=f"{short_text(name)}: {held}{at_speed}",
            stages=stages,
            speed=f"{speed:g}x" if analysis.has_speeds else "",
        )
        nodes.append((device, node))
    return nodes
