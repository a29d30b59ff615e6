"""`pipeplan simulate` and `pipeplan check`."""

import click

from pipeplan.commands.progress import progress
from pipeplan.commands.shared import plan_from, print_json, print_plan, say
from pipeplan.documents.text import printable
from pipeplan.errors import PlanFileError

__all__ = ["check_command", "simulate_command"]


@click.command("simulate")
@click.argument("plan", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the timeline as JSON.")
def simulate_command(plan: str, as_json: bool) -> None:
    """Run PLAN in the simulator and show its timeline."""
    with progress("simulating"), plan_from(plan) as (read, warn):
        if not as_json:
            print_plan(read, warn)
            return
        from pipeplan.documents.files import timeline_document
        from pipeplan.replaying import replay_plan

        replayed = replay_plan(read)
        for warning in replayed.warnings:
            warn(warning)
        document = timeline_document(replayed.timeline)
    print_json(document)


@click.command("check")
@click.argument("plan", type=click.Path())
@click.option("--strict-memory", is_flag=True, help="Too much memory is an error, not a warning.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def check_command(plan: str, strict_memory: bool, as_json: bool) -> None:
    """Judge PLAN: coverage, devices, links, schedule, memory, predicted figures."""
    from pipeplan.checker import check
    from pipeplan.documents.files import read_plan

    with progress("checking"):
        verdict = check(read_plan(plan), strict_memory=strict_memory)
    if as_json:
        print_json({"ok": verdict.ok, "errors": verdict.errors, "warnings": verdict.warnings})
    if not verdict.ok:
        more = len(verdict.errors) - 1
        others = f" (and {more} more; --json lists them)" if more else ""
        raise PlanFileError(f"{plan}: {verdict.errors[0]}{others}")
    for warning in verdict.warnings:
        say(f"warning: {warning}")
    if not as_json:
        click.echo(f"{printable(plan)}: valid")
