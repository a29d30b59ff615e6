"""How commands print, and the options that several of them share.

Everything heavy is imported late, so that the command line starts at once.
"""

import os
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from pipeplan.documents.text import printable
from pipeplan.errors import PlanFileError, ScheduleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console, RenderableType

    from pipeplan.cluster import Cluster
    from pipeplan.pipeline import Plan
    from pipeplan.profile import ModelProfile

__all__ = [
    "SEED",
    "is_quiet",
    "note",
    "plan_from",
    "print_json",
    "print_plan",
    "print_rich",
    "quiet_option",
    "read_inputs",
    "say",
]

CONTROLS = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
"""Characters that JSON does not escape, but some terminals obey."""

LONGEST_LINE = 600
"""Longer messages are cut: they quote a name or a number of any length."""

MIN_COLUMNS, MAX_COLUMNS = 40, 1000
"""The widths that output is made for, whatever the terminal or `COLUMNS` says."""
LINES = 25

QUIET = "pipeplan.quiet"
"""Where a command's context keeps whether `--quiet` was given."""

SEED = click.IntRange(0, 2**64 - 1)
"""Any number of 64 bits."""


def read_inputs(model: str, cluster: str, seed: int) -> "tuple[ModelProfile, Cluster]":
    """The model and the cluster by name or file; values that look like another unit are noted."""
    from pipeplan.planning.inputs import resolve_cluster, resolve_model
    from pipeplan.planning.plausibility import suspicious_units

    read = resolve_model(model), resolve_cluster(cluster, seed)
    for line in suspicious_units(*read):
        note(f"note: {line}")
    return read


@contextmanager
def plan_from(path: str) -> "Iterator[tuple[Plan, Callable[[str], None]]]":
    """The plan in a file, and whom to tell warnings about it; errors in the block name the file."""
    from pipeplan.documents.files import read_plan

    plan = read_plan(path)
    try:
        yield plan, lambda warning: note(f"warning: {path}: {warning}")
    except (PlanFileError, ScheduleError) as problem:
        raise type(problem)(f"{path}: {problem}") from None


def print_plan(plan: "Plan", warn: "Callable[[str], None] | None" = None) -> None:
    """Show a plan in the terminal; stale figures are replaced, and `warn` is told."""
    from pipeplan.report.analysis.plan_analysis import analyse
    from pipeplan.report.terminal import render_plan

    analysis = analyse(plan, warn)
    print_rich(lambda console: render_plan(analysis, console))


def print_rich(render: "Callable[[Console], RenderableType]") -> None:
    """Print what `render` makes for this terminal; plain text where it is none."""
    console = _console()
    # Captured, because rich ends the program in its own way when the reader of a pipe has gone.
    with console.capture() as capture:
        console.print(render(console))
    sys.stdout.write(capture.get())


def _console() -> "Console":
    """The terminal as rich sees it, with a width that tables and timelines can work with."""
    from rich.console import Console

    asked = os.environ.get("COLUMNS", "")
    is_number = asked.isascii() and asked.isdigit()
    console = Console(
        highlight=False,
        markup=False,
        emoji=False,
        width=int(asked.lstrip("0")[:9] or 0) if is_number else None,
        height=LINES,
        # Rich would read these two itself, and fail where they are no numbers.
        _environ={k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")},
    )
    console.width = min(max(console.width, MIN_COLUMNS), MAX_COLUMNS)
    return console


def print_json(document: Any) -> None:
    """Print for machines: UTF-8, whatever the terminal's encoding is."""
    from pipeplan.documents.syntax import to_json

    text = CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", to_json(document).decode())
    click.echo(text.encode(), nl=False)


def quiet_option() -> click.Option:
    """`--quiet`, the same for every command."""
    return click.Option(
        ["-q", "--quiet"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=lambda context, _, given: context.meta.__setitem__(QUIET, given),
        help="No progress, notes or warnings; only results and errors.",
    )


def is_quiet() -> bool:
    """Whether the command that runs was asked to be quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(QUIET))


def note(message: str) -> None:
    """Print a note or a warning on stderr, unless the command was asked to be quiet."""
    if not is_quiet():
        say(message)


def say(message: str) -> None:
    """Print one line on stderr: an error, or what has to be said even with `--quiet`."""
    line = printable(message)
    short = line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..."
    click.echo(f"pipeplan: {short}", err=True)
