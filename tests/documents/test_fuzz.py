"""Mutants of valid documents are read or refused: no traceback, no hang, little memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FUZZER = Path(__file__).with_name("fuzz_readers.py")


@pytest.mark.parametrize(
    ("num_mutants", "seed"), [(5000, 0), pytest.param(100_000, 1, marks=pytest.mark.full)]
)
def test_mutants_are_read_or_refused(num_mutants, seed):
    command = [sys.executable, str(FUZZER), str(num_mutants), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["failures"] == []
    assert num_mutants / 10 < summary["read"] < num_mutants * 9 / 10
    assert summary["slowest_s"] < 5
    assert summary["megabytes"] < 1000
