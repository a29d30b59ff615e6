"""`pipeplan simulate` and `pipeplan check`."""

import click

from pipeplan.commands.paths import require_paths
from pipeplan.commands.progress import progress
from pipeplan.commands.shared import note, plan_from, print_json, print_plan
from pipeplan.documents.text import printable
from pipeplan.documents.writing import STANDARD_STREAM
from pipeplan.errors import PlanFileError, ScheduleError

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
@click.option(
    "--schedule",
    type=click.Path(),
    help="Judge this schedule CSV of torch on PLAN's stages, and say what ours would gain.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def check_command(plan: str, strict_memory: bool, schedule: str | None, as_json: bool) -> None:
    """Judge PLAN: coverage, devices, links, schedule, memory, predicted figures."""
    if schedule is not None:
        _check_schedule(plan, schedule, strict_memory, as_json)
        return
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
        note(f"warning: {warning}")
    if not as_json:
        click.echo(f"{printable(plan)}: valid")


def _check_schedule(plan: str, schedule: str, strict_memory: bool, as_json: bool) -> None:
    """Judge a schedule of torch on the plan's stages."""
    require_paths(inputs={"PLAN": plan, "--schedule": schedule})
    from pipeplan.interop.schedule_check import check_schedule
    from pipeplan.interop.source_text import read_text
    from pipeplan.replaying import simulate

    with progress("checking"):
        text = read_text(schedule)
        with plan_from(plan) as (read, _):
            simulate(read)  # errors of the plan name the plan
        try:
            verdict = check_schedule(read, text)
        except ScheduleError as problem:
            if as_json:
                print_json({"ok": False, "errors": [str(problem)], "warnings": []})
            name = "standard input" if schedule == STANDARD_STREAM else schedule
            raise ScheduleError(f"{name}: {problem}") from None
    theirs = verdict.replayed.plan
    peak_gb = theirs.require_predicted().peak_memory_gb
    if strict_memory and verdict.memory_excesses:
        raise PlanFileError(f"{schedule}: {verdict.memory_excesses[0]}")
    for excess in verdict.memory_excesses:
        note(f"warning: {excess}")
    if as_json:
        ours = {"order": verdict.our_order, "iteration_ms": verdict.our_iteration_ms}
        print_json(
            {
                "ok": True,
                "microbatches": theirs.microbatches,
                "iteration_ms": theirs.iteration_ms,
                "bubble_fraction": theirs.require_predicted().bubble_fraction,
                "peak_memory_gb": peak_gb,
                "ours": {**ours, "gain": verdict.gain},
                "warnings": verdict.memory_excesses,
            }
        )
        return
    click.echo(
        f"{printable(schedule)}: valid: {theirs.num_stages} stages,"
        f" {theirs.microbatches} microbatches, {theirs.iteration_ms:.6g} ms,"
        f" {max(peak_gb.values()):.4g} GB peak"
    )
    if verdict.gain:
        click.echo(
            f"{verdict.our_order} takes {verdict.our_iteration_ms:.6g} ms on the same stages,"
            f" {100 * verdict.gain:.3g} % less"
        )
    else:
        click.echo("none of our orders is faster on the same stages")
