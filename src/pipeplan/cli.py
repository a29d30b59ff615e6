"""The command line: parse, call the library, print. Results on stdout, all else on stderr."""

import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from pipeplan.commands.compare import compare_command
from pipeplan.commands.judge import check_command, simulate_command
from pipeplan.commands.plan import demo_command, plan_command
from pipeplan.commands.report import plot_command, report_command, trace_command
from pipeplan.commands.shared import say
from pipeplan.commands.sweep import sweep_command
from pipeplan.commands.zoo import zoo_command
from pipeplan.errors import PipeplanError

__all__ = ["cli", "main"]

EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; errors take one line on stderr and set the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no "═" shows "?"
    try:
        given = sys.argv[1:] if arguments is None else arguments
        with cli.make_context("pipeplan", list(given)) as context:
            cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as done:  # --help and --version end this way
        sys.exit(done.exit_code)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "pipeplan"
        _fail(f"{error.format_message()} See {command} --help", error.exit_code)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except PipeplanError as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush
        sys.exit(0)
    except OSError as error:
        _fail(f"{error.filename or 'output'}: {error.strerror or error}", PipeplanError.exit_code)
    except MemoryError:
        _fail("out of memory; use a smaller model or cluster", PipeplanError.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", EXIT_INTERRUPTED)
    sys.exit(0)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=False)
@click.version_option(package_name="pipeplan")
def cli() -> None:
    """Plan synchronous pipeline-parallel training.

    MODEL and CLUSTER are names from the zoo (`pipeplan zoo`) or files.
    """


for command in (
    check_command,
    compare_command,
    demo_command,
    plan_command,
    plot_command,
    report_command,
    simulate_command,
    sweep_command,
    trace_command,
    zoo_command,
):
    cli.add_command(command)


def _fail(message: str, exit_code: int) -> NoReturn:
    say(message)
    sys.exit(exit_code)
