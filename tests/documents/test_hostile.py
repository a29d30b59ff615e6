"""Small hostile files: each ends in one line and exit code 2, or in a right answer, at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HOSTILE = Path(__file__).parents[1] / "hostile"
RUNNER = Path(__file__).with_name("command_runner.py")
MAX_S = 2.0  # of processor time
MAX_MB = 1000

REFUSED_PLANS = {
    "nan_speed": "cluster.devices[0].speed: 1e-320 is below 0.001, the least that a speed",
    "overflow": "model.layers[0].forward_ms: 1.7e+308 is above 1e+12, the most that a time may be",
    "inf_bw": "model.layers[0].output_bytes: 1e+308 is above 1e+18, the most that a number of",
    "nan_shares": "stages[0].shares[0]: 1e+200 is above 1, the most that a share may be",
    "dup_device": "stages[0].devices: ",
    "shares_len": "stages[0].shares: has 2 for 1 devices",
    "uncovered": "stages: cover 1 of 2 layers",
    "nolinks": "'h0d0'",
    "path_inject": 'cluster.duplex: "a` - at `$.b" is none of full, half',
}
REFUSED_INPUTS = {
    ("m0", "slow"): "devices[0].speed: 1e-320 is below 0.001",
    ("m3", "bw1e308"): "bandwidth_gb_per_s[0][1]: 1e+308 is above 1e+09",
    ("m3", "bighosts"): "hosts[0].devices: a number of about 4,299 digits is above",
    ("m3", "path_inject"): 'duplex: "a` - at `$.b" is none of full, half',
}
COMMANDS = ("check", "simulate", "report", "trace", "plot")


def command(name: str, plan: Path, folder: Path) -> list[str]:
    """The command on a plan; outputs go to a folder."""
    outputs = {"report": "out.html", "trace": "out.json", "plot": "out.svg"}
    output = ["-o", str(folder / outputs[name])] if name in outputs else []
    return [name, str(plan), *output]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """What every command does with every file, by the words of the command."""
    folder = tmp_path_factory.mktemp("hostile")
    commands = {}
    for plan in [*REFUSED_PLANS, "hostile-names"]:
        for name in COMMANDS:
            commands[f"{name} {plan}"] = command(name, HOSTILE / f"{plan}.plan.json", folder)
    for model, cluster in [*REFUSED_INPUTS, ("relay", "relay")]:
        inputs = [str(HOSTILE / f"{model}.model.json"), str(HOSTILE / f"{cluster}.cluster.json")]
        commands[f"plan {model} {cluster}"] = ["plan", *inputs, "-m", "4", "--json"]
    done = subprocess.run(
        [sys.executable, str(RUNNER)],
        input=json.dumps(list(commands.values())),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(commands, json.loads(done.stdout), strict=True))


def test_every_hostile_file_is_tested():
    named = {f"{plan}.plan.json" for plan in [*REFUSED_PLANS, "hostile-names"]}
    for model, cluster in [*REFUSED_INPUTS, ("relay", "relay")]:
        named |= {f"{model}.model.json", f"{cluster}.cluster.json"}
    assert named == {path.name for path in HOSTILE.glob("*.json")}


def at_once(result: dict) -> None:
    assert result["seconds"] < MAX_S
    assert result["megabytes"] < MAX_MB


def refused(result: dict, message: str) -> None:
    at_once(result)
    assert result["code"] == 2, result
    assert result["out"] == ""
    assert len(result["err"].splitlines()) == 1, result["err"]
    assert len(result["err"]) < 700
    assert message in result["err"]


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("plan", REFUSED_PLANS)
def test_hostile_plans_are_refused(results, plan, name):
    refused(results[f"{name} {plan}"], REFUSED_PLANS[plan])


@pytest.mark.parametrize(("model", "cluster"), REFUSED_INPUTS)
def test_hostile_inputs_are_refused(results, model, cluster):
    refused(results[f"plan {model} {cluster}"], REFUSED_INPUTS[model, cluster])


@pytest.mark.parametrize("name", COMMANDS)
def test_hostile_names_stay_text(results, name):
    result = results[f"{name} hostile-names"]
    at_once(result)
    assert result["code"] == 0, result
    for character in "\x0b\x1b\u202e\u2066":
        assert character not in result["out"] + result["err"]


def test_a_stage_that_only_relays_is_within_the_bound(results):
    result = results["plan relay relay"]
    at_once(result)
    assert result["code"] == 0, result
    predicted = json.loads(result["out"])["predicted"]
    exists_ms = 46.495  # a plan in which a device without work relays takes 46.49
    assert predicted["lower_bound_ms"] <= exists_ms
