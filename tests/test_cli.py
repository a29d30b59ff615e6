"""The command line: results on stdout, one line on stderr and an exit code where it fails."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command_line import run_command
from fifos import opened_once_read
from pipeplan import zoo
from pipeplan.checker import check
from pipeplan.commands import progress
from pipeplan.documents import files
from pipeplan.documents.syntax import to_json
from pipeplan.errors import InfeasibleError
from pipeplan.planning.door import plan
from pipeplan.replaying import simulate

PLAN = ("plan", "bert-large", "4x2-10g")
BAD_NAME = "\x1b[1m\x9b2J[b]x\n:cat:\u202e"
COMMAND = (sys.executable, "-c", "import pipeplan.cli; pipeplan.cli.main()")
LAYER = {"forward_ms": 1, "backward_ms": 2, "output_bytes": 0, "parameter_bytes": 0}


@pytest.fixture
def run(capfd, monkeypatch):
    """Runs the command line in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(progress, "QUIET_S", 1000.0)  # however busy the machine is

    def run(*arguments: object) -> tuple[int, str, str]:
        return run_command(capfd, *arguments)

    return run


@pytest.fixture
def plan_file(tmp_path) -> Path:
    made = plan(zoo.model("bert-large"), zoo.cluster("4x2-10g"), microbatches=5, planner="spp")
    files.write_plan(made, tmp_path / "bert.plan.json")
    return tmp_path / "bert.plan.json"


def process(*arguments: object, **options) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, timeout=60, **options)


def fails(result: tuple[int, str, str], exit_code: int, *parts: str) -> None:
    code, out, err = result
    assert code == exit_code
    assert out == ""
    assert err.startswith("pipeplan: ")
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1, err
    for part in parts:
        assert part in err, err


# ------------------------------------------------------------------------------- plan


def test_plan_shows_the_plan(run):
    code, out, err = run(*PLAN, "-m", 8, "--quiet")
    assert code == 0
    assert err == ""
    assert "bert-large on 4x2-10g: 8 microbatches of 4" in out
    assert "group 0" in out
    _, out, _ = run(*PLAN, "-m", 8, "--quiet", "--positions", 1, "--no-split-backward")
    assert "stage 0" in out


def test_plan_as_json_is_the_plan_of_the_library(run):
    code, out, err = run(*PLAN, "-m", 8, "--json", "--planner", "spp")
    made = plan(zoo.model("bert-large"), zoo.cluster("4x2-10g"), microbatches=8, planner="spp")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(to_json(files.plan_document(made)))


def test_plan_writes_what_the_library_writes(run, tmp_path):
    inputs = zoo.model("bert-large"), zoo.cluster("random-8", seed=3)
    files.write_plan(plan(*inputs, planner="spp", seed=3), tmp_path / "library.json")
    options = ("--planner", "spp", "--seed", 3, "-o", tmp_path / "cli.json")
    assert run("plan", "bert-large", "random-8", *options)[0] == 0
    assert (tmp_path / "cli.json").read_bytes() == (tmp_path / "library.json").read_bytes()


def test_plan_takes_files(run, tmp_path):
    files.write_model(zoo.model("vgg19"), tmp_path / "m.json")
    cluster = tmp_path / "c.yaml"
    cluster.write_text(
        "format: pipeplan.cluster/1\nname: short\n"
        "hosts: [{count: 2, devices: 2, bandwidth_gb_per_s: 12}]\nbetween_hosts_gb_per_s: 1.25\n"
    )
    code, out, _ = run("plan", tmp_path / "m.json", cluster, "--json")
    assert code == 0
    assert json.loads(out)["cluster"]["hosts"][0]["count"] == 2


def test_the_same_command_gives_the_same_bytes(run, tmp_path):
    for arguments in ([*PLAN, "--json"], [*PLAN], ["zoo"], ["zoo", "random-8", "--seed", 2]):
        assert run(*arguments) == run(*arguments)
    for name in ("a.json", "b.json"):
        run(*PLAN, "-o", tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_seeds_have_64_bits(run):
    command = ("plan", "vgg19", "random-8", "-m", 2, "--planner", "spp", "--json", "--seed")
    code, out, err = run(*command, 2**64 - 1)
    assert (code, err) == (0, "")
    assert json.loads(out)["seed"] == 2**64 - 1
    assert out != run(*command, 2**63)[1]


# ------------------------------------------------------------------ simulate and check


def test_simulate_shows_the_timeline(run, plan_file):
    code, out, err = run("simulate", plan_file)
    assert (code, err) == (0, "")
    assert "F0─ forward" in out
    code, out, err = run("simulate", plan_file, "--json")
    assert (code, err) == (0, "")
    expected = files.timeline_document(simulate(files.read_plan(plan_file)))
    assert json.loads(out) == json.loads(to_json(expected))


def test_check_says_valid(run, plan_file):
    assert run("check", plan_file) == (0, f"{plan_file}: valid\n", "")
    code, out, err = run("check", plan_file, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"ok": True, "errors": [], "warnings": []}


def test_check_refuses_a_wrong_plan_in_one_line(run, plan_file):
    document = json.loads(plan_file.read_text())
    document["schedule"][0].reverse()
    plan_file.write_text(json.dumps(document))
    fails(run("check", plan_file), 2, f"{plan_file}: schedule[0]: ", "(and 4 more; --json lists")
    code, out, err = run("check", plan_file, "--json")
    verdict = check(files.read_plan(plan_file))
    assert code == 2
    assert json.loads(out) == {"ok": False, "errors": list(verdict.errors), "warnings": []}
    assert len(err.splitlines()) == 1


def test_too_much_memory_is_a_warning_unless_strict(run, plan_file):
    document = json.loads(plan_file.read_text())
    document["cluster"] = {
        "format": "pipeplan.cluster/1",
        "name": "tight",
        "hosts": [{"count": 4, "devices": 2, "bandwidth_gb_per_s": 12, "memory_gb": 1}],
        "between_hosts_gb_per_s": 1.25,
        "latency_us": 0,
    }
    del document["predicted"]
    plan_file.write_text(json.dumps(document))
    code, out, err = run("check", plan_file)
    assert (code, out) == (0, f"{plan_file}: valid\n")
    assert all(line.startswith("pipeplan: warning: stage ") for line in err.splitlines())
    fails(run("check", plan_file, "--strict-memory"), 2, "GB on 'h0d0' (1 GB)")


def test_a_deadlock_is_one_line(run, plan_file):
    document = json.loads(plan_file.read_text())
    order = document["schedule"][0]
    order.sort(key=lambda block: (int(block[1:]), block[0] == "B"))
    document["schedule"][1].sort(key=lambda block: (block[0] == "B", -int(block[1:])))
    plan_file.write_text(json.dumps(document))
    fails(run("simulate", plan_file), 2, "schedule: deadlocks")
    fails(run("simulate", plan_file, "--json"), 2, "schedule: deadlocks")


def test_stale_figures_are_replaced_with_a_warning(run, plan_file, tmp_path):
    shown, timeline = run("simulate", plan_file)[1], run("simulate", plan_file, "--json")[1]
    run("report", plan_file, "-o", tmp_path / "right.html")
    document = json.loads(plan_file.read_text())
    document["predicted"]["iteration_ms"] *= 2
    plan_file.write_text(json.dumps(document))
    fails(run("check", plan_file), 2, "predicted.iteration_ms")
    for command in (
        ["simulate", plan_file],
        ["simulate", plan_file, "--json"],
        ["report", plan_file, "-o", tmp_path / "r.html"],
        ["trace", plan_file, "-o", tmp_path / "r.json"],
        ["plot", plan_file, "-o", tmp_path / "r.svg"],
    ):
        code, out, err = run(*command)
        assert code == 0
        assert err.startswith(f"pipeplan: warning: {plan_file}: predicted.iteration_ms")
        assert len(err.splitlines()) == 1
        assert out in (shown, timeline, "")
    figures = re.compile('<div class="value">(.*?)</div>')
    stale, right = (figures.findall((tmp_path / n).read_text()) for n in ("r.html", "right.html"))
    assert stale == right != []


@pytest.mark.parametrize("command", ["simulate", "report", "trace", "plot"])
def test_what_check_refuses_is_not_shown(run, plan_file, tmp_path, command):
    document = json.loads(plan_file.read_text())
    document["stages"][1]["devices"] = document["stages"][0]["devices"]
    plan_file.write_text(json.dumps(document))
    refused = run("check", plan_file)
    fails(refused, 2, f"{plan_file}: stages[1].devices")
    output = [] if command == "simulate" else ["-o", tmp_path / "r.svg"]
    result = run(command, plan_file, *output)
    fails(result, 2, f"{plan_file}: stages[1].devices")
    assert not (tmp_path / "r.svg").exists()


# ---------------------------------------------------------------------------- the zoo


def test_zoo_lists_everything(run):
    code, out, err = run("zoo")
    assert (code, err) == (0, "")
    for name in (*zoo.MODEL_NAMES, *zoo.CLUSTER_NAMES):
        assert re.search(f"^{name} ", out, re.MULTILINE)
    code, out, err = run("zoo", "--json")
    listing = json.loads(out)
    assert [model["name"] for model in listing["models"]] == list(zoo.MODEL_NAMES)
    assert [cluster["name"] for cluster in listing["clusters"]] == list(zoo.CLUSTER_NAMES)


def test_zoo_writes_inputs(run, tmp_path):
    path = tmp_path / "m.json"
    settings = ("--device", "A100", "--microbatch-size", 2, "--precision", "bf16")
    assert run("zoo", "bert-large", *settings, "--sequence-length", 128, "-o", path)[0] == 0
    assert files.read_model(path) == zoo.model(
        "bert-large", device="A100", microbatch_size=2, precision="bf16", sequence_length=128
    )
    assert run("zoo", "random-8", "--seed", 4, "-o", path)[0] == 0
    assert files.read_cluster(path) == zoo.cluster("random-8", seed=4)
    _, out, _ = run("zoo", "random-8", "--seed", 4)
    assert json.loads(out) == json.loads(path.read_text())


def test_demo_ends_well(run, tmp_path):
    code, out, err = run("demo", "-o", str(tmp_path))
    assert (code, err) == (0, "")
    assert "The checker says: valid" in out
    assert (tmp_path / "bert.html").read_text().startswith("<!DOCTYPE html>")


def test_the_python_of_the_readme_runs(tmp_path):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    # The second one, `auto`, needs ranks: tests/measure/test_measuring_page.py runs its like.
    example, _ = re.findall("```python\n(.*?)```", readme, re.DOTALL)
    subprocess.run([sys.executable, "-c", example], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "bert.html").read_text().startswith("<!DOCTYPE html>")


# ----------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["Missing command"]),
        (["plam"], ["'plam'", "See pipeplan --help"]),
        (["plan"], ["MODEL", "See pipeplan plan --help"]),
        ([*PLAN, "--fast"], ["--fast"]),
        ([*PLAN, "--microbatchs", "4"], ["Did you mean '--microbatches'?"]),
        ([*PLAN, "-m", "0"], ["microbatches: 0"]),
        ([*PLAN, "-m", "-1"], ["microbatches: -1"]),
        ([*PLAN, "-m", "many"], ["'many'"]),
        ([*PLAN, "-m", "9" * 30], ["is above 65536"]),
        ([*PLAN, "-m", "nan"], ["'nan'"]),
        ([*PLAN, "-m", "65537"], ["microbatches: 65537 is above 65536"]),
        *(([*PLAN, "--effort", number], ["effort: "]) for number in ("nan", "inf", "-1", "1e9")),
        *(
            ([*PLAN, "--time-limit", number], ["time_limit_s: "])
            for number in ("nan", "inf", "-1", "0", "1e999")
        ),
        *(
            ([command, *names, "--seed", seed], ["'--seed'"])
            for command, *names in (PLAN, ("compare", *PLAN[1:]), ("zoo", "random-8"))
            for seed in ("-1", str(2**64), "1.5", "nan")
        ),
        (["compare", *PLAN[1:], "--effort", "nan"], ["effort: nan"]),
        (["compare", *PLAN[1:], "-m", "0"], ["microbatches: 0"]),
        ([*PLAN, "--planner", "sp"], ["planner: 'sp' is not known"]),
        (["plan", "bert-larg", "4x2-10g"], ["did you mean 'bert-large'?"]),
        (["plan", "bert-large", "4x2-10"], ["did you mean '4x2-10g'?"]),
        (["plan", "x" * 5000, "4x2-10g"], []),
        (["plan", ".", "4x2-10g"], ["Is a directory"]),
        (["simulate", "nothing.json"], ["nothing.json: cannot be read: No such file"]),
        (["check", "nothing\x1b[31m.json"], ["nothing?[31m.json: cannot be read"]),
        (["zoo", "bert-larg"], ["did you mean 'bert-large'?"]),
        (["zoo", "4x2-10"], ["did you mean '4x2-10g'?"]),
        (["zoo", "-o", "x"], ["output: needs the NAME"]),
        (["zoo", "--device", "V100"], ["device: does not apply"]),
        (["zoo", "4x2-10g", "--precision", "fp16"], ["precision: does not apply to a cluster"]),
        (["zoo", "vgg19", "--sequence-length", "5"], ["sequence_length: 5 does not apply"]),
        (["zoo", "bert-large", "--device", "V10"], ["device: 'V10' is not known"]),
        (["zoo", "bert-large", "-o", "/nowhere/x"], ["/nowhere/x: cannot be written: No such"]),
        (["zoo", "bert-large", "-o", "/"], ["directory"]),
        ([*PLAN, "-o", "/nowhere/x"], ["/nowhere/x: cannot be written: No such file"]),
        (["zoo", "bert-large", "-o", "/dev/full"], ["/dev/full: cannot be written: No space"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_wrong_arguments_are_one_line(run, arguments, parts):
    fails(run(*arguments), 2, *parts)


@pytest.mark.parametrize("number", ["NaN", "-1", "1e999", '"1"', "null", "[" * 100_000])
def test_wrong_files_are_one_line(run, tmp_path, number):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(files.model_document(zoo.model("vgg19"))).replace("0.0", number, 1))
    for command in (["plan", path, "4x2-10g"], ["simulate", path], ["check", path]):
        fails(run(*command), 2, f"{path}: ")


def test_infeasible_plans_exit_with_3(run, tmp_path):
    path = tmp_path / "m.json"
    layer = {**LAYER, "name": "huge", "parameter_bytes": 1e15}
    path.write_text(
        json.dumps(
            {"format": "pipeplan.model/1", "name": "m", "microbatch_size": 1, "layers": [layer]}
        )
    )
    fails(run("plan", path, "4x2-10g"), InfeasibleError.exit_code, "'huge'", "1e+06 GB")
    assert InfeasibleError.exit_code == 3


# ------------------------------------------------------------------------ the terminal


def named_badly(tmp_path) -> tuple[Path, Path]:
    model, cluster = tmp_path / "m.json", tmp_path / "c.json"
    layers = [{**LAYER, "name": f"{BAD_NAME}{index}"} for index in range(3)]
    devices = [{"name": f"{BAD_NAME}{index}"} for index in range(2)]
    model.write_text(
        json.dumps(
            {
                "format": "pipeplan.model/1",
                "name": BAD_NAME,
                "microbatch_size": 1,
                "layers": layers,
            }
        )
    )
    cluster.write_text(
        json.dumps(
            {
                "format": "pipeplan.cluster/1",
                "name": BAD_NAME,
                "devices": devices,
                "bandwidth_gb_per_s": [[0, 1], [1, 0]],
            }
        )
    )
    return model, cluster


def assert_harmless(text: str) -> None:
    assert all(c == "\n" or c.isprintable() for c in text), repr(text)


def test_names_cannot_command_the_terminal(run, tmp_path):
    model, cluster = named_badly(tmp_path)
    code, out, err = run("plan", model, cluster, "-o", tmp_path / "p.json")
    assert (code, err) == (0, "")
    assert_harmless(out)
    assert "?[1m?2J[b]x?:cat:?" in out
    for command in (["plan", model, cluster, "--json"], ["simulate", tmp_path / "p.json"]):
        code, out, _ = run(*command)
        assert code == 0
        assert_harmless(out)
    assert json.loads(run("plan", model, cluster, "--json")[1])["model"]["name"] == BAD_NAME


def test_names_in_errors_cannot_command_the_terminal(run, tmp_path):
    model, cluster = named_badly(tmp_path)
    document = json.loads(cluster.read_text())
    document["devices"][1] = document["devices"][0]
    cluster.write_text(json.dumps(document))
    result = run("plan", model, cluster)
    fails(result, 2, "devices[1].name")
    assert_harmless(result[2])
    document["devices"][1] = {"name": "b", BAD_NAME: 1}
    cluster.write_text(json.dumps(document))
    result = run("plan", model, cluster)
    fails(result, 2, "is no known field")
    assert_harmless(result[2])


@pytest.mark.parametrize("command", [PLAN, ("zoo",), ("demo",), ("plan", "llama-70b", "8x8-100g")])
def test_output_fits_80_columns_without_colour(run, command):
    code, out, _ = run(*command)
    assert code == 0
    assert "\x1b" not in out
    assert max(len(line) for line in out.splitlines()) <= 80


@pytest.mark.parametrize(
    ("columns", "width"),
    [("40", 40), ("20", 40), ("1", 40), ("0", 40), ("300", 300), ("99999999", 1000), ("²", 80)],
)
def test_any_width_works(run, monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    for command in (PLAN, ("zoo",), ("demo",)):
        code, out, err = run(*command)
        assert (code, err) == (0, "")
        assert 20 < max(len(line) for line in out.splitlines()) <= max(width, 80)


@pytest.mark.parametrize("command", [("check", "p.json"), ("plan", "vgg19", "4x2-10g")])
def test_a_closed_standard_output_is_one_line(command):
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *command],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    fails((done.returncode, "", done.stderr), 2, "standard output: is closed")


def test_a_terminal_without_unicode_gets_what_it_can_show():
    result = process(
        "demo", "--quiet", env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    )
    assert result.returncode == 0
    assert result.stderr == b""
    assert b"group 0 F" in result.stdout
    result.stdout.decode("ascii")


# -------------------------------------------------------------------- as a real process


def test_help_and_version_as_a_process():
    result = process("--help")
    assert (result.returncode, result.stderr) == (0, b"")
    for command in (b"check", b"demo", b"plan", b"simulate", b"zoo"):
        assert b"\n  " + command in result.stdout
    assert process("--version").stdout.startswith(b"pipeplan, version ")


def test_errors_as_a_process():
    result = process("plan", "bert-larg", "4x2-10g")
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.count(b"\n") == 1


@pytest.mark.parametrize("command", ["demo --quiet", "zoo", "zoo llama-70b", "--help"])
def test_a_reader_that_leaves_is_no_error(command):
    script = f"set -o pipefail; {shlex.join(COMMAND)} {command} | head -1"
    result = subprocess.run(["bash", "-c", script], capture_output=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.count(b"\n") == 1


def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        result = subprocess.run([*COMMAND, "zoo"], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert result.returncode == 2
    assert result.stderr == b"pipeplan: output: No space left on device\n"


def test_control_c_is_one_line(tmp_path):
    fifo = tmp_path / "plan.json"
    os.mkfifo(fifo)
    with subprocess.Popen(
        [*COMMAND, "check", fifo],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Whoever runs the tests in the background may have passed on that SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as child:
        try:
            with opened_once_read(fifo, child):  # so it is inside the command by now
                time.sleep(0.1)
                child.send_signal(signal.SIGINT)
                out, err = child.communicate(timeout=30)
        finally:
            child.kill()
    assert (child.returncode, out) == (130, b"")
    assert err == b"pipeplan: interrupted\n"
