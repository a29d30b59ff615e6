"""Where cases run: processes on this machine, or a cluster of dask or ray, all through joblib.

Ctrl-C reaches every process of the terminal. Workers are started with SIGINT blocked, so that only
the sweep itself answers to it: it ends the workers, and no worker prints a traceback. A worker
whose sweep was killed ends by itself.
"""

import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import resource_tracker
from typing import Any

from pipeplan.documents.text import nearest
from pipeplan.errors import InputError, PipeplanError
from pipeplan.planning.sweep.cases import Outcome, SweepCase, run_case

__all__ = ["Backend", "require_backend", "run_cases"]

PACKAGES = {
    "loky": [("joblib", "sweep")],
    "dask": [("joblib", "sweep"), ("distributed", "dask")],
    "ray": [("joblib", "sweep"), ("ray", "ray")],
}
"""The modules that a backend needs, each with the extra of pipeplan that installs it."""
BACKENDS = tuple(PACKAGES)
MAX_JOBS = 4096
"""More processes than any machine starts; a larger number is a typing mistake."""
PARENT_CHECK_S = 0.5
"""How often a worker looks whether its sweep still runs."""


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
        if self.jobs > MAX_JOBS:
            raise InputError(f"jobs: {self.jobs} is more than {MAX_JOBS}; use -1 for all cores")
        if self.address is not None and self.name == "loky":
            raise InputError(
                f"address: {self.address!r} needs another backend; choose dask or ray, or leave it"
            )


def require_backend(backend: Backend) -> None:
    """Refuse a backend whose packages are not installed."""
    for module, extra in PACKAGES[backend.name]:
        if find_spec(module) is None:
            raise InputError(f"sweep: {module} is not installed; pip install 'pipeplan[{extra}]'")


def run_cases(cases: list[SweepCase], backend: Backend) -> Iterator[Outcome]:
    """The outcomes of the cases, in the order in which they end."""
    if not cases:
        return
    joblib = import_module("joblib")
    with _joblib_backend(joblib, backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # joblib warns when a sweep ends early: Ctrl-C does that
        try:
            yield from _run_with_joblib(joblib, cases, backend)
        except joblib.externals.loky.process_executor.BrokenProcessPool:
            raise PipeplanError(
                "sweep: a worker process ended without a result, perhaps for lack of memory;"
                " run the sweep again with fewer --jobs, it goes on where it stopped"
            ) from None


def _run_with_joblib(joblib: Any, cases: list[SweepCase], backend: Backend) -> Iterator[Outcome]:
    delayed = joblib.delayed(run_case)
    # Batches of one: a batch comes back as a whole, so a crash would lose all of it.
    if backend.name != "ray":
        parallel = joblib.Parallel(
            n_jobs=backend.jobs, batch_size=1, return_as="generator_unordered"
        )
        with _sigint_blocked():
            outcomes = parallel(delayed(case) for case in cases)
        yield from outcomes
        return
    # Ray's joblib backend returns nothing before everything is done. So it gets only as many cases
    # as run at once. Some workers wait for the slowest case then, but a crash loses only those.
    at_once = joblib.effective_n_jobs(backend.jobs)
    with joblib.Parallel(n_jobs=backend.jobs, batch_size=1) as parallel:
        for first in range(0, len(cases), at_once):
            yield from parallel(delayed(case) for case in cases[first : first + at_once])


def _end_with_parent(parent: int) -> None:
    """Make this worker end soon after the process that started it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Threads and processes that are started within the block never receive SIGINT.

    A SIGINT that arrives meanwhile is answered at the end of the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # starting it later would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _joblib_backend(joblib: Any, backend: Backend) -> Iterator[None]:
    """Make joblib use the backend within the block."""
    if backend.name == "loky":
        with joblib.parallel_config(
            backend="loky", initializer=_end_with_parent, initargs=(os.getpid(),)
        ):
            yield
    elif backend.name == "dask":
        with _dask_client(backend), joblib.parallel_config(backend="dask"):
            yield
    else:
        with _ray_session(backend), joblib.parallel_config(backend="ray"):
            yield


@contextmanager
def _dask_client(backend: Backend) -> Iterator[None]:
    distributed = import_module("distributed")
    with _sigint_blocked():
        if backend.address:
            client = distributed.Client(backend.address)
        else:
            client = distributed.Client(
                n_workers=_num_workers(backend), threads_per_worker=1, dashboard_address=None
            )
    with client:
        yield


@contextmanager
def _ray_session(backend: Backend) -> Iterator[None]:
    ray = import_module("ray")
    register_ray = import_module("ray.util.joblib").register_ray
    try:
        with _sigint_blocked():
            ray.init(
                address=backend.address,
                num_cpus=None if backend.address else _num_workers(backend),
                include_dashboard=False if backend.address is None else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        register_ray()
        yield
    finally:
        ray.shutdown()


def _num_workers(backend: Backend) -> int | None:
    return None if backend.jobs == -1 else backend.jobs
