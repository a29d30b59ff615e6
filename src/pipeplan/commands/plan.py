"""`pipeplan plan` and `pipeplan demo`."""

import click

from pipeplan.commands.progress import progress_line
from pipeplan.commands.shared import print_json, print_plan, resolve_cluster, resolve_model, say

__all__ = ["demo_command", "plan_command"]


@click.command("plan")
@click.argument("model")
@click.argument("cluster")
@click.option("-m", "--microbatches", default=16, show_default=True, help="Per iteration.")
@click.option("--planner", default="best", show_default=True, help="The algorithm.")
@click.option("--seed", default=0, show_default=True, help="For random choices and clusters.")
@click.option("--effort", default=1.0, show_default=True, help="Search more, or less.")
@click.option("--time-limit", type=float, help="Seconds after which to stop searching.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the plan here.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan_command(
    model: str,
    cluster: str,
    microbatches: int,
    planner: str,
    seed: int,
    effort: float,
    time_limit: float | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Plan how to train MODEL on CLUSTER."""
    from pipeplan.planning import plan

    made = plan(
        resolve_model(model),
        resolve_cluster(cluster, seed),
        microbatches=microbatches,
        planner=planner,
        seed=seed,
        effort=effort,
        time_limit_s=time_limit,
        report=progress_line(),
    )
    if output:
        from pipeplan.files import write_plan

        write_plan(made, output)
    if as_json:
        from pipeplan.files import plan_document

        print_json(plan_document(made))
    else:
        print_plan(made)
    from pipeplan.checker import memory_excesses

    for excess in memory_excesses(made):
        say(f"warning: {excess}")


@click.command("demo")
def demo_command() -> None:
    """Plan BERT-large for eight devices in four hosts, check the plan and draw it."""
    from pipeplan import zoo
    from pipeplan.checker import check
    from pipeplan.planning import plan

    model = zoo.model("bert-large")
    made = plan(model, zoo.cluster("4x2-10g"), microbatches=16)
    print_plan(made)
    verdict = check(made)
    one_device_ms = 16 * sum(layer.forward_ms + layer.backward_ms for layer in model.layers)
    click.echo(
        f"\n{one_device_ms / made.iteration_ms:.2f}x as fast as one device;"
        f" the checker says: {'valid' if verdict.ok else '; '.join(verdict.errors)}"
    )
