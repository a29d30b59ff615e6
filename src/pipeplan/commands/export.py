"""`pipeplan export`."""

from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import click

from pipeplan.commands.completion import complete_format
from pipeplan.commands.paths import is_stdout, require_paths
from pipeplan.commands.progress import progress
from pipeplan.commands.shared import note, plan_from
from pipeplan.documents.text import printable
from pipeplan.documents.writing import STANDARD_STREAM
from pipeplan.errors import InputError

if TYPE_CHECKING:
    from pipeplan.interop.exported import Exported

__all__ = ["export_command"]

MOST_LISTED = 6
"""How many files the last line names."""


@click.command("export")
@click.argument("plan", type=click.Path())
@click.option("--to", "target", required=True, shell_complete=complete_format, help="The format.")
@click.option(
    "-o",
    "--output",
    default=STANDARD_STREAM,
    show_default=True,
    type=click.Path(dir_okay=False),
    help="Write here.",
)
@click.option(
    "--map",
    "map_file",
    type=click.Path(),
    help="JSON: for layers by name their role or their modules.",
)
@click.option(
    "--nearest", "take_nearest", is_flag=True, help="If refused, export the nearest plan instead."
)
def export_command(
    plan: str, target: str, output: str, map_file: str | None, take_nearest: bool
) -> None:
    """Write PLAN for another program.

    Formats: torch-csv, torchtitan, megatron, deepspeed, chakra, csv (the timeline), chrome-trace,
    and grid-plan, a plan of ours with equally many replicas in each stage.
    """
    inputs = {"PLAN": plan} if map_file is None else {"PLAN": plan, "--map": map_file}
    require_paths(inputs=inputs, outputs={"-o": output})
    from pipeplan.interop.exporting import TRACE, export_plan, parse_layer_map

    if target == TRACE:
        from pipeplan.report.trace import write_trace

        with progress("writing the trace"), plan_from(plan) as (read, warn):
            write_trace(read, output, warn=warn)
        if not is_stdout(output):
            click.echo(f"written: {printable(output)}")
        return
    from pipeplan.interop.exported import ExportSettings
    from pipeplan.interop.source_text import read_text

    layer_map = parse_layer_map(read_text(map_file)) if map_file is not None else {}
    stem = "plan" if is_stdout(output) else PurePath(output).stem
    settings = ExportSettings(stem=stem, layer_map=layer_map)
    with progress("exporting"), plan_from(plan) as (read, _):
        done = export_plan(read, target, settings, take_nearest=take_nearest)
        written = _write(done, output, plan, target)
    for text in done.notes:
        note(f"note: {text}")
    if not is_stdout(output):
        click.echo(f"written: {', '.join(printable(path) for path in written)}")


def _write(done: "Exported", output: str, plan: str, target: str) -> list[str]:
    """Write all files of an export; the paths of those written."""
    from pipeplan.documents.writing import write_atomically

    if done.others and is_stdout(output):
        raise InputError(f"-o: is missing; {target} has {len(done.others) + 1} files")
    beside = {name: str(Path(output).with_name(name)) for name in done.others}
    for name, path in beside.items():
        require_paths(inputs={"PLAN": plan}, outputs={"-o": output, name: path})
        if Path(path).exists() and not Path(output).exists():  # else an export is repeated
            raise InputError(
                f"{printable(path)}: is there already, and {target} writes it beside -o; move it,"
                " or give -o another name"
            )
    for name, path in beside.items():
        write_atomically(path, done.others[name])
    write_atomically(output, done.data)
    shown = [output, *beside.values()]
    return shown if len(shown) <= MOST_LISTED else [*shown[:2], f"{len(shown) - 2} more"]
