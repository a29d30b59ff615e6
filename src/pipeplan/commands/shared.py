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

    from pipeplan.pipeline import Plan

__all__ = [
    "SEED",
    "plan_from",
    "print_json",
    "print_plan",
    "print_rich",
    "say",
]

CONTROLS = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
"""Characters that JSON does not escape, but some terminals obey."""

LONGEST_LINE = 600
"""Longer messages are cut: they quote a name or a number of any length."""

MIN_COLUMNS, MAX_COLUMNS = 40, 1000
"""The widths that output is made for, whatever the terminal or `COLUMNS` says."""
LINES = 25

SEED = click.IntRange(0, 2**64 - 1)
"""Any number of 64 bits."""


@contextmanager
def plan_from(path: str) -> "Iterator[tuple[Plan, Callable[[str], None]]]":
    """The plan in a file, and whom to tell warnings about it; errors in the block name the file."""
    from pipeplan.documents.files import read_plan

    plan = read_plan(path)
    try:
        yield plan, lambda warning: say(f"warning: {path}: {warning}")
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


def say(message: str) -> None:
    """Print one line on stderr, where everything goes that is not the result."""
    line = printable(message)
    short = line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..."
    click.echo(f"pipeplan: {short}", err=True)
