"""Completion in real shells, and the help texts: every example can be typed as it stands."""

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from pipeplan.commands import names
from pipeplan.commands.group import TABLE, commands
from pipeplan.group_schedules import GROUP_SCHEDULES
from pipeplan.interop.exporting import FORMATS
from pipeplan.planning.registry import PLANNERS
from pipeplan.schedules import SCHEDULES

PIPEPLAN = Path(sys.executable).with_name("pipeplan")


def test_names_are_those_of_the_registries():
    assert tuple(PLANNERS) == names.PLANNER_NAMES
    assert (*SCHEDULES, *GROUP_SCHEDULES) == names.SCHEDULE_NAMES
    assert set(names.EXPORT_FORMATS) == {*FORMATS, "chrome-trace"}


def answers(words: str) -> list[str]:
    """What completion offers for the last of these words."""
    environment = {
        **os.environ,
        "_PIPEPLAN_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = subprocess.run(
        [PIPEPLAN], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line[:5] == "plain"]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("pipeplan sim", ["simulate"]),
        ("pipeplan plan bert", ["bert-large", "bert-48"]),
        ("pipeplan plan bert-large 4x2-1", ["4x2-10g", "4x2-100g"]),
        ("pipeplan plan a b --planner da", ["data-parallel", "dapple"]),
        ("pipeplan plan a b --schedule eag", ["eager-1f1b"]),
        ("pipeplan compare a b --planners best,sp", ["best,spp"]),
        ("pipeplan export x --to mega", ["megatron"]),
        ("pipeplan zoo random", ["random-8"]),
        ("pipeplan plan a b --ignore", ["--ignore-memory"]),
    ],
)
def test_offers(words, offered):
    assert set(offered) <= set(answers(words))
    assert all(name.startswith(words.split(" ")[-1]) for name in answers(words))


def typed(shell: list[str], set_up: list[str], keys: str, expected: str, folder: Path) -> str:
    """What an interactive shell shows after `set_up` and these keys, until `expected` is there."""
    environment = {
        "PATH": f"{PIPEPLAN.parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TERM": "dumb",
        "PS1": "ready> ",
    }
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(shell[0], shell, environment)  # noqa: S606  # the shell is what is tested
    shown = ""
    try:
        os.write(terminal, "".join(f"{line}\n" for line in [*set_up, "echo be''gin"]).encode())
        shown = _read_until(terminal, "begin\r\n")
        os.write(terminal, keys.encode())
        return shown + _read_until(terminal, expected)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(terminal)


def _read_until(terminal: int, expected: str, timeout_s: float = 60.0) -> str:
    shown, end = "", time.monotonic() + timeout_s
    while expected not in shown.rpartition("begin\r\n")[2] and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                shown += os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # the shell has ended
                break
        if expected == "begin\r\n" and expected in shown:
            break
    return shown


SHELLS = {
    "bash": (
        ["bash", "--norc", "--noprofile", "-i"],
        ['eval "$(pipeplan completion bash)"'],
    ),
    "zsh": (
        ["zsh", "-f", "-i"],
        [
            "unsetopt zle_bracketed_paste prompt_cr prompt_sp 2>/dev/null",
            "autoload -Uz compinit && compinit -u -d ./zcompdump",
            'eval "$(pipeplan completion zsh)"',
        ],
    ),
}


@pytest.mark.parametrize("name", SHELLS)
@pytest.mark.parametrize(
    ("keys", "expected"),
    [("pipeplan simu\t", "simulate"), ("pipeplan plan llava\t", "llava-7b")],
)
def test_a_real_shell_completes(name, keys, expected, tmp_path):
    if shutil.which(name) is None:
        pytest.skip(f"no {name} here")
    shell, set_up = SHELLS[name]
    shown = typed(shell, [f"cd {shlex.quote(str(tmp_path))}", *set_up], keys, expected, tmp_path)
    assert expected in shown, shown


def test_fish_knows_the_script(tmp_path):
    if shutil.which("fish") is None:
        pytest.skip("no fish here")
    lines = 'pipeplan completion fish | source; complete -C "pipeplan simu"'
    done = subprocess.run(
        ["fish", "-c", lines],
        env={"PATH": f"{PIPEPLAN.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split()[:1] == ["simulate"]


def test_every_command_has_a_summary_and_an_example():
    assert {command.name for command, _, _ in TABLE} == set(commands.commands)
    for command, summary, examples in TABLE:
        assert 10 < len(summary) <= 55, "longer ones are cut off at 80 columns"
        assert examples
        help_text = command.get_help(click.Context(command, info_name=command.name))
        assert all(f"pipeplan {example}" in help_text for example in examples)


@pytest.mark.parametrize(
    ("command", "example"),
    [(command, example) for command, _, examples in TABLE for example in examples],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_examples_can_be_typed(command, example):
    first, *arguments = shlex.split(example, comments=True)
    assert first == command.name
    until = next((n for n, word in enumerate(arguments) if word.startswith(">")), None)
    command.make_context(first, arguments[:until])  # raises on an unknown option or a missing one


def test_help_lists_the_choices():
    plan = commands.commands["plan"]
    text = " ".join(plan.get_help(click.Context(plan, info_name="plan")).split())
    for name in (*names.PLANNER_NAMES, *names.SCHEDULE_NAMES):
        assert name in text.replace("- ", "-")
