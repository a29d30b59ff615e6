"""Kernels under address, undefined-behaviour and thread sanitizers, without Python around them."""

import shutil
import subprocess
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "src" / "pipeplan" / "_core"
DRIVER = Path(__file__).with_name("sanitize.cpp")
COMPILER = shutil.which("c++") or shutil.which("g++")


def build(folder: Path, *flags: str) -> Path:
    program = folder / "sanitize"
    sources = [path for path in sorted(CORE.glob("*.cpp")) if not path.name.startswith("bindings")]
    command = [
        *(COMPILER, "-std=c++17", "-g", "-O1", "-pthread", "-ffp-contract=off", *flags),
        *("-I", str(CORE), *map(str, sources), str(DRIVER), "-o", str(program)),
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip("the sanitizer's library is not installed")
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.full
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        pytest.param(
            ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
            300,
            id="address and undefined behaviour",
        ),
        pytest.param(("-fsanitize=thread",), 300, id="threads"),
    ],
)
def test_kernels_run_clean(tmp_path, flags, problems):
    program = build(tmp_path, *flags)
    ended = subprocess.run(
        [program, "1", str(problems)], capture_output=True, text=True, timeout=900
    )
    assert (ended.returncode, ended.stdout) == (0, f"{problems} problems\n"), ended.stderr[-3000:]
    assert ended.stderr == ""
