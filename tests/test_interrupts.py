"""Ctrl-C: exit code 130 and one line, at any moment; what was found is kept, with a mark."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from command_line import run_command
from fifos import opened_once_read
from pipeplan import zoo
from pipeplan.checker import check
from pipeplan.cli import main
from pipeplan.commands import progress
from pipeplan.documents import files
from pipeplan.errors import PlanningInterrupted
from pipeplan.planning import door

COMMAND = (sys.executable, "-m", "pipeplan")
CONSOLE_SCRIPT = "import sys; from pipeplan.cli import main; sys.exit(main())"
QUICK_S = 2.0
"""Half a second is the aim; the machine may be busy with other tests."""

SENDER = """
import os, runpy, signal, sys

_, module, times, entry, *arguments = sys.argv

class Sender:
    '''Sends SIGINT when the module is about to be imported.'''

    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            for _ in range(int(times)):
                os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Sender())
sys.argv = ['pipeplan', *arguments]
if entry == "-m":
    runpy.run_module("pipeplan", run_name="__main__", alter_sys=True)
else:
    exec(entry)
"""


def default_sigint() -> None:
    """Whoever runs the tests in the background may have passed on that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*arguments: object, **options) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=default_sigint,
        start_new_session=True,
        **options,
    )


def interrupt(child: "subprocess.Popen[bytes]") -> tuple[int, bytes, bytes, float]:
    """SIGINT to all processes of the group, as a terminal does it; the rest of the outputs."""
    begin_s = time.monotonic()
    os.killpg(child.pid, signal.SIGINT)
    try:
        out, err = child.communicate(timeout=30)
    finally:
        child.kill()
    return child.returncode, out, err, time.monotonic() - begin_s


# ------------------------------------------------------------------------- while importing


@pytest.mark.parametrize("entry", ["-m", CONSOLE_SCRIPT], ids=["module", "script"])
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("click", ["zoo"]),
        ("pipeplan.commands.plan", ["--help"]),
        ("numpy", ["plan", "vgg19", "4x2-10g"]),
        ("numpy._core._multiarray_umath", ["compare", "vgg19", "4x2-10g"]),
        ("rich.table", ["demo", "-o", "DEMO"]),
    ],
)
def test_during_imports(tmp_path, entry, module, arguments):
    done = send_at(tmp_path, module, 1, entry, *arguments)
    assert (done.returncode, done.stdout) == (130, b"")
    assert done.stderr == b"pipeplan: interrupted\n"


def test_an_ignored_sigint_stays_ignored(tmp_path):
    command = [sys.executable, "-c", SENDER, "numpy", "1", "-m", "zoo", "vgg19"]
    done = subprocess.run(
        command,
        capture_output=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"{")


def send_at(folder: Path, module: str, times: int, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", SENDER, module, str(times), *arguments],
        capture_output=True,
        timeout=60,
        cwd=folder,
        preexec_fn=default_sigint,
    )


# -------------------------------------------------------------------------- while working


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "FIFO"],
        ["simulate", "FIFO"],
        ["report", "FIFO", "-o", "out.html"],
        ["trace", "FIFO", "-o", "out.json"],
        ["plot", "FIFO", "-o", "out.svg"],
        ["plan", "FIFO", "4x2-10g", "-o", "out.json"],
        ["compare", "vgg19", "FIFO", "--report", "out.html"],
        ["sweep", "FIFO", "-o", "out.csv"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_while_an_input_is_read(tmp_path, arguments):
    fifo = tmp_path / "FIFO"
    os.mkfifo(fifo)
    with start(*arguments, cwd=tmp_path) as child, opened_once_read(fifo, child):
        code, out, err, seconds = interrupt(child)
    assert (code, out, err) == (130, b"", b"pipeplan: interrupted\n")
    assert seconds < QUICK_S
    assert [path.name for path in tmp_path.iterdir()] == ["FIFO"]


def test_a_search_keeps_its_best_plan_with_a_mark(tmp_path):
    output = tmp_path / "p.json"
    large = ("plan", "bert-48", "8x8-100g", "-m", 256, "--effort", 1000, "-o", output)
    with start(*large) as child:
        line = b""
        while b"ms so far" not in line:  # there is a plan by now
            line = child.stderr.readline()
            assert line.startswith(b"pipeplan: planning"), line
        code, out, err, seconds = interrupt(child)
    assert (code, out) == (130, b"")
    assert seconds < QUICK_S
    said = err.splitlines()[-1].decode()
    assert (
        said == f"pipeplan: interrupted; the best plan so far is in {output}, marked as interrupted"
    )
    made = files.read_plan(output)
    assert made.options["interrupted"] is True
    assert check(made).ok


def test_the_exact_solver_stops_and_its_last_schedule_is_no_result(tmp_path):
    pytest.importorskip("ortools")
    output = tmp_path / "p.json"
    hard = ("plan", "bert-large", "4x2-10g", "--planner", "exact", "-m", 64, "-o", output)
    with start(*hard) as child:
        maps = Path(f"/proc/{child.pid}/maps")
        while "ortools" not in maps.read_text():
            time.sleep(0.01)
        time.sleep(1.5)  # in the solver, which works on this for several seconds
        code, out, err, seconds = interrupt(child)
    assert (code, out) == (130, b"")
    assert err.splitlines()[-1].startswith(b"pipeplan: interrupted")
    assert seconds < QUICK_S
    assert not output.exists() or files.read_plan(output).options["interrupted"] is True


def test_a_sweep_ends_its_workers_and_goes_on_later(tmp_path):
    pytest.importorskip("joblib")
    spec = tmp_path / "spec.json"
    spec.write_text(
        json.dumps(
            {
                "format": "pipeplan.sweep/1",
                "models": ["vgg19"],
                "clusters": ["4x2-10g", "random-8"],
                "microbatches": [8, 16],
                "planners": ["best"],
                "seeds": [0, 1],
            }
        )
    )
    journal = tmp_path / "r.csv.journal"
    with start("sweep", spec, "-o", tmp_path / "r.csv", "--jobs", 2) as child:
        while not journal.exists() or journal.read_bytes().count(b"\n") < 3:
            time.sleep(0.005)
        code, out, err, seconds = interrupt(child)
    assert (code, out) == (130, b"")
    assert seconds < QUICK_S
    *lines, last = err.decode().splitlines()
    assert last == "pipeplan: interrupted"
    assert all(re.fullmatch(r"pipeplan: planning, \d+ of 8 \(\d+ s\)", line) for line in lines)
    assert journal.read_bytes().endswith(b"\n")
    for name in ("r.csv", "whole.csv"):
        subprocess.run(
            [*COMMAND, "sweep", spec, "-o", tmp_path / name, "--jobs", "1"],
            check=True,
            capture_output=True,
            timeout=120,
        )
    assert (tmp_path / "r.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


# ------------------------------------------------------------------- in the same process


@pytest.fixture
def run(capfd, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_S", 1000.0)  # however busy the machine is

    def run(*arguments: object) -> tuple[int, str, str]:
        return run_command(capfd, *arguments)

    return run


@pytest.fixture
def interrupted_plan(monkeypatch):
    """Makes `plan` end as after Ctrl-C, with the plan that it gives."""
    made = door.plan(zoo.model("vgg19"), zoo.cluster("4x2-10g"), 2, "spp")
    made.options["interrupted"] = True

    def plan(*_, **__):
        raise PlanningInterrupted(made)

    monkeypatch.setattr(door, "plan", plan)
    return made


def test_without_an_output_nothing_is_printed(run, interrupted_plan):
    for options in ([], ["--json"]):
        assert run("plan", "vgg19", "4x2-10g", *options) == (130, "", "pipeplan: interrupted\n")


def test_a_report_is_not_written_of_what_was_interrupted(run, interrupted_plan, tmp_path):
    output, report = tmp_path / "p.json", tmp_path / "p.html"
    code, out, err = run("plan", "vgg19", "4x2-10g", "-o", output, "--report", report)
    assert (code, out) == (130, "")
    assert len(err.splitlines()) == 1
    assert files.read_plan(output) == interrupted_plan
    assert not report.exists()


def test_standard_output_gets_the_marked_plan(run, interrupted_plan):
    code, out, err = run("plan", "vgg19", "4x2-10g", "-o", "-")
    assert code == 130
    assert json.loads(out)["options"]["interrupted"] is True
    assert "interrupted" in err


def test_an_output_that_fails_is_said(run, interrupted_plan, tmp_path):
    code, out, err = run("plan", "vgg19", "4x2-10g", "-o", "/dev/full")
    assert (code, out) == (130, "")
    assert err == "pipeplan: interrupted; /dev/full: cannot be written: No space left on device\n"


def test_an_interrupt_in_disguise_is_one(run, monkeypatch):
    """Code in C may turn a KeyboardInterrupt into another exception."""

    def plan(*_, **__):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("numpy._core failed to import") from None

    monkeypatch.setattr(door, "plan", plan)
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert run("plan", "vgg19", "4x2-10g") == (130, "", "pipeplan: interrupted\n")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # as before
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_may_call_the_command_line(capfd):
    codes = []

    def call() -> None:
        try:
            main(["zoo", "vgg19"])
        except SystemExit as done:
            codes.append(done.code)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert codes == [0]
    assert capfd.readouterr().err == ""


def test_a_second_one_ends_the_process_at_once(tmp_path):
    script = (
        "import signal, time, pipeplan.planning.door as door\n"
        "def plan(*_, **__):\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    finally:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "        time.sleep(60)\n"
        "door.plan = plan\n"
        "import sys; from pipeplan.cli import main\n"
        "sys.argv = ['pipeplan', 'plan', 'vgg19', '4x2-10g']; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=30, preexec_fn=default_sigint
    )
    assert (done.returncode, done.stdout) == (130, b"")
    assert done.stderr == b"pipeplan: interrupted\n"
