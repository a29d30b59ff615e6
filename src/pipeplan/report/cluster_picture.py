"""The cluster as SVG for the page: devices in the colour of their stage, links by bandwidth.

Links have the colour of their bandwidth and are as wide as they are busy. A host whose devices
share links has a bar for each direction, filled as far as that is busy.
"""

import math
from collections.abc import Iterator, Sequence

from pipeplan.report.analysis.links import Link
from pipeplan.report.analysis.plan_analysis import PlanAnalysis
from pipeplan.report.cluster_layout import HEIGHT, WIDTH, Box, lay_out
from pipeplan.report.colours import BANDWIDTH_COLOURS, stage_colour
from pipeplan.report.elements import Markup, element, join
from pipeplan.report.names import short_text
from pipeplan.report.units import humanise_bytes

__all__ = ["cluster_svg"]

MAX_FAINT_HOSTS = 24
"""With more hosts the unused paths between them are not drawn."""
MAX_LINKS = 1500
"""Of more than these the busiest are drawn."""


def cluster_svg(analysis: PlanAnalysis) -> Markup:
    """The picture, and below it the legend of its colours."""
    layout = lay_out(analysis)
    used = analysis.links(between_hosts=True, most=MAX_LINKS)
    host_of = analysis.host_of
    inside = [
        link
        for link in (() if layout.only_hosts else analysis.links().links)
        if host_of[link.source] == host_of[link.target]
    ]
    scale = _BandwidthScale([link.gb_per_s for link in (*used.links, *inside)])
    parts = [] if len(layout.hosts) > MAX_FAINT_HOSTS else _faint_links(analysis, layout.hosts)
    # The busiest first, so that thin links stay visible on wide ones.
    by_use = sorted(used.links, key=lambda link: -link.busy)
    parts += [_curve(link, layout.hosts, scale) for link in by_use]
    if not layout.only_hosts:
        parts += [join(_host(box)) for box in layout.hosts]
        parts += [join(_card(analysis, host, box)) for host, box in enumerate(layout.hosts)]
        parts += [_curve(link, layout.nodes, scale) for link in inside]
    parts += [_node(node) for node in layout.nodes]
    picture = element(
        "svg",
        *parts,
        class_="cluster",
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        role="img",
        aria_label="The cluster: devices, their stages and the links between them",
    )
    notes = [scale.legend()]
    if len(used.links) < used.num_used:
        text = f"The busiest {len(used.links)} of {used.num_used} links."
        notes.append(element("p", text, class_="note"))
    return join([picture, *notes])


class _BandwidthScale:
    """Colours for bandwidths, on a logarithmic scale between the slowest and the fastest."""

    def __init__(self, all_gb_per_s: Sequence[float]) -> None:
        self._low, self._high = min(all_gb_per_s, default=1.0), max(all_gb_per_s, default=1.0)
        self._is_empty = not all_gb_per_s
        self._is_one = self._high <= self._low * 1.001

    def colour(self, gb_per_s: float) -> str:
        """The colour of a link."""
        last = len(BANDWIDTH_COLOURS) - 1
        if self._is_one:
            return BANDWIDTH_COLOURS[last]
        position = math.log(gb_per_s / self._low) / math.log(self._high / self._low)
        return BANDWIDTH_COLOURS[round(position * last)]

    def legend(self) -> Markup:
        """The ends of the scale, in words."""
        if self._is_empty:
            return element("p", "One device: no link is used.", class_="note")
        colours = BANDWIDTH_COLOURS[-1:] if self._is_one else BANDWIDTH_COLOURS
        swatches = [element("i", "", style=f"background:{colour}") for colour in colours]
        text = f"{self._low:.3g} to {self._high:.3g} GB/s"
        if self._is_one:
            text = f"every used link {self._high:.3g} GB/s"
        meaning = "; the wider a link, the larger the part of the iteration in which it is busy"
        return element(
            "p",
            element("span", *swatches, class_="swatches"),
            f" {text}{meaning}",
            class_="note ramp",
        )


def _host(box: Box) -> Iterator[Markup]:
    """A host's box; its name stands on the outer side, where no link runs."""
    below = box.y > HEIGHT / 2 + 20
    yield element(
        "rect",
        class_="host",
        x=box.x - box.width / 2,
        y=box.y - box.height / 2,
        width=box.width,
        height=box.height,
        rx=9,
    )
    name_y = box.y + (box.height / 2 + 15 if below else -box.height / 2 - 6)
    yield element("text", box.caption, class_="host-name", x=box.x, y=name_y)


def _card(analysis: PlanAnalysis, host: int, box: Box) -> Iterator[Markup]:
    """The shared link of a host's devices: a bar for each direction, filled as it is busy."""
    mine = frozenset(d for d, its_host in enumerate(analysis.host_of) if its_host == host)
    links = [link for link in analysis.shared_use.links if link.devices == mine]
    # On the side that looks to the other hosts.
    above = box.y > HEIGHT / 2 + 20
    for position, link in enumerate(links[:2]):
        width = box.width - 12
        y = box.y + (-box.height / 2 - 7 if above else box.height / 2 + 2) + 4 * position
        title = (
            f"{short_text(link.name, 60)} ({link.direction}): {link.gb_per_s:.3g} GB/s,"
            f" {100 * link.busy:.1f} % busy, {100 * link.full:.1f} % of the time full"
        )
        x = box.x - width / 2
        yield element(
            "g",
            element("title", title),
            element("rect", class_="card", x=x, y=y, width=width, height=3),
            element("rect", class_="card-used", x=x, y=y, width=width * link.busy, height=3),
        )


def _faint_links(analysis: PlanAnalysis, boxes: list[Box]) -> list[Markup]:
    """What could be used: a thin line between every two hosts with a path."""
    first = {host: d for d, host in reversed(list(enumerate(analysis.host_of)))}
    firsts = [first[h] for h in range(len(boxes))]
    rates = analysis.cost.rates_between(firsts, firsts)
    return [
        element("path", class_="faint", d=f"M{a.x:.1f} {a.y:.1f}L{b.x:.1f} {b.y:.1f}")
        for h, a in enumerate(boxes)
        for g, b in enumerate(boxes[:h])
        if rates[h, g] > 0 or rates[g, h] > 0
    ]


def _curve(link: Link, boxes: list[Box], scale: _BandwidthScale) -> Markup:
    """A directed link, bent to its own side so that the way back does not cover it."""
    a, b = boxes[link.source], boxes[link.target]
    dx, dy = b.x - a.x, b.y - a.y
    length = math.hypot(dx, dy) or 1.0
    bend = min(0.10 * length, 24.0)
    # A little towards the middle of the ring, so that links do not run through boxes.
    pull = 0.12 if length > 150 else 0.0
    x = (a.x + b.x) / 2 - bend * dy / length + pull * (WIDTH / 2 - (a.x + b.x) / 2)
    y = (a.y + b.y) / 2 + bend * dx / length + pull * (HEIGHT / 2 - (a.y + b.y) / 2)
    title = (
        f"{a.name} to {b.name}: {humanise_bytes(link.num_bytes)} an iteration,"
        f" {link.gb_per_s:.3g} GB/s, busy {100 * link.busy:.1f} %"
    )
    return element(
        "path",
        element("title", title),
        class_="link",
        d=f"M{a.x:.1f} {a.y:.1f}Q{x:.1f} {y:.1f} {b.x:.1f} {b.y:.1f}",
        stroke=scale.colour(link.gb_per_s),
        stroke_width=f"{1.5 + 14 * link.busy:.2f}",
    )


def _node(node: Box) -> Markup:
    """A device, or a host with a strip for each of its stages."""
    left, top = node.x - node.width / 2, node.y - node.height / 2
    num_strips = max(len(node.stages), 1)
    corner: dict[str, str | float] = {"rx": 6} if num_strips == 1 else {}
    strips = [
        element(
            "rect",
            x=left + position * node.width / num_strips,
            y=top,
            width=f"{node.width / num_strips:.2f}",
            height=node.height,
            **corner,
            style=f"fill:{'var(--unused)' if stage is None else stage_colour(stage)}",
        )
        for position, stage in enumerate(node.stages or (None,))
    ]
    return element("g", element("title", node.title), *strips, *_captions(node), class_="node")


def _captions(node: Box) -> Iterator[Markup]:
    """The name and the stages, as far as the box has room."""
    if node.caption and node.height > 30:
        held = f"stage {node.stages[0]}" if len(node.stages) == 1 else "unused"
        if len(node.stages) > 1:
            held = f"{len(node.stages)} stages"
        kind = "" if node.stages else " unused"
        yield element("text", node.caption, class_=f"name{kind}", x=node.x, y=node.y - 3)
        speed = f", {node.speed}" if node.speed else ""
        yield element("text", f"{held}{speed}", class_=f"held{kind}", x=node.x, y=node.y + 10)
    elif node.caption:
        kind = "name" if node.stages else "name unused"
        yield element("text", node.caption, class_=kind, x=node.x, y=node.y + 3.5)
    elif len(node.stages) == 1 and node.width >= 20:
        yield element("text", str(node.stages[0]), x=node.x, y=node.y + 3.5)
