"""`pipeplan sweep`."""

import click

from pipeplan.commands.paths import is_stdout, require_paths
from pipeplan.commands.progress import progress
from pipeplan.commands.shared import say
from pipeplan.errors import InputError

__all__ = ["sweep_command"]


@click.command("sweep")
@click.argument("spec", type=click.Path())
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False), help=".csv or .parquet."
)
@click.option("--jobs", default=-1, show_default=True, help="Cases at once; -1: all cores.")
@click.option("--backend", default="loky", show_default=True, help="loky, dask or ray.")
@click.option("--address", help="Of a running dask scheduler or ray head.")
def sweep_command(spec: str, output: str, jobs: int, backend: str, address: str | None) -> None:
    """Plan every case of the grid in SPEC; run again after an interruption to go on."""
    if is_stdout(output):
        raise InputError(
            "output: '-' cannot be the result of a sweep, whose journal lies beside it;"
            " name a .csv or .parquet file"
        )
    from pipeplan.planning.sweep.journal import journal_path, require_folder
    from pipeplan.planning.sweep.running import sweep

    require_folder(output)
    require_paths(
        inputs={"SPEC": spec}, outputs={"-o": output, "its journal": str(journal_path(output))}
    )
    with progress("planning") as work:
        rows = sweep(
            spec, output, jobs=jobs, backend=backend, address=address, on_progress=work.count
        )
    failed = sum(row.error is not None for row in rows)
    say(f"{output}: {len(rows)} rows" + (f", {failed} of them without a plan" if failed else ""))
