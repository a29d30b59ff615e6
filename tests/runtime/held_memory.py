"""Runs a module of the tests with every allocation counted, and asks the counter."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("held_memory.c")


class HeldMemory:
    """Inside, the most bytes that this process holds at once beyond those at the beginning.

    Torch computes as it does elsewhere: a mode that looks at every op would let autograd add up
    gradients out of place. And what a rank holds only within an op counts, too.
    """

    def __init__(self):
        self._counter = ctypes.CDLL(None)
        for name in ("held_bytes", "most_held_bytes"):
            getattr(self._counter, name).restype = ctypes.c_long
        self.most = 0

    def __enter__(self):
        self._counter.forget_most_held()
        self._start = self._counter.held_bytes()
        return self

    def __exit__(self, *_):
        self.most = self._counter.most_held_bytes() - self._start


def run_counted(module, question, folder):
    """What a module's `main` prints, as JSON, for a question; in a process of its own."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or sys.platform != "linux":
        pytest.skip("counting allocations needs Linux and a C compiler")
    library = folder / "held_memory.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    paths = [str(SOURCE.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(question)],
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
