"""A grid of models, clusters, microbatch counts, planners and seeds, one row for each case.

What is done is never lost: each finished case is a line in a journal beside the result, synced
to disk before the next one counts. A sweep that was interrupted, even by `kill -9`, goes on
where it stood; at most the cases under way run again. The result is written at once, at the end,
in the order of the grid, and holds nothing that differs between runs or backends. (How long
planning took stands in the journal alone.)

Journal, one JSON document a line: first `{"format": ..., "sweep": digest}`, then
`{"case": index, "row": {...}, "planning_s": ...}` in the order in which cases end.
"""

import csv
import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from importlib import import_module
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import IO, Any

from pipeplan.cluster import Cluster
from pipeplan.documents.syntax import read_document, write_atomically
from pipeplan.documents.text import nearest
from pipeplan.errors import InputError, PipeplanError
from pipeplan.profile import ModelProfile
from pipeplan.version import VERSION

__all__ = [
    "Backend",
    "SweepCase",
    "SweepRow",
    "SweepSpec",
    "expand_cases",
    "journal_path",
    "read_spec",
    "run_sweep",
]

SPEC_FORMAT = "pipeplan.sweep/1"
JOURNAL_FORMAT = "pipeplan.sweep-journal/1"
BACKENDS = ("loky", "dask", "ray")
MAX_CASES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """The axes of the grid; models and clusters are names of the zoo or files."""

    models: tuple[str, ...]
    clusters: tuple[str, ...]
    microbatches: tuple[int, ...]
    planners: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)

    @property
    def num_cases(self) -> int:
        """The number of cells of the grid."""
        size = len(self.models) * len(self.clusters) * len(self.microbatches)
        return size * len(self.planners) * len(self.seeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCase:
    """One cell of the grid with its inputs, so that a worker elsewhere needs no files."""

    index: int
    model_name: str
    """As the specification spells it; the profile's own name may be longer."""
    cluster_name: str
    model: ModelProfile
    cluster: Cluster
    microbatches: int
    planner: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """What is written of one case; figures are None where there is an error."""

    model: str
    cluster: str
    microbatches: int
    planner: str
    seed: int
    iteration_ms: float | None = None
    samples_per_second: float | None = None
    bubble_fraction: float | None = None
    peak_memory_gb: float | None = None
    num_stages: int | None = None
    num_devices: int | None = None
    lower_bound_ms: float | None = None
    error: str | None = None
    """Why there is no plan."""


COLUMNS = tuple(field.name for field in fields(SweepRow))


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Where cases run."""

    name: str = "loky"
    """`loky`: processes on this machine; `dask` and `ray`: a cluster of theirs."""
    jobs: int = -1
    """How many at once; -1: as many as there are cores."""
    address: str | None = None
    """Of a running dask scheduler or ray head; None: one is started here."""

    def __post_init__(self) -> None:
        if self.name not in BACKENDS:
            raise InputError(f"backend: {self.name!r} is not known{nearest(self.name, BACKENDS)}")
        if self.jobs == 0 or self.jobs < -1:
            raise InputError(f"jobs: {self.jobs} is neither a number above 0 nor -1 for all cores")
        if self.address is not None and self.name == "loky":
            raise InputError(
                f"address: {self.address!r} needs another backend; choose dask or ray, or leave it"
            )


def read_spec(path: str | Path) -> SweepSpec:
    """The specification in a YAML or JSON file; what it does not know is refused."""
    document = read_document(path, InputError)
    if not isinstance(document, dict):
        raise InputError(f"{path}: is not an object with the fields of a sweep")
    known = ("format", *(field.name for field in fields(SweepSpec)))
    for name in document:
        if name not in known:
            raise InputError(f"{path}: {name}: is not a field of a sweep{nearest(name, known)}")
    if document.get("format") != SPEC_FORMAT:
        raise InputError(
            f"{path}: format: {document.get('format')!r} is not {SPEC_FORMAT!r}, which is needed"
        )
    seeds = document.get("seeds", [0])
    spec = SweepSpec(
        models=_axis(path, document, "models", str),
        clusters=_axis(path, document, "clusters", str),
        microbatches=_axis(path, document, "microbatches", int, least=1),
        planners=_axis(path, document, "planners", str),
        seeds=_axis(path, {"seeds": seeds}, "seeds", int),
    )
    if spec.num_cases > MAX_CASES:
        raise InputError(f"{path}: has {spec.num_cases} cases, more than {MAX_CASES}; divide it")
    return spec


def _axis(
    path: str | Path, document: Mapping[str, Any], name: str, kind: type, least: int = 0
) -> tuple[Any, ...]:
    """A list without repetitions of texts or whole numbers."""
    if name not in document:
        raise InputError(f"{path}: {name}: is missing; give a list")
    values = document[name]
    if not isinstance(values, list) or not values:
        raise InputError(f"{path}: {name}: is not a list with at least one entry")
    for index, value in enumerate(values):
        where = f"{path}: {name}[{index}]"
        if type(value) is not kind:  # True is an int, but no number here
            wanted = "text" if kind is str else "a whole number"
            raise InputError(f"{where}: {value!r} is not {wanted}")
        if isinstance(value, int) and value < least:
            raise InputError(f"{where}: {value} is not at least {least}")
        if value in values[:index]:
            raise InputError(f"{where}: {value!r} stands twice")
    return tuple(values)


def expand_cases(
    spec: SweepSpec,
    resolve_model: Callable[[str], ModelProfile],
    resolve_cluster: Callable[[str, int], Cluster],
) -> list[SweepCase]:
    """Every case of the grid in its order: models outermost, seeds innermost."""
    from pipeplan.planning.registry import planner_names

    known = planner_names()
    for index, planner in enumerate(spec.planners):
        if planner not in known:
            raise InputError(
                f"planners[{index}]: {planner!r} is not known{nearest(planner, known)}"
            )
    models = {name: resolve_model(name) for name in spec.models}
    clusters = {
        (name, seed): resolve_cluster(name, seed) for name in spec.clusters for seed in spec.seeds
    }
    grid = product(spec.models, spec.clusters, spec.microbatches, spec.planners, spec.seeds)
    return [
        SweepCase(
            index=index,
            model_name=model,
            cluster_name=cluster,
            model=models[model],
            cluster=clusters[cluster, seed],
            microbatches=microbatches,
            planner=planner,
            seed=seed,
        )
        for index, (model, cluster, microbatches, planner, seed) in enumerate(grid)
    ]


def journal_path(output: str | Path) -> Path:
    """Where the journal of a result lies."""
    output = Path(output)
    return output.with_name(f"{output.name}.journal")


def run_sweep(
    cases: list[SweepCase],
    output: str | Path,
    *,
    backend: Backend | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[SweepRow]:
    """Run what the journal does not hold yet, then write all rows to `output`.

    Args:
        cases: as `expand_cases` gives them.
        output: `.csv` or `.parquet`.
        backend: where cases run; by default processes on this machine.
        on_progress: called with the number of cases done and of all cases.
    """
    output = Path(output)
    write = _writer(output)
    with _open_journal(journal_path(output), _digest(cases)) as journal:
        rows = dict(journal.rows)
        if on_progress is not None:
            on_progress(len(rows), len(cases))
        left = [case for case in cases if case.index not in rows]
        for index, row, planning_s in _outcomes(left, backend or Backend()):
            journal.append(index, row, planning_s)
            rows[index] = row
            if on_progress is not None:
                on_progress(len(rows), len(cases))
        ordered = [rows[case.index] for case in cases]
        write(output, ordered)
        journal.path.unlink()  # only now: the result holds everything
    return ordered


Outcome = tuple[int, SweepRow, float]
"""The case's index, its row, and the seconds that planning took."""


def _run_case(case: SweepCase) -> Outcome:
    from pipeplan.planning.door import plan

    names: dict[str, Any] = {
        "model": case.model_name,
        "cluster": case.cluster_name,
        "microbatches": case.microbatches,
        "planner": case.planner,
        "seed": case.seed,
    }
    started_s = perf_counter()
    try:
        made = plan(
            case.model,
            case.cluster,
            case.microbatches,
            case.planner,
            seed=case.seed,
            num_threads=1,  # cases run side by side already
        )
    except PipeplanError as error:
        row = SweepRow(**names, error=" ".join(str(error).split()))
        return case.index, row, perf_counter() - started_s
    planning_s = perf_counter() - started_s
    predicted = made.require_predicted()
    row = SweepRow(
        **names,
        iteration_ms=made.iteration_ms,
        samples_per_second=made.samples_per_second if made.iteration_ms else None,
        bubble_fraction=predicted.bubble_fraction,
        peak_memory_gb=max(predicted.peak_memory_gb.values()),
        num_stages=len(made.stages),
        num_devices=sum(stage.num_replicas for stage in made.stages),
        lower_bound_ms=None if predicted.bound is None else predicted.bound.lower_bound_ms,
    )
    return case.index, row, planning_s


def _outcomes(cases: list[SweepCase], backend: Backend) -> Iterator[Outcome]:
    """The outcomes as they come."""
    if not cases:
        return
    joblib = _optional("joblib", "sweep")
    with _joblib_backend(joblib, backend):
        run_case = joblib.delayed(_run_case)
        # Batches of one: what a batch holds back would be lost with the process.
        if backend.name != "ray":
            parallel = joblib.Parallel(
                n_jobs=backend.jobs, batch_size=1, return_as="generator_unordered"
            )
            yield from parallel(run_case(case) for case in cases)
            return
        # Ray's joblib backend returns nothing before everything is done, so it is given only what
        # runs at once. That idles a little behind the slowest case, and loses no more than that.
        at_once = joblib.effective_n_jobs(backend.jobs)
        with joblib.Parallel(n_jobs=backend.jobs, batch_size=1) as parallel:
            for first in range(0, len(cases), at_once):
                yield from parallel(run_case(case) for case in cases[first : first + at_once])


def _optional(module: str, extra: str) -> Any:
    """A module that only an extra brings."""
    try:
        return import_module(module)
    except ImportError:
        name = module.split(".")[0]
        raise InputError(
            f"sweep: {name} is not installed; pip install 'pipeplan[{extra}]'"
        ) from None


@contextmanager
def _joblib_backend(joblib: Any, backend: Backend) -> Iterator[None]:
    """Make joblib use the backend within the block."""
    if backend.name == "loky":
        with joblib.parallel_config(backend="loky"):
            yield
        return
    jobs = None if backend.jobs == -1 else backend.jobs
    if backend.name == "dask":
        distributed = _optional("distributed", "dask")
        client = (
            distributed.Client(backend.address)
            if backend.address
            else distributed.Client(n_workers=jobs, threads_per_worker=1, dashboard_address=None)
        )
        with client, joblib.parallel_config(backend="dask"):
            yield
        return
    ray = _optional("ray", "ray")
    ray.init(
        address=backend.address,
        num_cpus=None if backend.address else jobs,
        include_dashboard=False if backend.address is None else None,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        _optional("ray.util.joblib", "ray").register_ray()
        with joblib.parallel_config(backend="ray"):
            yield
    finally:
        ray.shutdown()


class _Journal:
    """An open journal: the rows that it held, and where further ones go."""

    def __init__(self, path: Path, file: IO[bytes], rows: dict[int, SweepRow]) -> None:
        self.path = path
        self.rows = rows
        self._file = file

    def append(self, index: int, row: SweepRow, planning_s: float) -> None:
        """Add a line, and return once the disk has it."""
        line = {"case": index, "row": asdict(row), "planning_s": round(planning_s, 6)}
        self.write(line)

    def write(self, document: Mapping[str, Any]) -> None:
        """One line in one piece."""
        self._file.write(json.dumps(document, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def _open_journal(path: Path, digest: str) -> Iterator[_Journal]:
    """The journal of this very sweep, kept from other processes while it is open."""
    import fcntl

    if not path.parent.is_dir():
        raise InputError(f"{path.parent}: is not a folder; make it first")
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"{path}: another sweep is writing it; wait for that or choose another output"
            ) from None
        file.seek(0)
        data = file.read()
        complete = data[: data.rfind(b"\n") + 1]  # a line cut short by a crash does not count
        if len(complete) < len(data):
            file.truncate(len(complete))
        journal = _Journal(path, file, {})
        if complete:
            journal.rows.update(_journal_rows(path, complete, digest))
        else:
            journal.write({"format": JOURNAL_FORMAT, "sweep": digest})
            _sync_folder(path.parent)
        yield journal


def _journal_rows(path: Path, data: bytes, digest: str) -> dict[int, SweepRow]:
    header, *lines = data.splitlines()
    try:
        head = json.loads(header)
        if head.get("format") != JOURNAL_FORMAT:
            raise InputError(f"{path}: is not the journal of a sweep; choose another output")
        if head.get("sweep") != digest:
            raise InputError(
                f"{path}: belongs to another sweep or to other inputs;"
                " finish that one, delete this file or choose another output"
            )
        entries = [json.loads(line) for line in lines]
        return {entry["case"]: SweepRow(**entry["row"]) for entry in entries}
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        if isinstance(problem, InputError):
            raise
        raise InputError(f"{path}: is damaged ({problem}); delete it to start anew") from None


def _sync_folder(folder: Path) -> None:
    """A new file survives a crash only once its folder is on disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(cases: Iterable[SweepCase]) -> str:
    """What tells this sweep from others: all inputs in full, and the version that plans."""
    digest = sha256(VERSION.encode())
    seen: dict[int, bytes] = {}  # the same input serves many cases
    for case in cases:
        for part in (case.model, case.cluster):
            if id(part) not in seen:
                seen[id(part)] = sha256(repr(part).encode()).digest()
            digest.update(seen[id(part)])
        key = [case.model_name, case.cluster_name, case.microbatches, case.planner, case.seed]
        digest.update(json.dumps(key).encode())
    return digest.hexdigest()


def _writer(output: Path) -> Callable[[Path, list[SweepRow]], None]:
    """How to write a file with this suffix; refused before anything runs if that is impossible."""
    suffix = output.suffix.lower()
    if suffix == ".csv":
        return _write_csv
    if suffix != ".parquet":
        raise InputError(f"output: {output} ends in {suffix!r}; use .csv or .parquet")
    from importlib.util import find_spec

    if find_spec("pyarrow") is None:
        raise InputError("output: .parquet needs pyarrow; pip install pyarrow, or use .csv")
    return _write_parquet


def _write_csv(output: Path, rows: list[SweepRow]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([getattr(row, column) for column in COLUMNS] for row in rows)
    write_atomically(output, text.getvalue().encode())


def _write_parquet(output: Path, rows: list[SweepRow]) -> None:
    pyarrow = import_module("pyarrow")
    kinds = {"str": pyarrow.string(), "int": pyarrow.int64(), "float": pyarrow.float64()}
    schema = pyarrow.schema(
        [
            (field.name, kinds[str(getattr(field.type, "__name__", field.type)).split(" ")[0]])
            for field in fields(SweepRow)
        ]
    )
    table = pyarrow.Table.from_pylist([asdict(row) for row in rows], schema=schema)
    buffer = pyarrow.BufferOutputStream()
    import_module("pyarrow.parquet").write_table(table, buffer)
    write_atomically(output, buffer.getvalue().to_pybytes())
