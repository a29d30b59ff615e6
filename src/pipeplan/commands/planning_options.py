"""The options of `planning/options.py` as the commands offer them."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["planning_options"]

Command = TypeVar("Command", bound=Callable[..., Any])


def _groups(_context: Any, _option: Any, given: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Names with commas between, as a tuple for each use of the option."""
    return tuple(tuple(name.strip() for name in names.split(",")) for names in given)


def _positions(_context: Any, _option: Any, given: str) -> int | str:
    """A number if it is one; `planning/options.py` refuses what is wrong."""
    try:
        return int(given)
    except ValueError:
        return given


OPTIONS = (
    click.option("--divisible", is_flag=True, help="Samples may be split, as in the paper."),
    click.option("--ignore-memory", is_flag=True, help="Plans may need more than devices have."),
    click.option(
        "--no-cut-after", multiple=True, metavar="LAYER", help="Do not cut behind this layer."
    ),
    click.option(
        "--together",
        multiple=True,
        metavar="LAYER,LAYER",
        callback=_groups,
        help="Keep these layers in one stage.",
    ),
    click.option("--keep-tied", is_flag=True, help="Keep layers that share weights in one stage."),
    click.option("--stages", type=int, help="Exactly so many stages."),
    click.option("--max-stages", type=int, help="No more stages than this."),
    click.option("--first-on", metavar="DEVICE", help="This device serves the first stage."),
    click.option("--last-on", metavar="DEVICE", help="This device serves the last stage."),
    click.option("--without", multiple=True, metavar="DEVICE", help="Leave this device unused."),
    click.option(
        "--positions",
        default="auto",
        show_default=True,
        metavar="N|auto",
        callback=_positions,
        help="The most stages of a device.",
    ),
    click.option(
        "--split-backward/--no-split-backward",
        default=None,
        help="Whether to cut backwards into input and weight gradients.  [default: where known]",
    ),
    click.option("--shard-optimizer", is_flag=True, help="Replicas share the optimizer's moments."),
    click.option("--effort", default=1.0, show_default=True, help="Search more, or less."),
    click.option("--runnable", is_flag=True, hidden=True, help="Has no effect any more."),
)


def planning_options(command: Command) -> Command:
    """The command with all these options."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command
