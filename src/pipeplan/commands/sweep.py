"""`pipeplan sweep`."""

from pathlib import Path

import click

from pipeplan.commands.shared import resolve_cluster, resolve_model, say

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
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from pipeplan.planning.sweep import Backend, expand_cases, read_spec, run_sweep

    folder = Path(spec).parent
    chosen = Backend(name=backend, jobs=jobs, address=address)
    cases = expand_cases(
        read_spec(spec),
        lambda name: resolve_model(_beside(folder, name)),
        lambda name, seed: resolve_cluster(_beside(folder, name), seed),
    )
    console = Console(stderr=True)
    with Progress(
        "planning", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    ) as progress:
        task = progress.add_task("", total=len(cases))
        rows = run_sweep(
            cases,
            output,
            backend=chosen,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    failed = sum(row.error is not None for row in rows)
    say(f"{output}: {len(rows)} rows" + (f", {failed} of them without a plan" if failed else ""))


def _beside(folder: Path, name: str) -> str:
    """A file named in a specification lies beside it; names of the zoo stay as they are."""
    beside = folder / name
    return str(beside) if beside.is_file() else name
