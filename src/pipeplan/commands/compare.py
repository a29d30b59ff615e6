"""`pipeplan compare`."""

from typing import TYPE_CHECKING, Unpack

import click

from pipeplan.commands.completion import complete_cluster, complete_model, complete_planners
from pipeplan.commands.paths import is_stdout, require_paths
from pipeplan.commands.planning_options import planning_options
from pipeplan.commands.progress import progress
from pipeplan.commands.shared import SEED, print_json, print_rich, read_inputs
from pipeplan.errors import InfeasibleError

if TYPE_CHECKING:
    from pipeplan.planning.options import OptionArguments

__all__ = ["compare_command"]


@click.command("compare")
@click.argument("model", shell_complete=complete_model)
@click.argument("cluster", shell_complete=complete_cluster)
@click.option("-m", "--microbatches", default=16, show_default=True, help="Per iteration.")
@click.option(
    "--planners",
    shell_complete=complete_planners,
    help="Names with commas between; by default all but exact.",
)
@planning_options
@click.option(
    "--seed", type=SEED, default=0, show_default=True, help="For random choices and clusters."
)
@click.option("--report", type=click.Path(dir_okay=False), help="Write an HTML report here.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def compare_command(
    model: str,
    cluster: str,
    microbatches: int,
    planners: str | None,
    seed: int,
    report: str | None,
    as_json: bool,
    **options: Unpack["OptionArguments"],
) -> None:
    """Plan MODEL on CLUSTER with every planner and show them side by side."""
    from pipeplan.planning.inputs import input_files

    require_paths(inputs=input_files(model, cluster), outputs={"--report": report}, as_json=as_json)
    from pipeplan.planning.comparison import compare

    names = None if planners is None else [n.strip() for n in planners.split(",") if n.strip()]
    with progress("planning") as work:
        comparison = compare(
            *read_inputs(model, cluster, seed),
            microbatches,
            names,
            **options,
            seed=seed,
            on_start=lambda name: work.tell(f"with {name}"),
        )
        if report:
            from pipeplan.report.comparison import fastest_two
            from pipeplan.report.html import write_report

            if comparison.fastest is None:
                raise InfeasibleError("no planner made a plan, so there is nothing to report")
            work.tell("writing the report")
            write_report(
                comparison.fastest,
                report,
                comparison=comparison.document()["rows"],
                beside=fastest_two(comparison),
                others=comparison.plans,
            )
    if as_json:
        print_json(comparison.document())
    elif not is_stdout(report):
        from pipeplan.report.comparison import render_comparison

        print_rich(lambda console: render_comparison(comparison, console))
