"""What the commands share: inputs by name or file, and how results are printed.

Everything heavy is imported late, so that the command line starts at once.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeplan.errors import InputError

if TYPE_CHECKING:
    from pipeplan.cluster import Cluster
    from pipeplan.pipeline import Plan
    from pipeplan.profile import ModelProfile

__all__ = ["print_json", "print_plan", "resolve_cluster", "resolve_model", "say"]


def resolve_model(name: str) -> "ModelProfile":
    """The model of that name in the zoo, or in that file."""
    from pipeplan import zoo
    from pipeplan.files import read_model

    if name in zoo.MODEL_NAMES:
        return zoo.model(name)
    _require_file(name, "model", zoo.MODEL_NAMES)
    return read_model(name)


def resolve_cluster(name: str, seed: int) -> "Cluster":
    """The cluster of that name in the zoo, or in that file."""
    from pipeplan import zoo
    from pipeplan.files import read_cluster

    if name in zoo.CLUSTER_NAMES:
        return zoo.cluster(name, seed=seed)
    _require_file(name, "cluster", zoo.CLUSTER_NAMES)
    return read_cluster(name)


def _require_file(name: str, kind: str, known: tuple[str, ...]) -> None:
    from pipeplan.spelling import nearest

    if not Path(name).exists():
        raise InputError(f"{kind}: {name!r} is neither a file nor in the zoo{nearest(name, known)}")


def print_plan(plan: "Plan") -> None:
    """Show a plan in the terminal."""
    from rich.console import Console

    from pipeplan.report.terminal import render_plan
    from pipeplan.simulator import simulate

    console = Console(highlight=False, markup=False)
    console.print(render_plan(plan, simulate(plan), console))


def print_json(document: Any) -> None:
    """Print for machines."""
    from pipeplan.syntax import to_json

    sys.stdout.write(to_json(document).decode())


def say(message: str) -> None:
    """One line on stderr, where everything goes that is not the result."""
    click.echo(f"pipeplan: {message}", err=True)
