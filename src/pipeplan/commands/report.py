"""`pipeplan report`, `pipeplan trace` and `pipeplan plot`."""

import click

from pipeplan.commands.shared import warn

__all__ = ["plot_command", "report_command", "trace_command"]


@click.command("report")
@click.argument("plan", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="An .html.")
def report_command(plan: str, output: str) -> None:
    """Write PLAN as one HTML page that needs nothing else."""
    from pipeplan.documents.files import read_plan
    from pipeplan.report.html import write_report

    write_report(read_plan(plan), output, warn=warn)


@click.command("trace")
@click.argument("plan", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="A .json.")
def trace_command(plan: str, output: str) -> None:
    """Write PLAN's iteration as trace events for Perfetto or chrome://tracing."""
    from pipeplan.documents.files import read_plan
    from pipeplan.report.trace import write_trace

    write_trace(read_plan(plan), output, warn=warn)


@click.command("plot")
@click.argument("plan", type=click.Path())
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False), help="An .svg or a .png."
)
@click.option(
    "--width",
    default=1000,
    show_default=True,
    type=click.IntRange(300, 10_000),
    help="In pixels; a .png has two for each.",
)
def plot_command(plan: str, output: str, width: int) -> None:
    """Draw PLAN's timeline for a paper or a README."""
    from pipeplan.documents.files import read_plan
    from pipeplan.report.picture import plot

    plot(read_plan(plan), output, width, warn=warn)
