"""The examples: a package with a planner and a schedule, installed; a notebook, run."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import pipeplan as pp
from instances import flat_cluster
from pipeplan.planning.door import make_problem

EXAMPLES = Path(__file__).parents[1] / "examples"
PLUGIN = EXAMPLES / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which pip has installed the package of the example."""
    pytest.importorskip("flit_core", reason="pip needs it to build the example")
    folder = tmp_path_factory.mktemp("site")
    source = folder / "source"
    source.mkdir()
    for path in PLUGIN.iterdir():
        if path.is_file():
            (source / path.name).write_bytes(path.read_bytes())
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", folder / "lib", source],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return folder / "lib"


def pipeplan(installed, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeplan", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_what_its_readme_says_works(installed, tmp_path):
    text = (PLUGIN / "README.md").read_text()
    lines = re.search(r"```\n(.*?)```", text, re.S)[1].splitlines()
    assert lines[0] == "pip install ./examples/plugin"
    for line in lines[1:]:
        done = pipeplan(installed, *line.split()[1:], "--quiet")  # on a busy machine, too
        assert (done.returncode, done.stderr) == (0, ""), line
        assert "balanced" in done.stdout


def test_the_installed_schedule_runs(installed, tmp_path):
    options = ("--planner", "balanced", "--schedule", "two-ahead", "-m", 8, "-o")
    done = pipeplan(installed, "plan", "vgg19", "4x2-10g", *options, tmp_path / "p.json")
    assert done.returncode == 0, done.stderr
    made = pp.read_plan(tmp_path / "p.json")
    assert pp.check(made).ok
    last = [str(block) for block in made.schedule[made.num_stages - 1]]
    assert [name[-2:] for name in last[:5]] == ["F0", "F1", "F2", "B0", "F3"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location(
        "pipeplan_example", PLUGIN / "pipeplan_example.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chain(times_ms: list[float]) -> pp.ModelProfile:
    layers = tuple(
        pp.LayerProfile(
            name=f"l{n}", forward_ms=t, backward_ms=t, output_bytes=0, parameter_bytes=0
        )
        for n, t in enumerate(times_ms)
    )
    return pp.ModelProfile(name="chain", microbatch_size=1, layers=layers)


def test_its_drawing_is_what_the_simulator_draws(example):
    model, cluster = chain([1.0, 1.0, 1.0]), flat_cluster(3)
    problem = make_problem(model, cluster, 4)
    stages = tuple(pp.Stage(layers=range(n, n + 1), devices=(n,)) for n in range(3))
    run = example.run_two_ahead(problem.cost.pipeline_costs(stages), 4)
    drawn = re.findall(r"stage \d   (.*)", example.__doc__)
    for stage, line in enumerate(drawn):
        starts = {name: at for at, name in enumerate(line.split()) if name != "."}
        order = sorted(starts, key=starts.get)
        codes = [int(code) for code in run.order_SM2[stage]]
        assert order == [f"F{code}" if code >= 0 else f"B{-1 - code}" for code in codes]
    assert run.iteration_ms == pytest.approx(max(len(line.split()) for line in drawn))


def test_balanced_is_balanced(example):
    """Against all cuts of small chains, with devices of different speed."""
    random = np.random.default_rng(7)
    for _ in range(30):
        times = random.integers(1, 9, size=6).astype(float)
        speeds = random.choice([0.5, 1.0, 2.0], size=3)
        cluster = pp.Cluster(
            name="three",
            devices=tuple(pp.Device(name=f"d{n}", speed=float(s)) for n, s in enumerate(speeds)),
            bandwidth_gb_per_s=flat_cluster(3).bandwidth_gb_per_s,
        )
        problem = make_problem(chain(times.tolist()), cluster, 2)
        stages = example.plan_balanced(problem).stages
        every = [cuts for cuts in product(range(1, 6), repeat=2) if cuts[0] < cuts[1]]
        best = min(largest_ms(times, speeds, cuts) for cuts in every)
        made = [stage.layers.stop for stage in stages[:-1]]
        assert largest_ms(times, speeds, made) == pytest.approx(best)


def largest_ms(times, speeds, cuts) -> float:
    ends = [0, *cuts, len(times)]
    return max(times[ends[n] : ends[n + 1]].sum() / speeds[n] for n in range(len(speeds)))


def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "planning.ipynb").read_text())
    assert notebook["nbformat"] == 4
    names: dict[str, object] = {}
    shown = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == []
        *statements, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(statements, []), "cell", "exec"), names)  # noqa: S102  # our own
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))  # noqa: S307
        else:
            exec(compile(ast.Module([last], []), "cell", "exec"), names)  # noqa: S102  # our own
    plan = next(value for value in shown if isinstance(value, pp.Plan))
    assert "<svg" in plan._repr_html_()
    assert {path.name for path in tmp_path.iterdir()} >= {"speedup.svg", "speedup.pdf"}
    assert "dapple" in capsys.readouterr().out
