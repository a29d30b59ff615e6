"""The command line: parse, call the library, print. Results on stdout, all else on stderr.

Nothing large is imported at the top: Ctrl-C is answered with one line
from the first line of `main` on, also while click or numpy is still being imported.
"""

import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pipeplan.commands.interrupting import EXIT_INTERRUPTED, Interrupts

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; errors take one line on stderr and set the exit code.

    With `arguments`, another program calls this: its answer to Ctrl-C is restored at the end.
    """
    interrupts = Interrupts()
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments, interrupts)
    finally:
        if arguments is not None:
            interrupts.uninstall()
    interrupts.exit_code = code  # all is written; Ctrl-C while Python cleans up changes nothing
    if code == EXIT_INTERRUPTED and arguments is None:
        _exit_at_once(code)
    sys.exit(code)


def _exit_at_once(code: int) -> NoReturn:
    """End the process though threads may be busy: Python would wait for them, or crash."""
    import atexit

    atexit._run_exitfuncs()  # what other packages leave on disk is removed by these
    if sys.stdout is not None:
        sys.stdout.flush()
    os._exit(code)


def _run(arguments: Sequence[str], interrupts: Interrupts) -> int:
    """Run the command and return the exit code; after Ctrl-C it is 130, whatever comes out."""
    try:
        code = _invoke(arguments)
        return EXIT_INTERRUPTED if interrupts.seen and code else code
    except KeyboardInterrupt as stop:
        message = str(stop) or "interrupted"
    except Exception:
        if not interrupts.seen:
            raise
        message = "interrupted"
    from pipeplan.commands.shared import say

    say(message)
    return EXIT_INTERRUPTED


def _invoke(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no "═" shows "?"
    import click

    from pipeplan.commands.completion import answer_completion
    from pipeplan.commands.group import commands
    from pipeplan.commands.shared import say
    from pipeplan.errors import PipeplanError

    if sys.stdout is None:  # closed by whoever started the process
        say("standard output: is closed; send it to a file or to /dev/null")
        return PipeplanError.exit_code
    completed = answer_completion(commands)
    if completed is not None:
        return completed
    try:
        with commands.make_context("pipeplan", list(arguments)) as context:
            commands.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as done:  # --help and --version end this way
        return done.exit_code
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "pipeplan"
        say(f"{error.format_message()} See {command} --help")
        return error.exit_code
    except click.ClickException as error:
        say(error.format_message())
        return error.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
    except PipeplanError as error:
        say(str(error))
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush
        return 0
    except OSError as error:
        say(f"{error.filename or 'output'}: {error.strerror or error}")
    except MemoryError:
        say("out of memory; use a smaller model or cluster")
    return PipeplanError.exit_code
