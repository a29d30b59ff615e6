"""The command line in the test's own process."""

from pipeplan.cli import main


def run_command(capfd, *arguments: object) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of `pipeplan ARGUMENTS`."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as done:
        out, err = capfd.readouterr()
        return done.code, out, err
