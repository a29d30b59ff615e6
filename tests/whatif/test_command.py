"""`pipeplan whatif`: terminal, JSON, files, refusals."""

import json
import random

import pytest

from command_line import run_command
from pipeplan import zoo
from pipeplan.checker import check
from pipeplan.commands import progress
from pipeplan.documents.files import read_plan, write_plan
from pipeplan.planning.door import plan


@pytest.fixture
def run(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(progress, "QUIET_S", 1000.0)
    return lambda *arguments: run_command(capfd, *arguments)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("whatif") / "bert.plan.json"
    write_plan(plan(zoo.model("bert-large"), zoo.cluster("4x2-10g"), 8), path)
    return path


def test_both_plans_stand_side_by_side(run, plan_file):
    code, out, err = run("whatif", plan_file, "--slower", "h1d0=0.5")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "bert-large on 4x2-10g: what if h1d0 at 0.5x speed"
    assert max(map(len, lines)) <= 80
    titles = [line for line in lines if line.startswith(("today", "old plan,", "new plan"))]
    assert [title.split("  ")[0].strip() for title in titles] == [
        "today",
        "old plan, changed",
        "new plan",
        "old plan, changed",
        "new plan",
    ]
    assert "A new plan makes" in out


def test_a_lost_stage_is_said_so(run, plan_file):
    code, out, _ = run("whatif", plan_file, "--lose", "h0", "--lose", "h1")
    assert code == 0
    assert "The old plan does not run any more." in out
    assert "has no device left" in out
    assert "stops" in out


def test_a_plan_that_never_fitted_is_said_so(run, tmp_path):
    path = tmp_path / "gpipe.plan.json"
    write_plan(plan(zoo.model("bert-large"), zoo.cluster("4x2-10g"), 16, planner="gpipe"), path)
    code, out, _ = run("whatif", path, "--slower", "h0d0=0.5")
    assert code == 0
    assert "The old plan does not fit, and did not before." in out


def test_figures_as_json(run, plan_file):
    code, out, err = run("whatif", plan_file, "--link", "h0,h1=0.125", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["changes"] == ["h0 to h1 at 0.125 GB/s"]
    assert document["before_ms"] == pytest.approx(read_plan(plan_file).iteration_ms)
    assert document["replanned_ms"] <= document["kept_ms"]
    code, out, err = run("whatif", plan_file, "--json")
    assert (code, err) == (0, "")
    kinds = {each["kind"] for each in json.loads(out)["prospects"]}
    assert {"straggler", "loss", "more-devices", "faster-links"} <= kinds


def test_the_outlook_fits_80_columns(run, plan_file):
    code, out, err = run("whatif", plan_file)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert " at half speed" in out
    assert "one more device in h0" in out
    assert "look closer: pipeplan whatif PLAN --" in out


def test_the_new_plan_and_the_page_are_written(run, plan_file, tmp_path):
    new, page = tmp_path / "new.plan.json", tmp_path / "new.html"
    code, _, err = run("whatif", plan_file, "--lose", "h0d1", "-o", new, "--report", page)
    assert (code, err) == (0, "")
    made = read_plan(new)
    assert check(made).ok
    assert made.cluster.num_devices == 7
    text = page.read_text()
    assert "What if h0d1 lost" in text
    for title in ("Today", "The old plan after the change", "A new plan"):
        assert f"<h3>{title} <b>" in text
    assert text.count('class="pp-timeline"') == 3


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--slower", "h9d9=1"], "slower: 'h9d9' is neither a device nor a host"),
        (["--link", "h0=1"], "--link: 'h0' is not two names"),
        (["--add", "two"], "--add: 'two' does not begin with hosts x devices"),
        (["-o", "x.json"], "without a change there is no new plan to write"),
        (["--lose", "h0", "--lose", "h1", "--lose", "h2", "--lose", "h3"], "no device is left"),
        (["--lose", "h0", "--planner", "none"], "planner: 'none' is not known"),
    ],
)
def test_wrong_questions_are_one_line(run, plan_file, arguments, part):
    code, out, err = run("whatif", plan_file, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("pipeplan: ")
    assert part in err
    assert err.count("\n") == 1


def test_random_texts_are_refused_in_one_line(run, plan_file):
    rng = random.Random(0)
    letters = "h0d1,=x:. -5e\x1b\n\"'"
    for _ in range(60):
        text = "".join(rng.choice(letters) for _ in range(rng.randint(0, 12)))
        option = rng.choice(["--slower", "--link", "--lose", "--add"])
        code, _, err = run("whatif", plan_file, f"{option}={text}", "--effort", "0.01", "--json")
        assert code in (0, 2)
        assert err.count("\n") == (code == 2)
        assert "Traceback" not in err
