"""Progress: nothing for quick work, few plain lines in logs, one moving line on terminals."""

import os
import pty
import subprocess
import sys
import time

import pytest

from pipeplan.commands import progress as module
from pipeplan.commands.progress import progress


def test_quick_work_says_nothing(capfd):
    with progress("planning") as work:
        work.tell("at once")
    assert capfd.readouterr() == ("", "")


def test_plain_lines_come_ever_more_rarely(capfd, monkeypatch):
    monkeypatch.setattr(module, "QUIET_S", 0.05)
    with progress("planning") as work:
        work.tell("\x1b[31m[b]with[/b] x")
        work.count(1, 3)
        time.sleep(1.0)
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[0] == "pipeplan: planning: ?[31m[b]with[/b] x, 1 of 3 (0 s)"
    assert 2 <= len(lines) <= 6  # at 0.05 s, 0.1 s, 0.2 s, 0.4 s, 0.8 s


def test_nothing_is_said_once_the_work_is_done(capfd, monkeypatch):
    monkeypatch.setattr(module, "QUIET_S", 0.1)
    with pytest.raises(ValueError, match="wrong"), progress("planning"):
        raise ValueError("wrong")
    time.sleep(0.2)
    assert capfd.readouterr() == ("", "")


SCRIPT = """
import time
from pipeplan.commands import progress
progress.QUIET_S = 0.05
with progress.progress("planning") as work:
    work.tell("\\x1b[31m[b]with[/b] :cat:")
    work.count(1, 3)
    time.sleep(1.0)
print("result")
"""


def test_terminals_get_one_line_that_goes_away():
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # the other end is closed: the child has ended
        pass
    finally:
        os.close(ours)
    out, _ = child.communicate(timeout=30)
    assert (child.returncode, out) == (0, b"result\n")
    text = shown.decode()
    assert "planning: ?[31m[b]with[/b] :cat:" in text
    assert "1/3" in text
    assert "\x1b[31m[b]" not in text
    assert text.rstrip().endswith("\x1b[2K")  # the line is erased
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back
