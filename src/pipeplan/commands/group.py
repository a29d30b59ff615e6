"""All commands under one name: `pipeplan COMMAND ...`."""

import click

from pipeplan.commands.compare import compare_command
from pipeplan.commands.export import export_command
from pipeplan.commands.export_checkpoint import export_checkpoint_command
from pipeplan.commands.import_files import import_command
from pipeplan.commands.judge import check_command, simulate_command
from pipeplan.commands.plan import demo_command, plan_command
from pipeplan.commands.report import plot_command, report_command, trace_command
from pipeplan.commands.sweep import sweep_command
from pipeplan.commands.testbed import testbed_command
from pipeplan.commands.whatif import whatif_command
from pipeplan.commands.zoo import zoo_command

__all__ = ["commands"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=False)
@click.version_option(package_name="pipeplan")
def commands() -> None:
    """Plan synchronous pipeline-parallel training.

    MODEL and CLUSTER are names from the zoo (`pipeplan zoo`) or files. The file `-` is standard
    input or, as an output, standard output.
    """


for command in (
    check_command,
    compare_command,
    demo_command,
    export_command,
    export_checkpoint_command,
    import_command,
    plan_command,
    plot_command,
    report_command,
    simulate_command,
    sweep_command,
    testbed_command,
    trace_command,
    whatif_command,
    zoo_command,
):
    commands.add_command(command)
