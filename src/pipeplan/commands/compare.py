"""`pipeplan compare`."""

import click

from pipeplan.commands.shared import print_json, print_rich, resolve_cluster, resolve_model
from pipeplan.errors import InfeasibleError

__all__ = ["compare_command"]


@click.command("compare")
@click.argument("model")
@click.argument("cluster")
@click.option("-m", "--microbatches", default=16, show_default=True, help="Per iteration.")
@click.option("--planners", help="Names with commas between; by default all but exact.")
@click.option("--seed", default=0, show_default=True, help="For random choices and clusters.")
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
) -> None:
    """Plan MODEL on CLUSTER with every planner and show them side by side."""
    from rich.console import Console

    from pipeplan.planning.comparison import compare

    names = None if planners is None else [n.strip() for n in planners.split(",") if n.strip()]
    problem_model, problem_cluster = resolve_model(model), resolve_cluster(cluster, seed)
    progress = Console(stderr=True, highlight=False, markup=False)
    with progress.status("planning") as status:
        comparison = compare(
            problem_model,
            problem_cluster,
            microbatches,
            names,
            seed=seed,
            on_start=lambda name: status.update(f"planning with {name}"),
        )
    if report:
        from pipeplan.report.html import write_report

        if comparison.fastest is None:
            raise InfeasibleError("no planner made a plan, so there is nothing to report")
        write_report(comparison.fastest, report, comparison=comparison.document()["rows"])
    if as_json:
        print_json(comparison.document())
        return
    from pipeplan.report.comparison import render_comparison

    print_rich(lambda console: render_comparison(comparison, console))
