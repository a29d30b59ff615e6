"""Pictures of plans in files: SVG and PDF, or PNG by a renderer that the machine has."""

import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from pipeplan.documents.syntax import write_atomically
from pipeplan.errors import InputError
from pipeplan.pipeline import Plan
from pipeplan.report.analysis.plan_analysis import analyse
from pipeplan.report.fonts import font_family
from pipeplan.report.pdf import pdf_font, svg_to_pdf
from pipeplan.report.timeline_picture import timeline_svg

__all__ = ["FORMATS", "picture_bytes", "plot", "require_font", "require_format", "svg_to_png"]

FORMATS = ("svg", "pdf", "png")
PROGRAMS = ("rsvg-convert", "chromium", "chromium-browser", "google-chrome")
LEAST_WIDTH, MOST_WIDTH = 300, 10_000
MAX_SECONDS = 120
LONGEST_FONT = 60


def plot(
    plan: Plan,
    path: str | Path,
    width: int = 1000,
    *,
    file_format: str | None = None,
    font: str = "sans",
    warn: Callable[[str], None] | None = None,
) -> None:
    """Write a picture of a plan's timeline.

    Args:
        plan: what to draw.
        path: where to write it; `-` is the standard output.
        width: in pixels; a PNG has two for each.
        file_format: `svg`, `pdf` or `png`; None: by the suffix of the path, SVG for `-`.
        font: `sans`, `serif` or `mono`; in an SVG also any other name.
        warn: is told of stale figures in the plan, which the picture replaces.

    Examples:
        >>> import pipeplan as pp
        >>> plan = pp.plan(pp.zoo.model("vgg19"), pp.zoo.cluster("4x2-10g"), planner="spp")
        >>> pp.plot(plan, "vgg19.svg")
        >>> pp.plot(plan, "vgg19.pdf", font="serif")
    """
    chosen = file_format or require_format(path)
    if chosen not in FORMATS:
        raise InputError(f"format: {chosen!r} is none of {', '.join(FORMATS)}")
    if not LEAST_WIDTH <= width <= MOST_WIDTH:
        raise InputError(f"width: {width} is not within {LEAST_WIDTH}..{MOST_WIDTH} pixels")
    require_font(font, chosen)
    picture = str(timeline_svg(analyse(plan, warn), width, font=font_family(font)))
    write_atomically(path, picture_bytes(picture, chosen, warn))


def require_font(font: str, file_format: str) -> None:
    """Refuse what is no font's name, and for a PDF all but its own fonts."""
    if not font.replace("-", "").replace(" ", "").isalnum() or len(font) > LONGEST_FONT:
        raise InputError(f"font: {font[:LONGEST_FONT]!r} is no name of a font")
    if file_format == "pdf":
        pdf_font(font)


def picture_bytes(
    picture: str, file_format: str, warn: Callable[[str], None] | None = None
) -> bytes:
    """The file of an SVG picture in this format."""
    if file_format == "pdf":
        return svg_to_pdf(picture, warn)
    return picture.encode() if file_format == "svg" else svg_to_png(picture)


def require_format(path: str | Path) -> str:
    """The format that a file of this name has; refuses what is neither a picture nor `-`."""
    if str(path) == "-":
        return "svg"
    suffix = Path(path).suffix.lower()
    if suffix[1:] not in FORMATS:
        raise InputError(
            f"output: {str(path)!r} ends in none of .svg, .pdf, .png; name one of them"
        )
    return suffix[1:]


def svg_to_png(picture: str) -> bytes:
    """The picture in pixels, two a unit, by whichever renderer this machine has."""
    if find_spec("cairosvg"):
        pixels: bytes = import_module("cairosvg").svg2png(bytestring=picture.encode(), scale=2)
        return pixels
    for name in PROGRAMS:
        program = shutil.which(name)
        if program:
            return _render(program, name == "rsvg-convert", picture)
    raise InputError(
        "output: no renderer for .png here; pip install cairosvg, install rsvg-convert or chromium,"
        " or write .svg"
    )


def _render(program: str, is_rsvg: bool, picture: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "plan.svg"), Path(folder, "plan.png")
        source.write_text(picture, encoding="utf-8")
        command = [program, "--zoom", "2", "--output", str(target), str(source)]
        if not is_rsvg:
            command = _chromium_command(program, picture, source, target)
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=MAX_SECONDS)  # noqa: S603
            return target.read_bytes()
        except (OSError, subprocess.SubprocessError) as problem:
            raise InputError(
                f"output: {Path(program).name} did not render ({type(problem).__name__});"
                " write .svg instead"
            ) from None


def _chromium_command(program: str, picture: str, source: Path, target: Path) -> list[str]:
    size = picture.partition('width="')[2].partition('" height="')
    width, height = size[0], size[2].partition('"')[0]
    # Chromium's sandbox does not work for the superuser, as in containers.
    is_superuser = hasattr(os, "geteuid") and os.geteuid() == 0
    return [
        program,
        "--headless",
        *(["--no-sandbox"] if is_superuser else []),
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        "--force-device-scale-factor=2",
        f"--user-data-dir={source.parent}/profile",
        f"--window-size={width},{math.ceil(float(height))}",
        f"--screenshot={target}",
        source.as_uri(),
    ]
