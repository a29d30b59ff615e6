"""`pipeplan report` and `pipeplan trace`."""

import click

from pipeplan.commands.paths import require_paths
from pipeplan.commands.progress import progress
from pipeplan.commands.shared import plan_from

__all__ = ["report_command", "trace_command"]


@click.command("report")
@click.argument("plan", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="An .html.")
def report_command(plan: str, output: str) -> None:
    """Write PLAN as one HTML page that needs nothing else."""
    require_paths(inputs={"PLAN": plan}, outputs={"-o": output})
    from pipeplan.report.html import write_report

    with progress("writing the report"), plan_from(plan) as (read, warn):
        write_report(read, output, warn=warn)


@click.command("trace")
@click.argument("plan", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="A .json.")
def trace_command(plan: str, output: str) -> None:
    """Write PLAN's iteration as trace events for Perfetto or chrome://tracing."""
    require_paths(inputs={"PLAN": plan}, outputs={"-o": output})
    from pipeplan.report.trace import write_trace

    with progress("writing the trace"), plan_from(plan) as (read, warn):
        write_trace(read, output, warn=warn)
