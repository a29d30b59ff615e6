"""`pipeplan calibrate`."""

import click

from pipeplan.commands.paths import is_stdout, require_paths
from pipeplan.commands.progress import progress
from pipeplan.commands.shared import plan_from, print_json, print_rich

__all__ = ["calibrate_command"]


@click.command("calibrate")
@click.argument("plan", type=click.Path())
@click.argument("trace", type=click.Path())
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    help="Plan anew with the corrected inputs, and write the plan here.",
)
@click.option("--model", type=click.Path(dir_okay=False), help="Write the corrected model here.")
@click.option(
    "--cluster", type=click.Path(dir_okay=False), help="Write the corrected cluster here."
)
@click.option("--planner", help="Who makes the new plan; by default the old plan's planner.")
@click.option("--effort", type=click.FloatRange(0.01, 1000.0), help="How much to search for it.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def calibrate_command(
    plan: str,
    trace: str,
    output: str | None,
    model: str | None,
    cluster: str | None,
    planner: str | None,
    effort: float | None,
    as_json: bool,
) -> None:
    """Compare a run's TRACE with its PLAN: which devices, layers and links differ, and by how much.

    Traces come from `pipeplan.run --trace`, from `Pipeline.write_trace` and from the testbed.
    """
    outputs = {"-o": output, "--model": model, "--cluster": cluster}
    require_paths(inputs={"PLAN": plan, "TRACE": trace}, outputs=outputs, as_json=as_json)
    from pipeplan.calibration.door import calibrate
    from pipeplan.calibration.measured_run import read_run
    from pipeplan.documents.files import write_cluster, write_model, write_plan

    with progress("calibrating") as work, plan_from(plan) as (read, _):
        found = calibrate(
            read,
            read_run(trace, read),
            replans=output is not None or planner is not None or effort is not None,
            planner=planner,
            effort=effort,
            report=work.tell,
        )
        if output is not None and found.replanned is not None:
            write_plan(found.replanned, output)
        if model is not None:
            write_model(found.model, model)
        if cluster is not None:
            write_cluster(found.cluster, cluster)
    if as_json:
        print_json(found.document())
    elif not is_stdout(output, model, cluster):
        from pipeplan.calibration.showing import render_calibration

        print_rich(lambda _: render_calibration(found))
