"""Tables in terminals of 40 columns: no line is longer, nothing is cut off."""

import io
import re

import pytest
from rich.console import Console
from rich.text import Text

from command_line import run_command
from pipeplan.report.tables import Column, fitted_table

COLUMNS = [
    Column(heading="planner"),
    Column(heading="iteration", is_number=True),
    Column(heading="", is_extra=True),
    Column(heading="bubble", is_number=True),
    Column(heading="memory", is_number=True),
]
ROWS = [["best", "971.2 ms", "####", "20.0%", "14.1 GB"], ["spp", "985.3 ms", "###", "", "15 GB"]]


def shown(width: int, columns=COLUMNS, rows=ROWS) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(fitted_table(columns, rows, width))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_wide_table_is_one():
    assert shown(40) == [
        "planner iteration      bubble  memory",
        "best     971.2 ms ####  20.0% 14.1 GB",
        "spp      985.3 ms ###           15 GB",
    ]


def test_the_bar_is_left_out_first():
    assert shown(36) == [
        "planner iteration bubble  memory",
        "best     971.2 ms  20.0% 14.1 GB",
        "spp      985.3 ms          15 GB",
    ]


def test_a_narrow_table_goes_on_below():
    assert shown(25) == [
        "planner iteration bubble",
        "best     971.2 ms  20.0%",
        "spp      985.3 ms",
        "",
        "planner  memory",
        "best    14.1 GB",
        "spp       15 GB",
    ]


def test_a_long_first_cell_takes_several_lines():
    rows = [["one more host like h0", "1", "", "2", Text("3")]]
    lines = shown(20, rows=rows)
    assert max(map(len, lines)) <= 20
    assert [" ".join(line.split()) for line in lines[:3]] == [
        "planner iteration",
        "one more 1",
        "host like",
    ]


def test_rows_that_are_left_out_show_points():
    assert shown(40, rows=[ROWS[0], [], ROWS[1]])[2] == "..."


COMMANDS = {
    "plan": ("plan", "bert-large", "4x2-10g", "--effort", "0.1"),
    "mixed": ("plan", "gpt2-xl", "mixed-hosts", "--planner", "spp"),
    "families": ("simulate", "FAMILIES"),
    "compare": ("compare", "vgg19", "4x2-10g", "--planners", "spp,1f1b,interleaved-1f1b,gpipe"),
    "zoo": ("zoo",),
    "lost": ("whatif", "PLAN", "--lose", "h0d1", "--effort", "0.1"),
    "outlook": ("whatif", "PLAN", "--effort", "0.1"),
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_forty_columns_show_all_that_a_hundred_and_twenty_show(
    arguments, capfd, tmp_path, monkeypatch, request
):
    plan = tmp_path / "vgg.plan.json"
    run_command(capfd, "plan", "vgg19", "4x2-10g", "--planner", "spp", "-o", plan)
    families = request.path.parents[2] / "examples" / "families.plan.json"
    given = [{"PLAN": plan, "FAMILIES": families}.get(word, word) for word in arguments]
    outputs = {}
    for columns in (40, 160):
        monkeypatch.setenv("COLUMNS", str(columns))
        code, outputs[columns], _ = run_command(capfd, *given)
        assert code == 0
    assert max(map(len, outputs[40].splitlines())) <= 40
    assert "…" not in outputs[40]
    assert words_of(outputs[160]) <= words_of(outputs[40])


LANE = re.compile(r"(stage|group) \d+ +[\dFBIW·.─═~░]+$")


def words_of(text: str) -> set[str]:
    """All words but those of timelines, which depend on the width, and the times of planning."""
    lines = [line for line in text.splitlines() if not LANE.match(line)]
    return {
        word
        for word in re.findall(r"[\w.%+!~-]+", "\n".join(lines).replace("█", ""))
        if not re.fullmatch(r"[\d.]+", word) or "." not in word
    }


@pytest.mark.parametrize("command", ["", "plan", "compare", "sweep", "testbed"])
def test_help_fits_forty_columns(command, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = run_command(capfd, *([command] if command else []), "--help")
    assert code == 0
    text, _, examples = out.partition("Example")
    assert max(map(len, text.splitlines())) <= 40
    assert "pipeplan" in (examples or text)
