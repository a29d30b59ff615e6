"""Every command of README and docs runs as it stands there, and prints what the page shows.

Each page gets a folder of its own with the files that it speaks of. Commands that start processes
run in the tests marked `full`, page by page, too: ranks over gloo, hosts as further ranks of this
machine, and a stand-in for `nvidia-smi`, which prints recorded texts.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import pipeplan as pp
from command_line import run_command
from interop import foreign_files, topologies
from pipeplan.commands.group import commands as cli

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?:\$ )?((?:pipeplan|torchrun|python|make|pip|nvidia-smi) .*)")
INDENTED = re.compile(r"^    ((?:pipeplan|torchrun|python|make|pip) [^:]*)$", re.MULTILINE)
COMMENT = re.compile(r"\s+# .*$")
IN_FULL = (
    "torchrun ",
    "nvidia-smi ",
    "pipeplan profile ",
    "pipeplan testbed ",
    "pipeplan calibrate ",
    "pipeplan plan text.model.json ",
    "pipeplan discover -o ",
    "pipeplan discover --hosts node1",
)
"""What imports torch, needs its results, or asks for GPUs: run by the tests marked `full`."""
IN_WHEEL_TEST = ("pip install pipeplan", 'pip install "pipeplan[torch]" transformers', "make demo")
"""Run by tests/test_wheel.py in a fresh environment, and in a fresh clone."""
NOT_RUN = {"make test": "it runs all tests, this one too"}
OWN_TEST = {
    "tutorial.md": "tests/runtime/test_tutorial.py",
    **dict.fromkeys(
        (
            "first-steps.md",
            "failures.md",
            "memory.md",
            "my-cluster.md",
            "schedules.md",
            "sweeps.md",
        ),
        "tests/test_docs.py",
    ),
}
REFUSED = {"--to megatron": 3, "wrong.csv": 2}
"""Commands that a page shows being refused, by their end, and the exit code."""


def test_pages_with_a_test_of_their_own():
    for page, test in OWN_TEST.items():
        assert page in (ROOT / test).read_text()


def test_what_is_not_run_is_a_short_list():
    pages = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
    lines = {line for page in pages for line in commands_of(page)}
    programs = {line for line in lines if not line.startswith(("pipeplan ", *IN_FULL))}
    assert programs == {*IN_WHEEL_TEST, "make test"}
    assert lines >= NOT_RUN.keys()
    assert len(NOT_RUN) == 1
    wheel_test = (ROOT / "tests" / "test_wheel.py").read_text()
    assert [line for line in IN_WHEEL_TEST if line not in wheel_test] == []


def shown_after(page: Path) -> dict[str, list[str]]:
    """What a page shows below each command that has a prompt, without lines that are cut off."""
    shown: dict[str, list[str]] = {}
    for _, body in FENCE.findall(page.read_text()):
        for part in re.split(r"^\$ ", body.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            kept = [line for line in lines if line.strip() and "..." not in line]
            shown[COMMENT.sub("", command)] = kept
    return shown


def commands_of(page: Path) -> list[str]:
    """The commands of a page without their comments, in order."""
    found = []
    text = page.read_text()
    for _, body in FENCE.findall(text):
        for line in body.replace("\\\n", " ").splitlines():
            match = COMMAND.match(line.strip())
            if match:
                found.append(COMMENT.sub("", match[1]))
    return [*found, *INDENTED.findall(FENCE.sub("", text))]


PAGES = [
    page
    for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
    if page.name not in OWN_TEST and commands_of(page)
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The files that pages speak of."""
    folder = tmp_path_factory.mktemp("made")
    plan = pp.plan(pp.zoo.model("bert-large"), pp.zoo.cluster("4x2-10g"), microbatches=16)
    pp.write_plan(plan, folder / "bert.plan.json")
    shutil.copy(ROOT / "examples" / "families.plan.json", folder / "family.plan.json")
    texts = {
        "graph.txt": foreign_files.PIPEDREAM,
        "trace.json": foreign_files.TRACE,
        "topo.txt": topologies.DGX_H100,
        "nvlink.txt": topologies.NVLINKS_H100,
        "memory.csv": topologies.MEMORY_H100,
        "cases.yaml": dict(FENCE.findall((DOCS / "sweeps.md").read_text()))["yaml"],
        "1f1b.csv": one_f_one_b(4, 16),
        "wrong.csv": one_f_one_b(4, 16).replace("3F1,3B1,3F2,3B2", "3F2,3B2,3F1,3B1"),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


def one_f_one_b(num_stages: int, num_microbatches: int) -> str:
    """1F1B as torch reads it, one action a cell."""
    lines = []
    for stage in range(num_stages):
        ahead = num_stages - stage
        order = [f"{stage}F{m}" for m in range(ahead)]
        for m in range(num_microbatches):
            order.append(f"{stage}B{m}")
            if ahead + m < num_microbatches:
                order.append(f"{stage}F{ahead + m}")
        lines.append(",".join(order))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page(page, made, capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    for path in made.iterdir():
        shutil.copy(path, tmp_path)
    shown = shown_after(page)
    for line in commands_of(page):
        if line.startswith((*IN_FULL, *IN_WHEEL_TEST, *NOT_RUN)):
            continue
        program, *arguments = shlex.split(line)
        assert program == "pipeplan", line
        code, out, err = run_command(capfd, *arguments)
        expected = next((code for end, code in REFUSED.items() if line.endswith(end)), 0)
        assert code == expected, f"{line}: {err}"
        said = [in_short(text) for text in (out + err).splitlines()]
        for text in shown.get(line, []):
            assert in_short(text) in said, f"{line}\n{text}\n{out}{err}"


def in_short(text: str) -> str:
    """The words of a line. Figures are those of the day that the page names."""
    return " ".join(re.sub(r"[-+]?\d[\d.e+-]*", "#", text).split())


# --------------------------------------------------------------- ranks, hosts, GPUs, the testbed

NVIDIA_SMI = """#!/bin/sh
cd recorded
case "$1" in topo) cat topo.txt;; nvlink) cat nvlink.txt;; *) cat memory.csv;; esac
"""
MINE = """
from text_model import *
from text_model import build_model as build
"""
MANY_LAYERS = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.encoder = nn.ModuleList(nn.Linear(8, 8) for _ in range(24))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.encoder:
            x = layer(x)
        return self.head(x)


def build():
    torch.manual_seed(0)
    return Model()


def make_batch(step, rows):
    return torch.ones(rows, 8), torch.zeros(rows, 8)


loss_fn = nn.functional.mse_loss
"""
PAGES_IN_FULL = [
    page
    for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
    if page.name not in OWN_TEST and any(line.startswith(IN_FULL) for line in commands_of(page))
]


@pytest.mark.full
@pytest.mark.parametrize("page", PAGES_IN_FULL, ids=lambda page: page.name)
def test_every_command_of_a_page(page, made, tmp_path):
    pytest.importorskip("torch")
    prepare(page, made, tmp_path)
    for line in commands_of(page):
        if line.startswith((*IN_WHEEL_TEST, *NOT_RUN)):
            continue
        if "old.plan.json" in line:  # the plan of the run above, on this page
            shutil.copy(tmp_path / "text.plan.json", tmp_path / "old.plan.json")
        expected = next((code for end, code in REFUSED.items() if line.endswith(end)), 0)
        for code, said in run_on_hosts(line, tmp_path):
            if code == 2 and "nobody says how fast the network" in said:
                continue  # this machine's network cards do not tell their rate
            assert code == expected, f"{line}\n{said[-3000:]}"


def prepare(page: Path, made: Path, folder: Path) -> None:
    """A folder with all files that the page speaks of, and an `nvidia-smi`."""
    for path in [*made.iterdir(), *(ROOT / "examples").glob("text*")]:
        shutil.copy(path, folder)
    (folder / "mine.py").write_text(MANY_LAYERS if page.name == "testbed.md" else MINE)
    (folder / "my_module.py").write_text(MINE)
    layers = tuple(
        pp.LayerProfile(
            name=name, forward_ms=4, backward_ms=8, output_bytes=2e5, parameter_bytes=4e5
        )
        for name in ("before", *(f"blocks.{i}" for i in range(6)), "behind")
    )
    model = pp.ModelProfile(name="text", microbatch_size=2, layers=layers)
    four = pp.expand_hosts("four", [pp.HostGroup(devices=4, bandwidth_gb_per_s=1.0)])
    pp.write_plan(pp.plan(model, four, microbatches=4), folder / "plan.json")
    for name in ("bin", "recorded"):
        (folder / name).mkdir()
    for name in ("topo.txt", "nvlink.txt", "memory.csv"):
        shutil.copy(made / name, folder / "recorded")
    (folder / "bin" / "nvidia-smi").write_text(NVIDIA_SMI)
    (folder / "bin" / "nvidia-smi").chmod(0o755)


def run_on_hosts(line: str, folder: Path) -> list[tuple[int, str]]:
    """The exit code and the output of the command; for several hosts, one rank here for each."""
    hosts = re.search(r"--nnodes (\d+)", line)
    if hosts is not None:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
        line = re.sub(r"--rdzv-endpoint \S+", f"--rdzv-endpoint 127.0.0.1:{port}", line)
        line = re.sub(r"--nproc-per-node \d+", "--nproc-per-node 1", line)
    tools = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": tools, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    started = [
        subprocess.Popen(
            ["bash", "-c", line],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(int(hosts[1]) if hosts else 1)
    ]
    try:
        said = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


# ------------------------------------------------------------------------ commands inside of text

INLINE = re.compile(r"`(pipeplan [a-z][a-z-]*(?: [^`]*)?)`")


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=str)
def test_commands_inside_of_text_exist(page):
    """With their options; what stands for a file or a number is not looked at."""
    for line in INLINE.findall(FENCE.sub("", page.read_text())):
        name, *words = line.split()[1:]
        assert name in cli.commands, line
        known = {option for each in cli.commands[name].params for option in each.opts}
        known |= {option for each in cli.commands[name].params for option in each.secondary_opts}
        options = {word.rstrip(",.").partition("=")[0] for word in words if word.startswith("-")}
        assert options <= known | {"--help", "-"}, line
