"""Pictures of a plan as SVG: the timeline for papers and READMEs, the cluster for the report.

Blocks narrower than a pixel are drawn together, so that the size of a picture depends on its
width, not on the number of microbatches. Names from the inputs are text and nothing else.
"""

import html
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from pipeplan.errors import InputError
from pipeplan.pipeline import Kind, Stage
from pipeplan.report.drawing import Drawing, Link, humanise_bytes
from pipeplan.report.units import humanise_ms

__all__ = [
    "cluster_svg",
    "safe_text",
    "stage_colour",
    "svg_to_png",
    "tick_step_ms",
    "timeline_svg",
]

MAX_DEVICE_LANES = 16
"""With more devices a lane stands for a stage."""
MAX_DEVICE_NODES = 64
"""With more devices the cluster shows hosts alone."""
MAX_HOST_LABELS = 40
MAX_FAINT_HOSTS = 24
MAX_LINKS = 1500
"""Of more than these the busiest are drawn."""

LIGHT = {
    "page": "#ffffff",
    "text": "#1c2330",
    "quiet": "#667085",
    "lane": "#f1f3f7",
    "line": "#d5dae3",
    "forward": "#3f74d9",
    "backward": "#2f9e77",
    "mixed": "#3789a8",
    "there": "#9dbbf2",
    "back": "#93d3ba",
    "reduce": "#e8a13a",
}
DARK = {
    "page": "#12161d",
    "text": "#e6eaf1",
    "quiet": "#98a2b3",
    "lane": "#1d232d",
    "line": "#343c49",
    "forward": "#5b8def",
    "backward": "#3fb68b",
    "mixed": "#4da1bd",
    "there": "#33528f",
    "back": "#27694f",
    "reduce": "#f0b252",
}
STAGE_HUES = (214, 158, 32, 282, 350, 190, 60, 110, 320, 240)
BANDWIDTH_COLOURS = ("#c8763c", "#cfa14a", "#8fae6b", "#4fa394", "#2f7fb3")
"""From the slowest link of a cluster to its fastest."""
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"


def safe_text(name: str, limit: int = 28) -> str:
    """A name from the inputs, which may hold anything, as short text for HTML and SVG."""
    printable = "".join(c if c.isprintable() else "?" for c in name)
    short = printable if len(printable) <= limit else f"{printable[: limit - 1]}…"
    return html.escape(short)


def stage_colour(stage: int) -> str:
    """A colour that tells a stage from its neighbours, on light and on dark ground."""
    hue = STAGE_HUES[stage % len(STAGE_HUES)] + 13 * (stage // len(STAGE_HUES))
    return f"hsl({hue % 360} 52% 47%)"


def tick_step_ms(span_ms: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10, ... that divides a span into at most so many parts."""
    if not span_ms > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span_ms / most))
    return next(
        power * factor for factor in (1, 2, 5, 10, 20) if power * factor * most >= span_ms * 0.999
    )


# ---------------------------------------------------------------------------- timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lane:
    label: str
    height: float
    spans: list[tuple[str, str, float, float]]
    """Colour, label, start_ms, end_ms."""


def timeline_svg(drawing: Drawing, width: int = 1000, *, title: bool = True) -> str:
    """The timeline as an SVG document: a lane a device or stage, thin lanes for transfers."""
    plan = drawing.plan
    left, right = 96.0, 16.0
    top = 62.0 if title else 30.0
    per_ms = (width - left - right) / drawing.iteration_ms if drawing.iteration_ms else 0.0
    parts: list[str] = []
    y = top
    for lane in _lanes(drawing):
        parts.append(
            f'<rect class="pp-lane" x="{left:g}" y="{y:g}" width="{width - left - right:g}"'
            f' height="{lane.height:g}" fill="{LIGHT["lane"]}"/>'
        )
        if lane.label:
            parts.append(_label(left - 8, y + lane.height / 2 + 3.5, lane.label, "end", 10.5))
        parts += _lane_shapes(lane, left, y, per_ms)
        y += lane.height + (4 if lane.height > 10 else 2)
    head = _phases(drawing, left, top, y, per_ms)
    axis = _axis(drawing, left, y, per_ms, width - left - right)
    height = y + 50
    text = []
    if title:
        name = f"{safe_text(plan.model.name)} on {safe_text(plan.cluster.name)}"
        samples = plan.microbatches * plan.model.microbatch_size
        rate = 1e3 * samples / drawing.iteration_ms if drawing.iteration_ms else 0.0
        text = [
            _label(left, 22, name, "start", 14, bold=True),
            _label(
                width - right,
                22,
                f"{humanise_ms(drawing.iteration_ms)} an iteration, {rate:.4g} samples/s,"
                f" {drawing.num_stages} stages, {plan.microbatches} microbatches",
                "end",
                11,
            ),
        ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}"'
        f' width="{width}" height="{height:g}" role="img" font-family="{FONT}"'
        f' class="pp-timeline"><title>Timeline of one iteration</title>{_dark_style()}'
        f'<rect class="pp-page" width="{width}" height="{height:g}" rx="8"'
        f' fill="{LIGHT["page"]}"/>{"".join([*text, *head, *parts, *axis])}'
        f"{_legend(left, height - 14)}</svg>\n"
    )


def _lanes(drawing: Drawing) -> Iterator[_Lane]:
    plan, timeline = drawing.plan, drawing.timeline
    by_device = drawing.num_used_devices <= MAX_DEVICE_LANES
    transfers: list[list[tuple[str, str, float, float]]] = [
        [] for _ in range(2 * (drawing.num_stages - 1))
    ]
    for t in timeline.transfers:
        is_back = t.kind is Kind.BACKWARD
        transfers[2 * t.channel + is_back].append(
            ("back" if is_back else "there", "", t.start_ms, t.end_ms)
        )
    for index, stage in enumerate(plan.stages):
        reduce = timeline.all_reduces[index]
        for device, pace in list(zip(stage.devices, drawing.device_paces[index], strict=True))[
            : None if by_device else 1
        ]:
            spans = []
            for timed in timeline.blocks[index]:
                is_forward = timed.block.kind is Kind.FORWARD
                end_ms = timed.end_ms
                if by_device:
                    end_ms = timed.start_ms + (end_ms - timed.start_ms) * pace
                spans.append(
                    (
                        "forward" if is_forward else "backward",
                        str(timed.block.microbatch),
                        timed.start_ms,
                        end_ms,
                    )
                )
            spans.append(("reduce", "", reduce.start_ms, reduce.end_ms))
            name = safe_text(plan.cluster.devices[device].name, 13)
            label = name if by_device else _stage_label(index, stage)
            yield _Lane(label=label, height=20 if by_device else 16, spans=spans)
        if index + 1 < drawing.num_stages:
            yield _Lane(label="", height=5, spans=transfers[2 * index])
            yield _Lane(label="", height=5, spans=transfers[2 * index + 1])


def _stage_label(index: int, stage: Stage) -> str:
    return f"stage {index}" + (f" x{stage.num_replicas}" if stage.num_replicas > 1 else "")


def _lane_shapes(lane: _Lane, left: float, y: float, per_ms: float) -> Iterator[str]:
    """One path for each colour, and the labels that have room."""
    boxes: dict[str, list[tuple[float, float]]] = {}
    labels: list[str] = []
    for colour, label, start_ms, end_ms in lane.spans:
        first, end = left + start_ms * per_ms, left + end_ms * per_ms
        if end - first < 1:
            colour = "mixed" if colour in ("forward", "backward") else colour
            runs = boxes.setdefault(colour, [])
            if runs and first - runs[-1][1] < 0.5:
                runs[-1] = (runs[-1][0], end)
            elif end > first:
                runs.append((first, end))
            continue
        gap = 0.8 if end - first > 4 else 0.0  # tells a block from the next of its colour
        boxes.setdefault(colour, []).append((first, end - gap))
        if label and end - first >= 6 * len(label) + 1.5 and lane.height > 10:
            labels.append(
                f'<text x="{(first + end) / 2:.1f}" y="{y + lane.height / 2 + 3.3:.1f}">'
                f"{label}</text>"
            )
    for colour, spans in boxes.items():
        path = "".join(
            f"M{first:.1f} {y:g}h{max(end - first, 0.4):.1f}v{lane.height:g}"
            f"h{-max(end - first, 0.4):.1f}z"
            for first, end in spans
        )
        yield f'<path class="pp-{colour}" fill="{LIGHT[colour]}" d="{path}"/>'
    if labels:
        yield f'<g font-size="9.5" fill="#fff" text-anchor="middle">{"".join(labels)}</g>'


def _phases(
    drawing: Drawing, left: float, top: float, bottom: float, per_ms: float
) -> Iterator[str]:
    for phase in drawing.phases:
        first, end = left + phase.start_ms * per_ms, left + phase.end_ms * per_ms
        if end - first >= 7 * len(phase.name):
            yield _label((first + end) / 2, top - 12, phase.name, "middle", 10.5)
        if first > left:
            yield (
                f'<path class="pp-line" d="M{first:.1f} {top - 22:g}V{bottom:g}" fill="none"'
                f' stroke="{LIGHT["line"]}" stroke-dasharray="2 3"/>'
            )


def _axis(drawing: Drawing, left: float, y: float, per_ms: float, width: float) -> Iterator[str]:
    yield (f'<path class="pp-line" d="M{left:g} {y + 2:g}h{width:g}" stroke="{LIGHT["line"]}"/>')
    step_ms = tick_step_ms(drawing.iteration_ms, 10)
    count = math.floor(drawing.iteration_ms / step_ms) if drawing.iteration_ms else 0
    for tick in range(count + 1):
        unit = " ms" if tick == 0 else ""
        x = left + tick * step_ms * per_ms
        yield _label(x, y + 16, f"{tick * step_ms:g}{unit}", "middle", 10)


def _legend(left: float, y: float) -> str:
    entries = (
        ("forward", "forward"),
        ("backward", "backward"),
        ("reduce", "all-reduce"),
        ("there", "activations sent"),
        ("back", "gradients sent"),
        ("lane", "idle"),
    )
    parts, x = [], left
    for colour, name in entries:
        parts.append(
            f'<rect class="pp-{colour}" x="{x:g}" y="{y - 9:g}" width="12" height="10" rx="2"'
            f' fill="{LIGHT[colour]}"/>'
        )
        parts.append(_label(x + 17, y, name, "start", 10.5))
        x += 34 + 5.6 * len(name)
    return "".join(parts)


def _label(x: float, y: float, text: str, anchor: str, size: float, *, bold: bool = False) -> str:
    """Text that is already safe."""
    weight = ' font-weight="600"' if bold else ""
    kind = "text" if bold else "quiet"
    return (
        f'<text class="pp-{kind}" x="{x:.1f}" y="{y:.1f}" font-size="{size:g}"{weight}'
        f' text-anchor="{anchor}" fill="{LIGHT[kind]}">{text}</text>'
    )


def _dark_style() -> str:
    rules = "".join(
        f".pp-timeline .pp-{name}{{{'stroke' if name == 'line' else 'fill'}:{colour}}}"
        for name, colour in DARK.items()
    )
    return f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"


# ----------------------------------------------------------------------------- cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A device, or in a large cluster a host, with the middle of its box."""

    x: float
    y: float
    width: float
    height: float
    name: str
    """What stands in or beside the box, if there is room."""
    label: str
    title: str
    stages: tuple[int, ...]


def cluster_svg(drawing: Drawing) -> str:
    """The cluster as a graph: hosts on a ring in the order in which the pipeline visits them.

    Devices have the colour of their stage; links have the colour of their bandwidth, and are as
    wide as they are busy.
    """
    devices = drawing.plan.cluster.devices
    by_host = len(devices) > MAX_DEVICE_NODES
    width, height = 860.0, 430.0
    boxes, nodes = _place(drawing, by_host, width, height)
    used = drawing.links(between_hosts=True)
    bundles = sorted(used, key=lambda link: -link.busy)[:MAX_LINKS]
    host_of = drawing.host_of
    inside = [
        link
        for link in (() if by_host else drawing.links())
        if host_of[link.source] == host_of[link.target]
    ]
    scale = _BandwidthScale([link.gb_per_s for link in (*bundles, *inside)])
    parts = [] if len(drawing.hosts) > MAX_FAINT_HOSTS else _faint_links(drawing, boxes)
    parts += [_curve(link, boxes, scale, width, height) for link in bundles]
    if not by_host:
        parts += [_host(box, height) for box in boxes]
        parts += [_curve(link, nodes, scale, width, height) for link in inside]
    parts += [_node(node) for node in nodes]
    left_out = ""
    if len(bundles) < len(used):
        left_out = f'<p class="note">The busiest {len(bundles)} of {len(used)} links.</p>'
    return (
        f'<svg class="cluster" viewBox="0 0 {width:g} {height:g}" role="img"'
        f' aria-label="The cluster: devices, their stages and the links between them">'
        f"{''.join(parts)}</svg>{scale.legend()}{left_out}"
    )


def _host(box: _Node, height: float) -> str:
    """A host's box; its name on the outer side, where no link runs."""
    below = box.y > height / 2 + 20
    name_y = box.y + (box.height / 2 + 15 if below else -box.height / 2 - 6)
    return (
        f'<rect class="host" x="{box.x - box.width / 2:.1f}" y="{box.y - box.height / 2:.1f}"'
        f' width="{box.width:.1f}" height="{box.height:.1f}" rx="9"/>'
        f'<text class="host-name" x="{box.x:.1f}" y="{name_y:.1f}">{box.name}</text>'
    )


class _BandwidthScale:
    """Colours for bandwidths, on a logarithmic scale between the slowest and the fastest."""

    def __init__(self, all_gb_per_s: Sequence[float]) -> None:
        self._low, self._high = min(all_gb_per_s, default=1.0), max(all_gb_per_s, default=1.0)
        self._is_empty = not all_gb_per_s

    def colour(self, gb_per_s: float) -> str:
        """The colour of a link."""
        last = len(BANDWIDTH_COLOURS) - 1
        if self._high <= self._low * 1.001:
            return BANDWIDTH_COLOURS[last]
        position = math.log(gb_per_s / self._low) / math.log(self._high / self._low)
        return BANDWIDTH_COLOURS[round(position * last)]

    def legend(self) -> str:
        """The ends of the scale, in words."""
        if self._is_empty:
            return '<p class="note">One device: no link is used.</p>'
        swatches = "".join(f'<i style="background:{c}"></i>' for c in BANDWIDTH_COLOURS)
        if self._high <= self._low * 1.001:
            swatches = f'<i style="background:{BANDWIDTH_COLOURS[-1]}"></i>'
            text = f"every used link {self._high:.3g} GB/s"
        else:
            text = f"{self._low:.3g} to {self._high:.3g} GB/s"
        return (
            f'<p class="note ramp"><span class="swatches">{swatches}</span> {text};'
            " the wider a link, the larger the part of the iteration in which it is busy</p>"
        )


def _place(
    drawing: Drawing, by_host: bool, width: float, height: float
) -> tuple[list[_Node], list[_Node]]:
    """Host boxes by host, and the nodes: devices by device, or the hosts again."""
    devices, hosts = drawing.plan.cluster.devices, drawing.hosts
    stage_of = {d: index for index, s in enumerate(drawing.plan.stages) for d in s.devices}
    members: list[list[int]] = [[] for _ in hosts]
    for device, host in enumerate(drawing.host_of):
        members[host].append(device)
    unused = len(drawing.plan.stages)
    order = sorted(
        range(len(hosts)), key=lambda h: (min(stage_of.get(d, unused) for d in members[h]), h)
    )
    alone = len(hosts) == 1
    slots = len(members[0]) if alone else len(hosts)
    roomy = len(devices) <= 16
    node_width, node_height = (64.0, 34.0) if roomy else (24.0, 20.0)
    if by_host:
        side = max(6.0, min(46.0, 1000.0 / len(hosts)))
        node_width, node_height = side, side * 0.7
    middle_x, middle_y = width / 2, height / 2 + 6

    def on_ring(slot: int) -> tuple[float, float]:
        angle = math.pi + 2 * math.pi * slot / max(slots, 1)
        return (
            middle_x + (width / 2 - 110) * math.cos(angle),
            middle_y + (height / 2 - 68) * math.sin(angle),
        )

    boxes: list[_Node | None] = [None] * len(hosts)
    nodes: list[_Node | None] = [None] * (len(hosts) if by_host else len(devices))
    for slot, host in enumerate(order):
        x, y = (middle_x, middle_y) if alone else on_ring(slot)
        mine = sorted(members[host], key=lambda d: (stage_of.get(d, unused), d))
        columns = math.ceil(math.sqrt(len(mine)))
        rows = math.ceil(len(mine) / columns)
        spread = 14.0 if roomy else 5.0
        box_width = columns * (node_width + spread) + spread
        box_height = rows * (node_height + spread) + spread
        if alone:
            box_width, box_height = width - 40, height - 44
        single = len(mine) == 1 and devices[mine[0]].name == hosts[host]
        boxes[host] = _Node(
            x=x,
            y=y,
            width=box_width,
            height=box_height,
            name="" if single else safe_text(hosts[host], 22),
            label=safe_text(hosts[host]),
            title="",
            stages=(),
        )
        if by_host:
            stages = tuple(sorted({stage_of[d] for d in mine if d in stage_of}))
            held = ", ".join(map(str, stages)) if stages else "none"
            nodes[host] = _Node(
                x=x,
                y=y,
                width=node_width,
                height=node_height,
                name=safe_text(hosts[host], 7) if len(hosts) <= MAX_HOST_LABELS else "",
                label=safe_text(hosts[host]),
                title=f"{safe_text(hosts[host])}: {len(mine)} devices, stages {held}",
                stages=stages,
            )
            continue
        for position, device in enumerate(mine):
            row, column = divmod(position, columns)
            at_x = x + (column - (columns - 1) / 2) * (node_width + spread)
            at_y = y + (row - (rows - 1) / 2) * (node_height + spread)
            if alone and len(mine) > 1:
                at_x, at_y = on_ring(position)
            stage = stage_of.get(device)
            name = devices[device].name
            held = "unused" if stage is None else f"stage {stage}"
            nodes[device] = _Node(
                x=at_x,
                y=at_y,
                width=node_width,
                height=node_height,
                name=safe_text(name, 10) if roomy else "",
                label=safe_text(name),
                title=f"{safe_text(name)}: {held}",
                stages=() if stage is None else (stage,),
            )
    return [b for b in boxes if b], [n for n in nodes if n]


def _faint_links(drawing: Drawing, boxes: list[_Node]) -> list[str]:
    """What could be used: a thin line between every two hosts with a path."""
    rates = drawing.cost.bytes_per_ms_DD
    first = {host: d for d, host in reversed(list(enumerate(drawing.host_of)))}
    return [
        f'<path class="faint" d="M{a.x:.1f} {a.y:.1f}L{b.x:.1f} {b.y:.1f}"/>'
        for h, a in enumerate(boxes)
        for g, b in enumerate(boxes[:h])
        if rates[first[h], first[g]] > 0 or rates[first[g], first[h]] > 0
    ]


def _curve(
    link: Link, nodes: list[_Node], scale: _BandwidthScale, width: float, height: float
) -> str:
    """A directed link, bent to its own side so that the way back does not cover it."""
    a, b = nodes[link.source], nodes[link.target]
    dx, dy = b.x - a.x, b.y - a.y
    length = math.hypot(dx, dy) or 1.0
    bend = min(0.10 * length, 24.0)
    # A little towards the middle of the ring, so that links do not run through boxes.
    pull = 0.12 if length > 150 else 0.0
    x = (a.x + b.x) / 2 - bend * dy / length + pull * (width / 2 - (a.x + b.x) / 2)
    y = (a.y + b.y) / 2 + bend * dx / length + pull * (height / 2 - (a.y + b.y) / 2)
    return (
        f'<path class="link" d="M{a.x:.1f} {a.y:.1f}Q{x:.1f} {y:.1f} {b.x:.1f} {b.y:.1f}"'
        f' stroke="{scale.colour(link.gb_per_s)}" stroke-width="{1.5 + 14 * link.busy:.2f}">'
        f"<title>{a.label} to {b.label}: {humanise_bytes(link.num_bytes)} an iteration,"
        f" {link.gb_per_s:.3g} GB/s, busy {100 * link.busy:.1f} %</title></path>"
    )


def _node(node: _Node) -> str:
    left, top = node.x - node.width / 2, node.y - node.height / 2
    strips = node.stages or (-1,)
    strip_width = node.width / len(strips)
    parts = [f"<title>{node.title}</title>"]
    if len(strips) == 1:
        fill = stage_colour(strips[0]) if node.stages else "var(--unused)"
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{node.width:.1f}"'
            f' height="{node.height:.1f}" rx="6" style="fill:{fill}"/>'
        )
    else:
        parts += [
            f'<rect x="{left + position * strip_width:.1f}" y="{top:.1f}"'
            f' width="{strip_width:.2f}" height="{node.height:.1f}"'
            f' style="fill:{stage_colour(stage)}"/>'
            for position, stage in enumerate(strips)
        ]
    if node.name and node.height > 30:
        held = f"stage {node.stages[0]}" if len(node.stages) == 1 else "unused"
        if len(node.stages) > 1:
            held = f"{len(node.stages)} stages"
        parts.append(f'<text x="{node.x:.1f}" y="{node.y - 3:.1f}">{node.name}</text>')
        parts.append(f'<text class="held" x="{node.x:.1f}" y="{node.y + 10:.1f}">{held}</text>')
    elif node.name:
        parts.append(f'<text x="{node.x:.1f}" y="{node.y + 3.5:.1f}">{node.name}</text>')
    elif len(node.stages) == 1 and node.width >= 20:
        parts.append(f'<text x="{node.x:.1f}" y="{node.y + 3.5:.1f}">{node.stages[0]}</text>')
    return f'<g class="node">{"".join(parts)}</g>'


# -------------------------------------------------------------------------------- pixels


def svg_to_png(picture: str) -> bytes:
    """The picture in pixels, two a unit, by whichever renderer this machine has."""
    if find_spec("cairosvg"):
        pixels: bytes = import_module("cairosvg").svg2png(bytestring=picture.encode(), scale=2)
        return pixels
    for name in ("rsvg-convert", "chromium", "chromium-browser", "google-chrome"):
        program = shutil.which(name)
        if program:
            return _render(program, name == "rsvg-convert", picture)
    raise InputError(
        "output: no renderer for .png here; pip install cairosvg, install rsvg-convert or chromium,"
        " or write .svg"
    )


def _unsandboxed() -> list[str]:
    """Chromium's sandbox does not work for the superuser, as in containers."""
    is_superuser = hasattr(os, "geteuid") and os.geteuid() == 0
    return ["--no-sandbox"] if is_superuser else []


def _render(program: str, is_rsvg: bool, picture: str) -> bytes:
    size = picture.partition('width="')[2].partition('" height="')
    width, height = size[0], size[2].partition('"')[0]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "plan.svg"), Path(folder, "plan.png")
        source.write_text(picture, encoding="utf-8")
        if is_rsvg:
            command = [program, "--zoom", "2", "--output", str(target), str(source)]
        else:
            command = [
                program,
                "--headless",
                *_unsandboxed(),
                "--disable-gpu",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--hide-scrollbars",
                "--force-device-scale-factor=2",
                f"--user-data-dir={folder}/profile",
                f"--window-size={width},{math.ceil(float(height))}",
                f"--screenshot={target}",
                source.as_uri(),
            ]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=120)  # noqa: S603
            return target.read_bytes()
        except (OSError, subprocess.SubprocessError) as problem:
            raise InputError(
                f"output: {Path(program).name} did not render ({type(problem).__name__});"
                " write .svg instead"
            ) from None
