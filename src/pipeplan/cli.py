"""The command line: parse, call the library, print. Results on stdout, all else on stderr."""

import sys
from typing import NoReturn

import click

from pipeplan.commands.judge import check_command, simulate_command
from pipeplan.commands.plan import demo_command, plan_command
from pipeplan.commands.shared import say
from pipeplan.commands.zoo import zoo_command
from pipeplan.errors import PipeplanError

__all__ = ["cli", "main"]

EXIT_INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line; errors take one line on stderr and set the exit code."""
    try:
        cli(standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except PipeplanError as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115 - for the interpreter's last flush
        sys.exit(0)
    except OSError as error:
        _fail(f"{error.filename or 'output'}: {error.strerror or error}", 2)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", EXIT_INTERRUPTED)
    sys.exit(0)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=False)
@click.version_option(package_name="pipeplan")
def cli() -> None:
    """Plan synchronous pipeline-parallel training.

    MODEL and CLUSTER are names from the zoo (`pipeplan zoo`) or files.
    """


for command in (check_command, demo_command, plan_command, simulate_command, zoo_command):
    cli.add_command(command)


def _fail(message: str, exit_code: int) -> NoReturn:
    say(" ".join(message.split()))
    sys.exit(exit_code)
