"""`pipeplan compare`."""

import click

from pipeplan.commands.paths import is_stdout, require_paths
from pipeplan.commands.progress import progress
from pipeplan.commands.shared import SEED, print_json, print_rich
from pipeplan.errors import InfeasibleError

__all__ = ["compare_command"]


@click.command("compare")
@click.argument("model")
@click.argument("cluster")
@click.option("-m", "--microbatches", default=16, show_default=True, help="Per iteration.")
@click.option("--planners", help="Names with commas between; by default all but exact.")
@click.option("--runnable", is_flag=True, help="No more replicas than a microbatch has samples.")
@click.option(
    "--seed", type=SEED, default=0, show_default=True, help="For random choices and clusters."
)
@click.option("--effort", default=1.0, show_default=True, help="Search more, or less.")
@click.option("--report", type=click.Path(dir_okay=False), help="Write an HTML report here.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def compare_command(
    model: str,
    cluster: str,
    microbatches: int,
    planners: str | None,
    runnable: bool,
    seed: int,
    effort: float,
    report: str | None,
    as_json: bool,
) -> None:
    """Plan MODEL on CLUSTER with every planner and show them side by side."""
    from pipeplan.planning.inputs import input_files, resolve_cluster, resolve_model

    require_paths(inputs=input_files(model, cluster), outputs={"--report": report}, as_json=as_json)
    from pipeplan.planning.comparison import compare

    names = None if planners is None else [n.strip() for n in planners.split(",") if n.strip()]
    with progress("planning") as work:
        comparison = compare(
            resolve_model(model),
            resolve_cluster(cluster, seed),
            microbatches,
            names,
            runnable=runnable,
            seed=seed,
            effort=effort,
            on_start=lambda name: work.tell(f"with {name}"),
        )
        if report:
            from pipeplan.report.html import write_report

            if comparison.fastest is None:
                raise InfeasibleError("no planner made a plan, so there is nothing to report")
            work.tell("writing the report")
            write_report(comparison.fastest, report, comparison=comparison.document()["rows"])
    if as_json:
        print_json(comparison.document())
    elif not is_stdout(report):
        from pipeplan.report.comparison import render_comparison

        print_rich(lambda console: render_comparison(comparison, console))
