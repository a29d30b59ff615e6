"""`pipeplan sweep`."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import NoReturn

import click

from pipeplan.commands.interrupting import end_interrupted
from pipeplan.commands.paths import is_stdout, require_paths
from pipeplan.commands.progress import progress
from pipeplan.commands.shared import note
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
    with progress("planning") as work, _quick_end(backend):
        rows = sweep(
            spec, output, jobs=jobs, backend=backend, address=address, on_progress=work.count
        )
    failed = sum(row.error is not None for row in rows)
    note(f"{output}: {len(rows)} rows" + (f", {failed} of them without a plan" if failed else ""))


@contextmanager
def _quick_end(backend: str) -> Iterator[None]:
    """Make Ctrl-C end the process and all that it started at once, where that takes long else.

    dask and ray take seconds to close in an orderly way, and log much meanwhile. A sweep needs no
    order: its journal is on disk, as for `kill -9`.
    """
    before = signal.getsignal(signal.SIGINT)
    if backend == "loky" or not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, _end_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_at_once(_signal: int, _frame: FrameType | None) -> NoReturn:
    try:
        psutil = import_module("psutil")  # dask and ray bring it
        for child in psutil.Process().children(recursive=True):
            child.kill()
    except Exception:  # noqa: S110 - a child that is gone, or no psutil: the end comes all the same
        pass
    end_interrupted()
