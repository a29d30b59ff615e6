"""`pipeplan whatif`."""

from typing import TYPE_CHECKING

import click

from pipeplan.commands.completion import complete_planner
from pipeplan.commands.paths import is_stdout, require_paths
from pipeplan.commands.progress import Progress, progress
from pipeplan.commands.shared import plan_from, print_json, print_rich
from pipeplan.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from pipeplan.planning.whatif.question import WhatIf

__all__ = ["whatif_command"]


@click.command("whatif")
@click.argument("plan", type=click.Path())
@click.option(
    "--slower",
    multiple=True,
    metavar="NAME=FACTOR",
    help="Multiply the speed of a device or host: h1d0=0.5",
)
@click.option("--lose", multiple=True, metavar="NAME", help="A device or host is gone: h0d1")
@click.option(
    "--link",
    multiple=True,
    metavar="A,B=GB/S",
    help="Set the bandwidth between two hosts or devices, both ways: h0,h1=1.25",
)
@click.option(
    "--add",
    multiple=True,
    metavar="HOSTS",
    help="New hosts: 2x4:12 is two of four devices with 12 GB/s inside. More with commas:"
    " between= (GB/s to other hosts), memory= (GB), speed=, latency= (us). Else as the others.",
)
@click.option(
    "--planner",
    metavar="NAME",
    shell_complete=complete_planner,
    help="Who makes the new plan, instead of the old one's planner.",
)
@click.option("--effort", type=float, help="Search more, or less.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the new plan here.")
@click.option("--report", type=click.Path(dir_okay=False), help="Write an HTML report here.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def whatif_command(
    plan: str,
    slower: tuple[str, ...],
    lose: tuple[str, ...],
    link: tuple[str, ...],
    add: tuple[str, ...],
    planner: str | None,
    effort: float | None,
    output: str | None,
    report: str | None,
    as_json: bool,
) -> None:
    """Show what a change of the cluster costs PLAN, and what a new plan wins back.

    Without a change: what a straggler, a loss or a slow link would cost, and what one more device
    or a faster link would buy.
    """
    require_paths(
        inputs={"PLAN": plan}, outputs={"-o": output, "--report": report}, as_json=as_json
    )
    if not (slower or lose or link or add):
        if output or report:
            raise InputError(
                "whatif: without a change there is no new plan to write; name one, such as --lose"
            )
        _show_outlook(plan, as_json)
        return
    from pipeplan.planning.whatif.changed_cluster import known_names
    from pipeplan.planning.whatif.parsing import parse_changes
    from pipeplan.planning.whatif.question import answer
    from pipeplan.replaying import replay_plan

    with progress("planning") as work, plan_from(plan) as (read, warn):
        changes = parse_changes(
            known_names(read.cluster), slower=slower, links=link, lose=lose, add=add
        )
        replayed = replay_plan(read)
        for warning in replayed.warnings:
            warn(warning)
        found = answer(replayed.plan, changes, planner=planner, effort=effort, report=work.tell)
        if output or report:
            _write(found, output, report, work)
    if as_json:
        print_json(found.document())
    elif not is_stdout(output, report):
        from pipeplan.report.whatif import render_whatif

        print_rich(lambda console: render_whatif(found, console))


def _write(found: "WhatIf", output: str | None, report: str | None, work: Progress) -> None:
    """The new plan, and the page with all plans of the question on one scale."""
    from pipeplan.documents.files import write_plan
    from pipeplan.report.html import write_report
    from pipeplan.report.whatif import beside

    if found.replanned is None:
        raise InfeasibleError(found.replanned_problem or "no plan exists for the changed cluster")
    if output:
        write_plan(found.replanned, output)
    if report:
        work.tell("writing the report")
        write_report(found.replanned, report, beside=beside(found))


def _show_outlook(plan: str, as_json: bool) -> None:
    from pipeplan.planning.whatif.outlook import outlook

    with progress("looking ahead") as work, plan_from(plan) as (read, _):
        found = outlook(read, report=work.tell)
    if as_json:
        print_json(found.document())
        return
    from pipeplan.report.whatif import render_outlook

    print_rich(lambda console: render_outlook(found, console))
