"""The README shows what the commands print today (`benchmarks/readme/run.py` writes it anew)."""

import re
from pathlib import Path

import pipeplan as pp
from command_line import run_command

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def block_after(command: str) -> list[str]:
    """The lines of the block below the place where the text names the command."""
    behind = README.partition(f"`pipeplan {command}`")[2]
    return behind.split("\n```\n", 2)[1].splitlines()


def printed(capfd, monkeypatch, *arguments: str) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run_command(capfd, *arguments)
    assert code == 0, err
    return [line.rstrip() for line in out.rstrip().splitlines()]


def test_the_plan_is_that_of_today(capfd, monkeypatch):
    shown = block_after("plan bert-large 4x2-10g")
    assert shown == printed(capfd, monkeypatch, "plan", "bert-large", "4x2-10g")


def test_the_comparison_is_that_of_today(capfd, monkeypatch):
    """But for the last column, which says how long planning took."""

    def without_times(lines: list[str]) -> list[str]:
        return [re.sub(r"\s+[\d.]+ m?s$", "", line) for line in lines]

    shown = block_after("compare bert-large 4x2-10g")
    now = printed(capfd, monkeypatch, "compare", "bert-large", "4x2-10g")
    assert without_times(shown) == without_times(now)


def test_text_and_picture_tell_the_same_times():
    model, cluster = pp.zoo.model("bert-large"), pp.zoo.cluster("4x2-10g")
    plain = pp.plan(model, cluster, microbatches=16, positions=1, split_backward=False)
    said = re.search(r"backwards stay whole: ([\d.]+) ms, the proved optimum", README)
    assert said is not None
    assert said[1] == f"{plain.iteration_ms:.1f}"
    assert plain.iteration_ms <= plain.bound.lower_bound_ms * (1 + 1e-6)
    iteration = re.search(r"^iteration ([\d.]+ ms)", README, re.MULTILINE)
    picture = (ROOT / "docs" / "images" / "demo.svg").read_text()
    assert iteration is not None
    assert f"{iteration[1]} an iteration" in picture
