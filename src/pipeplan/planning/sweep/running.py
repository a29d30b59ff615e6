"""Run a sweep: one row for each case of a grid of models, clusters, microbatches, planners, seeds.

Finished cases are never lost: each is a line in a journal beside the result, synced to disk. A
sweep that was interrupted, even by `kill -9`, goes on where it stopped; only the cases that were
running start again. The result is written in one piece at the end, in the order of the grid. It
is the same in every run and on every backend. Planning times differ; only the journal has them.
"""

from collections.abc import Callable
from pathlib import Path

from pipeplan.planning.inputs import resolve_beside
from pipeplan.planning.sweep.backends import Backend, require_backend, run_cases
from pipeplan.planning.sweep.cases import SweepCase, SweepRow, digest, expand_cases
from pipeplan.planning.sweep.journal import journal_path, open_journal, require_folder
from pipeplan.planning.sweep.specification import SweepSpec, read_spec
from pipeplan.planning.sweep.tables import choose_writer

__all__ = ["run_sweep", "sweep"]


def sweep(
    spec: str | Path | SweepSpec,
    output: str | Path,
    *,
    jobs: int = -1,
    backend: str = "loky",
    address: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[SweepRow]:
    """Plan every case of a grid, write the rows to `output`, and return them.

    An interrupted sweep goes on where it stopped when it is called again with the same arguments.

    Args:
        spec: the grid, or the path of a `pipeplan.sweep/1` file. Models and clusters are names of
            the zoo or files; a file's path starts at the folder of the specification.
        output: `.csv` or `.parquet`.
        jobs: how many cases run at once; -1: as many as there are cores.
        backend: `loky` (processes on this machine), `dask` or `ray`.
        address: of a running dask scheduler or ray head; None: one is started here.
        on_progress: called with the number of cases done and of all cases.
    """
    chosen = Backend(name=backend, jobs=jobs, address=address)
    choose_writer(Path(output))  # refuses other suffixes before anything is read
    require_folder(output)
    require_backend(chosen)
    folder = Path()
    if not isinstance(spec, SweepSpec):
        folder = Path(spec).parent  # the working directory for standard input, "-"
        spec = read_spec(spec)
    cases = expand_cases(spec, *resolve_beside(folder, (Path(output), journal_path(output))))
    return run_sweep(cases, output, backend=chosen, on_progress=on_progress)


def run_sweep(
    cases: list[SweepCase],
    output: str | Path,
    *,
    backend: Backend | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[SweepRow]:
    """Run the cases that the journal does not hold yet, then write all rows to `output`.

    Args:
        cases: as `expand_cases` gives them.
        output: `.csv` or `.parquet`.
        backend: where cases run; by default processes on this machine.
        on_progress: called with the number of cases done and of all cases.
    """
    output = Path(output)
    write = choose_writer(output)
    with open_journal(journal_path(output), digest(cases)) as journal:
        if on_progress is not None:
            on_progress(len(journal.rows), len(cases))
        left = [case for case in cases if case.index not in journal.rows]
        for outcome in run_cases(left, backend or Backend()):
            journal.append(outcome)
            if on_progress is not None:
                on_progress(len(journal.rows), len(cases))
        ordered = [journal.rows[case.index] for case in cases]
        write(output, ordered)
        journal.path.unlink()  # only now: the result holds everything
    return ordered
