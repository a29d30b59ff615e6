"""Names of a plan never reach the terminal raw, whatever fails in a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import pipeplan as pp  # noqa: E402
from pipeplan.errors import RuntimeMismatchError  # noqa: E402
from pipeplan.run import _print_traceback  # noqa: E402
from pipeplan.runtime import Pipeline  # noqa: E402
from pipeplan.runtime.placement import Place, place_ranks  # noqa: E402
from pipeplan.splitting import cut, lay_out  # noqa: E402
from runtime.samples import make_plan, mlp_loss  # noqa: E402
from runtime.workers import Ranks  # noqa: E402

HOSTILE = Path(__file__).parents[1] / "hostile" / "hostile-names.plan.json"
ESCAPE = "\x1b[2J\x1b]0;owned\x07"
NAMES = [f"a{ESCAPE}", "b\nrank 9 died", "c\u202e\u2066", "d\r\x9b31m", "e\u2028", "f\x00"]


def is_harmless(text):
    return text.isprintable()


class Raising(nn.Module):
    """Fails with a text that a terminal would take for commands."""

    def forward(self, x):
        raise ValueError(f"{ESCAPE} \u202ethe layer is out of order")


def train_hostile(rank):
    plan = pp.read_plan(HOSTILE)
    model = nn.Sequential()
    for layer in plan.model.layers[:-1]:
        model.add_module(layer.name, nn.Linear(4, 4))
    model.add_module(plan.model.layers[-1].name, Raising())
    with Pipeline(
        plan, model, mlp_loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    ) as pipeline:
        pipeline.step(torch.ones(8, 4), torch.ones(8, 4))


def test_a_failing_run_prints_one_harmless_line(tmp_path):
    said = tmp_path / "stderr.txt"
    with Ranks(3, train_hostile, stderr=str(said)) as ranks:
        codes = ranks.wait(60.0)
    assert None not in codes
    assert 0 not in codes
    lines = [line for line in said.read_text().split("\n") if line.startswith("pipeplan:")]
    assert len(lines) == 1, said.read_text()
    assert lines[0].startswith(
        "pipeplan: rank 2 (stage 1 on `2) raised ValueError: ?[2J?]0;owned? "
    )
    assert is_harmless(lines[0])


@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_do_not_fit_are_refused_harmlessly(name):
    plan = make_plan(["0", "1"], [pp.Stage(layers=range(2), devices=(0, 1))], 1, 2)
    devices = tuple(pp.Device(name=f"{name}{i}", host=f"{name}{i}") for i in range(2))
    cluster = pp.Cluster(name="c", devices=devices, bandwidth_gb_per_s=((1.0, 1.0),) * 2)
    plan = pp.Plan(
        model=plan.model,
        cluster=cluster,
        microbatches=1,
        stages=plan.stages,
        schedule=plan.schedule,
        planner="test",
    )
    hosts = [f"{name}x", f"{name}y"]
    wrong = [
        [Place(host=host) for host in hosts],
        [Place(host=f"{name}0"), Place(host=f"{name}0")],
        [Place(host=host, device_name=f"{name}9") for host in hosts],
        [Place(host=host, device_name=f"{name}1") for host in hosts],
    ]
    for places in wrong:
        with pytest.raises(RuntimeMismatchError) as caught:
            place_ranks(plan, places, {})
        assert is_harmless(str(caught.value))
    here = [Place(host="here")] * 2
    assert all(map(is_harmless, place_ranks(plan, here, {}).rank_names(2)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_layers", [3, 12])
def test_layers_that_do_not_fit_are_refused_harmlessly(name, num_layers):
    model = nn.Sequential()
    for index in range(num_layers):
        model.add_module(f"{name}{index}", nn.Linear(2, 2))
    children = [f"{name}{index}" for index in range(num_layers)]
    holder = nn.Module()
    holder.add_module(name, model)
    for module, layers in (
        (model, children[1:]),
        (model, [*children[1:], "none"]),
        (model, [*children[:-1], f"{name} {name}"]),
        (holder, [name, f"{name}.{children[0]}"]),
        (holder, ["before", f"{name}.{children[0]}"]),
        (holder, [f"{name}.{children[0]}"]),
    ):
        with pytest.raises(RuntimeMismatchError) as caught:
            lay_out(module, layers)
        assert is_harmless(str(caught.value))
    assert is_harmless(cut(model, lay_out(model), range(2)).layers_text)


def test_a_traceback_is_harmless(capsys):
    try:
        Raising()(None)
    except ValueError as error:
        _print_traceback(error)
    lines = capsys.readouterr().err.split("\n")
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2] == "ValueError: ?[2J?]0;owned? ?the layer is out of order"
    assert all(map(is_harmless, lines))


@pytest.mark.parametrize(
    ("plan", "build"),
    [(f"{ESCAPE}.json", "a:b"), (str(HOSTILE), ESCAPE), (str(HOSTILE), f"{ESCAPE}:b")],
)
def test_run_refuses_in_one_harmless_line(plan, build):
    done = subprocess.run(
        [sys.executable, "-m", "pipeplan.run", plan, build],
        env={**os.environ, "RANK": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("pipeplan: ")
    assert done.stderr.count("\n") == 1
    assert is_harmless(done.stderr.rstrip("\n"))
