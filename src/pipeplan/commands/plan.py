"""`pipeplan plan` and `pipeplan demo`."""

import click

from pipeplan.commands.progress import progress_line
from pipeplan.commands.shared import (
    print_json,
    print_plan,
    print_rich,
    resolve_cluster,
    resolve_model,
    say,
)

__all__ = ["demo_command", "plan_command"]


@click.command("plan")
@click.argument("model")
@click.argument("cluster")
@click.option("-m", "--microbatches", default=16, show_default=True, help="Per iteration.")
@click.option("--planner", default="best", show_default=True, help="The algorithm.")
@click.option("--schedule", help="The order of execution, instead of the planner's own.")
@click.option("--runnable", is_flag=True, help="No more replicas than a microbatch has samples.")
@click.option("--seed", default=0, show_default=True, help="For random choices and clusters.")
@click.option("--effort", default=1.0, show_default=True, help="Search more, or less.")
@click.option("--time-limit", type=float, help="Seconds after which to stop searching.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the plan here.")
@click.option("--report", type=click.Path(dir_okay=False), help="Write an HTML report here.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan_command(
    model: str,
    cluster: str,
    microbatches: int,
    planner: str,
    schedule: str | None,
    runnable: bool,
    seed: int,
    effort: float,
    time_limit: float | None,
    output: str | None,
    report: str | None,
    as_json: bool,
) -> None:
    """Plan how to train MODEL on CLUSTER."""
    from pipeplan.planning.door import plan

    made = plan(
        resolve_model(model),
        resolve_cluster(cluster, seed),
        microbatches=microbatches,
        planner=planner,
        schedule=schedule,
        runnable=runnable,
        seed=seed,
        effort=effort,
        time_limit_s=time_limit,
        report=progress_line(),
    )
    if output:
        from pipeplan.documents.files import write_plan

        write_plan(made, output)
    if report:
        from pipeplan.report.html import write_report

        write_report(made, report)
    if as_json:
        from pipeplan.documents.files import plan_document

        print_json(plan_document(made))
    else:
        print_plan(made)
    from pipeplan.checker import memory_excesses

    for excess in memory_excesses(made):
        say(f"warning: {excess}")


@click.command("demo")
@click.option(
    "-o",
    "--output",
    default="demo",
    show_default=True,
    type=click.Path(file_okay=False),
    help="The folder to write to.",
)
def demo_command(output: str) -> None:
    """Plan BERT-large for eight devices in four hosts, compare, check and draw it."""
    from pathlib import Path

    from pipeplan import zoo
    from pipeplan.checker import check
    from pipeplan.documents.files import write_plan
    from pipeplan.planning.comparison import compare
    from pipeplan.report.comparison import render_comparison
    from pipeplan.report.html import write_report

    model, cluster = zoo.model("bert-large"), zoo.cluster("4x2-10g")
    comparison = compare(model, cluster, 16)
    made = comparison.plans["best"]
    print_plan(made)
    click.echo()
    print_rich(lambda console: render_comparison(comparison, console))
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(made, folder / "bert.plan.json")
    write_report(made, folder / "bert.html", comparison=comparison.document()["rows"])
    verdict = check(made)
    click.echo(f"\nThe checker says: {'valid' if verdict.ok else '; '.join(verdict.errors)}.")
    click.echo(f"Plan and report: {folder / 'bert.plan.json'}, {folder / 'bert.html'}")
