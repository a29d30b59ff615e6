"""What the commands share: inputs by name or file, and how results are printed.

Everything heavy is imported late, so that the command line starts at once.
"""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeplan.documents.text import printable
from pipeplan.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, RenderableType

    from pipeplan.cluster import Cluster
    from pipeplan.pipeline import Plan
    from pipeplan.profile import ModelProfile

__all__ = [
    "print_json",
    "print_plan",
    "print_rich",
    "resolve_cluster",
    "resolve_model",
    "say",
    "warn",
]

CONTROLS = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
"""What JSON lets stand as it is, but some terminals obey."""


def resolve_model(name: str) -> "ModelProfile":
    """The model of that name in the zoo, or in that file."""
    from pipeplan import zoo
    from pipeplan.documents.files import read_model

    if name in zoo.MODEL_NAMES:
        return zoo.model(name)
    _require_file(name, "model", zoo.MODEL_NAMES)
    return read_model(name)


def resolve_cluster(name: str, seed: int) -> "Cluster":
    """The cluster of that name in the zoo, or in that file."""
    from pipeplan import zoo
    from pipeplan.documents.files import read_cluster

    if name in zoo.CLUSTER_NAMES:
        return zoo.cluster(name, seed=seed)
    _require_file(name, "cluster", zoo.CLUSTER_NAMES)
    return read_cluster(name)


def _require_file(name: str, kind: str, known: tuple[str, ...]) -> None:
    from pipeplan.documents.text import nearest

    if not Path(name).exists():
        raise InputError(f"{kind}: {name!r} is neither a file nor in the zoo{nearest(name, known)}")


def print_plan(plan: "Plan") -> None:
    """Show a plan in the terminal."""
    from pipeplan.report.analysis.plan_analysis import analyse
    from pipeplan.report.terminal import render_plan

    analysis = analyse(plan, warn)
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
    """Print for machines: UTF-8, whatever the terminal speaks."""
    from pipeplan.documents.syntax import to_json

    text = CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", to_json(document).decode())
    click.echo(text.encode(), nl=False)


def warn(message: str) -> None:
    """One line on stderr about something that is wrong but does not stop the command."""
    say(f"warning: {message}")


def say(message: str) -> None:
    """One line on stderr, where everything goes that is not the result."""
    click.echo(f"pipeplan: {printable(message)}", err=True)
