"""How commands print, and the options that several of them share.

Everything heavy is imported late, so that the command line starts at once.
"""

import re
import sys
from typing import TYPE_CHECKING, Any

import click

from pipeplan.documents.text import printable
from pipeplan.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, RenderableType

    from pipeplan.pipeline import Plan
    from pipeplan.replaying import Replayed

__all__ = ["SEED", "print_json", "print_plan", "print_rich", "read_valid_plan", "say"]

CONTROLS = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
"""Characters that JSON does not escape, but some terminals obey."""

LONGEST_LINE = 600
"""Longer messages are cut: they quote a name or a number of any length."""

SEED = click.IntRange(0, 2**64 - 1)
"""Any number of 64 bits."""


def read_valid_plan(path: str) -> "Replayed":
    """The plan in a file, run again; what `check` refuses is refused.

    Stale predicted figures are replaced by those of the replay, and a warning says so.
    """
    from pipeplan.documents.files import read_plan
    from pipeplan.replaying import replay_plan

    plan = read_plan(path)
    try:
        replayed = replay_plan(plan)
    except InputError as problem:
        raise type(problem)(f"{path}: {problem}") from None
    for warning in replayed.warnings:
        say(f"warning: {path}: {warning}")
    return replayed


def print_plan(plan: "Plan") -> None:
    """Show a plan in the terminal."""
    from pipeplan.report.analysis.plan_analysis import analyse
    from pipeplan.report.terminal import render_plan

    analysis = analyse(plan)
    print_rich(lambda console: render_plan(analysis, console))


def print_rich(render: "Callable[[Console], RenderableType]") -> None:
    """Print what `render` makes for this terminal; plain text where it is none."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    # Captured, because rich ends the program in its own way when the reader of a pipe has gone.
    with console.capture() as capture:
        console.print(render(console))
    sys.stdout.write(capture.get())


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
