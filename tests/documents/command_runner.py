"""Runs commands in forked children, each with its own limits; JSON in, JSON out.

A separate program, so that a command that hangs, crashes or fills the memory hurts no test. Forked,
so that the imports are paid once.
"""

import json
import os
import signal
import sys
import tempfile
import time

LIMIT_S = 5.0


def run(arguments: list[str]) -> dict:
    """Exit code, outputs, processor seconds and peak memory of one command."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _be_the_command(arguments, out.fileno(), err.fileno())
        deadline = time.monotonic() + 4 * LIMIT_S  # other tests may run on the same processors
        while (ended := os.wait4(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        _, status, usage = ended
        out.seek(0)
        err.seek(0)
        return {
            "code": os.waitstatus_to_exitcode(status),
            "out": out.read().decode(errors="replace"),
            "err": err.read().decode(errors="replace"),
            "seconds": usage.ru_utime + usage.ru_stime,
            "megabytes": usage.ru_maxrss / 1e3,
        }


def _be_the_command(arguments: list[str], out: int, err: int) -> None:
    from pipeplan.cli import main
    from pipeplan.commands import progress

    progress.QUIET_S = 1000.0  # a busy machine makes quick commands slow, but not another output
    os.dup2(out, 1)
    os.dup2(err, 2)
    try:
        main(arguments)
    except SystemExit as done:
        sys.stdout.flush()
        os._exit(done.code if isinstance(done.code, int) else 1)
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(99)


if __name__ == "__main__":
    import pipeplan.checker
    import pipeplan.documents.files
    import pipeplan.planning.door
    import pipeplan.report.html
    import pipeplan.report.picture
    import pipeplan.report.terminal
    import pipeplan.report.trace  # noqa: F401

    json.dump([run(arguments) for arguments in json.load(sys.stdin)], sys.stdout)
