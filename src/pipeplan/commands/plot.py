"""`pipeplan plot`: a plan's timeline, or a chart of a sweep."""

from typing import Any

import click

from pipeplan.commands.paths import require_paths
from pipeplan.commands.progress import progress
from pipeplan.commands.shared import note, plan_from
from pipeplan.errors import InputError

__all__ = ["plot_command"]

CHART_OPTIONS = ("x", "y", "by", "where", "over", "mean", "log", "title", "height", "font_size")
PLAN_WIDTH = 1000


@click.command("plot")
@click.argument("plan", type=click.Path(), metavar="PLAN|RESULTS")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False),
    help="An .svg, .pdf or .png; - is an SVG on standard output.",
)
@click.option(
    "--width",
    type=click.IntRange(300, 10_000),
    help="In pixels; a .png has two for each.  [default: 1000, for a sweep 640]",
)
@click.option("--font", default="sans", show_default=True, help="sans, serif, mono; in .svg any.")
@click.option("--x", help="Of a sweep: a column, such as devices, microbatches or cluster.")
@click.option("--y", help="Of a sweep: a column, speedup (over a planner) or gap (to the bound).")
@click.option("--by", metavar="COLUMNS", help="What makes a line.  [default: planner]")
@click.option("--where", multiple=True, metavar="COLUMN=VALUE", help="Only these rows.")
@click.option("--over", metavar="PLANNER", help="For speedup.  [default: data-parallel]")
@click.option("--mean", is_flag=True, help="The geometric mean of rows at one place.")
@click.option("--log", type=click.Choice(["x", "y", "xy"]), help="Logarithmic axes.")
@click.option("--title", help="Above the chart.")
@click.option("--height", type=click.IntRange(150, 10_000), help="Of a sweep's chart: 400 pixels.")
@click.option("--font-size", type=click.FloatRange(5, 72), help="Of a sweep's chart: 12 pixels.")
def plot_command(plan: str, output: str, width: int | None, font: str, **chart: Any) -> None:
    """Draw PLAN's timeline, or a chart of a sweep's RESULTS (.csv), for a paper or a README."""
    from pipeplan.report.picture import plot, require_format
    from pipeplan.report.sweep_rows import is_table

    require_format(output)  # refuses other suffixes before anything is read
    require_paths(inputs={"PLAN": plan}, outputs={"-o": output})
    if is_table(plan):
        _plot_sweep(plan, output, font, {**chart, "width": width})
        return
    given = [name for name in CHART_OPTIONS if chart[name]]
    if given:
        option = given[0].replace("_", "-")
        raise InputError(f"--{option}: is for the results of a sweep (.csv), and {plan} is none")
    with progress("drawing"), plan_from(plan) as (read, warn):
        plot(read, output, width or PLAN_WIDTH, font=font, warn=warn)


def _plot_sweep(results: str, output: str, font: str, given: dict[str, Any]) -> None:
    from pipeplan.report.sweep_picture import plot_sweep
    from pipeplan.report.sweep_rows import parse_where

    for name in ("x", "y"):
        if not given[name]:
            raise InputError(f"--{name}: is missing; name a column of {results}, or --y speedup")
    options = {name: value for name, value in given.items() if value}
    options["where"] = parse_where(given["where"])
    if given["by"]:
        options["by"] = given["by"].split(",")
    with progress("drawing"):
        plot_sweep(results, output, font=font, warn=lambda line: note(f"note: {line}"), **options)
