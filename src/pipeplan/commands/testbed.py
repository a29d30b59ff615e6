"""`pipeplan testbed`."""

import click

from pipeplan.commands.paths import is_stdout, require_paths
from pipeplan.commands.progress import progress
from pipeplan.commands.shared import plan_from, print_json, print_rich, say

__all__ = ["testbed_command"]


@click.command("testbed")
@click.argument("plan", type=click.Path())
@click.option(
    "--iterations",
    default=5,
    show_default=True,
    type=click.IntRange(1, 1000),
    help="How many are measured, after two that are not.",
)
@click.option(
    "--real",
    metavar="MODULE:FUNCTION",
    help="Train the model that this builds, with make_batch and loss_fn beside it; blocks are"
    " padded to the profile's times.",
)
@click.option(
    "--time-factor",
    type=click.FloatRange(min=0, min_open=True),
    help="Let everything last so many times as long; by default as this machine needs.",
)
@click.option(
    "--whole-samples",
    is_flag=True,
    help="Divide the plan's samples, as training does, instead of the exact shares.",
)
@click.option(
    "--way",
    type=click.Choice(["namespaces", "pacing"]),
    help="How links are emulated; by default the first that works. Pacing needs no privileges.",
)
@click.option("--report", type=click.Path(dir_okay=False), help="Write an HTML page here.")
@click.option("--trace", type=click.Path(dir_okay=False), help="Write a trace for Perfetto here.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def testbed_command(
    plan: str,
    iterations: int,
    real: str | None,
    time_factor: float | None,
    whole_samples: bool,
    way: str | None,
    report: str | None,
    trace: str | None,
    as_json: bool,
) -> None:
    """Run PLAN on its cluster, emulated on this machine: predicted against measured.

    Processes stand for devices, network namespaces with limited links for the network, and timed
    waits for computation. The runtime is that of real training.
    """
    require_paths(
        inputs={"PLAN": plan}, outputs={"--report": report, "--trace": trace}, as_json=as_json
    )
    from pipeplan.testbed.door import Testbed
    from pipeplan.testbed.orders import Way

    with progress("measuring") as work, plan_from(plan) as (read, _):
        with Testbed(None if way is None else Way(way)) as testbed:
            if testbed.note:
                say(testbed.note)
            measured = testbed.measure(
                read,
                num_iterations=iterations,
                time_factor=time_factor,
                whole_samples=whole_samples,
                build=real,
            )
        if measured.over_ms > measured.predicted_ms * LATE:
            say(
                "warning: a block's real computation took longer than the profile says, so the"
                " measured time is this machine's; raise --time-factor"
            )
        if report or trace:
            from pipeplan.testbed.showing import write_measured_page, write_measured_trace

            work.tell("writing")
            if report:
                write_measured_page(measured, report)
            if trace:
                write_measured_trace(measured, trace)
    if as_json:
        print_json(measured.document())
    elif not is_stdout(report, trace):
        from pipeplan.testbed.showing import render_measurement

        print_rich(lambda console: render_measurement(measured, console))


LATE = 0.01
"""Blocks that are late by this part of an iteration are worth a warning."""
