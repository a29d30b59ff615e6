"""Completion of the command line in bash, zsh and fish.

`pipeplan completion bash` prints a script. The script runs pipeplan with `COMPLETE_VARIABLE` set,
and `answer_completion` prints the names that can stand at the cursor.
"""

import os
from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

from pipeplan import zoo
from pipeplan.commands.names import EXPORT_FORMATS, PLANNER_NAMES, SCHEDULE_NAMES

__all__ = [
    "answer_completion",
    "complete_cluster",
    "complete_format",
    "complete_model",
    "complete_planner",
    "complete_planners",
    "complete_schedule",
    "complete_zoo",
    "completion_command",
]

COMPLETE_VARIABLE = "_PIPEPLAN_COMPLETE"
"""What a shell's script sets, to `bash_complete` and the like. The name is click's convention."""
SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def completion_command(shell: str) -> None:
    """Print the script that completes pipeplan's commands, options and names in SHELL."""
    kind = get_completion_class(shell)
    assert kind is not None, f"click knows {SHELLS}"
    script = kind(click.Command("pipeplan"), {}, "pipeplan", COMPLETE_VARIABLE)
    click.echo(script.source_template % script.source_vars())


def answer_completion(commands: click.Group) -> int | None:
    """Answer a shell that asks for completions; None where no shell asks."""
    instruction = os.environ.get(COMPLETE_VARIABLE)
    if instruction is None:
        return None
    return shell_complete(commands, {}, "pipeplan", COMPLETE_VARIABLE, instruction)


def complete_model(_context: object, _parameter: object, begun: str) -> list[CompletionItem]:
    """Models of the zoo, or files."""
    return _or_files(begun, zoo.MODEL_NAMES)


def complete_cluster(_context: object, _parameter: object, begun: str) -> list[CompletionItem]:
    """Clusters of the zoo, or files."""
    return _or_files(begun, zoo.CLUSTER_NAMES)


def complete_zoo(_context: object, _parameter: object, begun: str) -> list[CompletionItem]:
    """Everything in the zoo."""
    return _items(begun, (*zoo.MODEL_NAMES, *zoo.CLUSTER_NAMES))


def complete_planner(_context: object, _parameter: object, begun: str) -> list[CompletionItem]:
    """Planners, those of other packages included."""
    return _items(begun, _with_plugins(PLANNER_NAMES, "pipeplan.planners"))


def complete_planners(_context: object, _parameter: object, begun: str) -> list[CompletionItem]:
    """Planners with commas between."""
    before, comma, last = begun.rpartition(",")
    names = _with_plugins(PLANNER_NAMES, "pipeplan.planners")
    return [CompletionItem(f"{before}{comma}{name}") for name in names if name.startswith(last)]


def complete_schedule(_context: object, _parameter: object, begun: str) -> list[CompletionItem]:
    """Schedules, those of other packages included."""
    return _items(begun, _with_plugins(SCHEDULE_NAMES, "pipeplan.schedules"))


def complete_format(_context: object, _parameter: object, begun: str) -> list[CompletionItem]:
    """Formats of `export`."""
    return _items(begun, EXPORT_FORMATS)


def _items(begun: str, names: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(begun)]


def _or_files(begun: str, names: Iterable[str]) -> list[CompletionItem]:
    """Names, and the shell's own completion of paths; bash drops what stands before a file."""
    return [CompletionItem(begun, type="file"), *_items(begun, names)]


def _with_plugins(names: tuple[str, ...], group: str) -> tuple[str, ...]:
    from importlib.metadata import entry_points

    others = sorted(point.name for point in entry_points(group=group) if point.name not in names)
    return (*names, *others)
