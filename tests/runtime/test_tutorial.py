"""docs/tutorial.md, every command: three ranks on this machine play two hosts."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import pipeplan as pp

pytest.importorskip("transformers", reason="transformers is not installed")

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROGRAMS = {
    "pipeplan": [sys.executable, "-m", "pipeplan"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def start(line: str, folder: Path, port: int) -> subprocess.Popen[str]:
    """The command, with this machine in the place of the host `big`."""
    program, *arguments = shlex.split(line)
    places = {"big": "127.0.0.1", "29571": str(port)}
    return subprocess.Popen(
        [*PROGRAMS[program], *(places.get(word, word) for word in arguments)],
        cwd=folder,
        env={**os.environ, "REHEARSAL": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        | ({} if program == "torchrun" else {"REHEARSAL": ""})
        | {"PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(lines: list[str], folder: Path) -> str:
    """What the commands print; those for two hosts run at the same time."""
    at_once = [lines] if "--nnodes" in lines[0] else [[line] for line in lines]
    printed = ""
    for together in at_once:
        port = free_port()
        started = [start(line, folder, port) for line in together]
        try:
            for line, process in zip(together, started, strict=True):
                out, err = process.communicate(timeout=900)
                assert process.returncode == 0, f"{line}\n{err}"
                printed += out
        finally:
            for process in started:
                if process.poll() is None:
                    process.terminate()
                    process.communicate()
    return printed


def test_every_command_of_the_tutorial(tmp_path):
    printed = {}
    shown = ""
    for language, text in FENCE.findall(PAGE.read_text()):
        name = re.match(r"# (\S+\.(?:py|yaml))\n", text)
        if name:
            (tmp_path / name[1]).write_text(text)
        elif language == "console":
            lines = text.splitlines()
            printed[lines[0].split(" ")[1]] = run(lines, tmp_path)
        elif language == "python":
            last = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    f"{text}\nprint(sum(p.numel() for p in model.parameters()))",
                ],
                cwd=tmp_path,
                env={**os.environ, "REHEARSAL": "1"},
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert last.returncode == 0, last.stderr
        elif not text.startswith("pip install"):
            shown = text
    for line in shown.splitlines():  # the plan that the page shows is the one that comes out
        assert line.rstrip() in [made.rstrip() for made in printed["plan"].splitlines()]
    assert "+21.2 %" in printed["whatif"]
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", "".join(printed.values()))]
    assert len(losses) == 6  # four steps, and two behind the checkpoint
    assert losses[5] < losses[3] < losses[0] < 6.0
    plan = pp.read_plan(tmp_path / "gpt2.plan.json")
    assert [len(stage.devices) for stage in plan.stages] == [1, 2]
