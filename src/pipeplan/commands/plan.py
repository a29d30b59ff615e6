"""`pipeplan plan` and `pipeplan demo`."""

from typing import TYPE_CHECKING, Any, Unpack

import click

from pipeplan.commands.completion import (
    complete_cluster,
    complete_model,
    complete_planner,
    complete_schedule,
)
from pipeplan.commands.names import PLANNER_NAMES, SCHEDULE_NAMES, listed
from pipeplan.commands.paths import is_stdout, require_paths
from pipeplan.commands.planning_options import planning_options
from pipeplan.commands.progress import progress
from pipeplan.commands.shared import SEED, note, print_json, print_plan, print_rich, read_inputs
from pipeplan.documents.text import printable
from pipeplan.errors import InfeasibleError, InputError, NoPlanError, PlanningInterrupted

if TYPE_CHECKING:
    from pipeplan.cluster import Cluster
    from pipeplan.pipeline import Plan
    from pipeplan.planning.options import OptionArguments
    from pipeplan.profile import ModelProfile

__all__ = ["demo_command", "plan_command"]

DEFAULT_MICROBATCHES = 16


@click.command("plan")
@click.argument("model", shell_complete=complete_model)
@click.argument("cluster", shell_complete=complete_cluster)
@click.option("-m", "--microbatches", type=int, help="Per iteration.  [default: 16]")
@click.option(
    "--global-batch", type=int, help="Samples per iteration; microbatches are chosen to suit."
)
@click.option(
    "--planner",
    default="best",
    show_default=True,
    metavar="NAME",
    shell_complete=complete_planner,
    help=f"The algorithm: {listed(PLANNER_NAMES)}.",
)
@click.option(
    "--schedule",
    metavar="NAME",
    shell_complete=complete_schedule,
    help="The order of blocks, instead of the planner's own; `best` then keeps one stage a device,"
    f" which these orders are for: {listed(SCHEDULE_NAMES)}.",
)
@planning_options
@click.option(
    "--uniform-replicas",
    is_flag=True,
    help="Equally many replicas in each stage, and one stage a device unless --positions has a"
    " number: what other frameworks run.",
)
@click.option(
    "--seed", type=SEED, default=0, show_default=True, help="For random choices and clusters."
)
@click.option("--time-limit", type=float, help="Seconds after which to stop searching.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the plan here.")
@click.option("--report", type=click.Path(dir_okay=False), help="Write an HTML report here.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan_command(
    model: str,
    cluster: str,
    microbatches: int | None,
    global_batch: int | None,
    planner: str,
    schedule: str | None,
    uniform_replicas: bool,
    seed: int,
    time_limit: float | None,
    output: str | None,
    report: str | None,
    as_json: bool,
    **options: Unpack["OptionArguments"],
) -> None:
    """Plan how to train MODEL on CLUSTER."""
    from pipeplan.planning.inputs import input_files

    require_paths(
        inputs=input_files(model, cluster),
        outputs={"-o": output, "--report": report},
        as_json=as_json,
    )
    if microbatches is not None and global_batch is not None:
        raise InputError("-m: stands beside --global-batch, which chooses it; keep one of them")
    from pipeplan.documents.files import write_plan

    with progress("planning") as work:
        settings: dict[str, Any] = {
            "planner": planner,
            "schedule": schedule,
            "seed": seed,
            "time_limit_s": time_limit,
            "report": work.tell,
            **options,
        }
        if uniform_replicas:
            settings |= _one_stage_a_device(options)
        try:
            made = _make_plan(
                *read_inputs(model, cluster, seed),
                DEFAULT_MICROBATCHES if microbatches is None else microbatches,
                global_batch,
                settings,
            )
        except PlanningInterrupted as stop:
            if not output:
                raise
            raise KeyboardInterrupt(_save_interrupted(stop.plan, output)) from None
        _note_one_stage(made)
        if uniform_replicas:
            made = _with_uniform_replicas(made, schedule)
        if output:
            write_plan(made, output)
        if report:
            from pipeplan.report.html import write_report

            work.tell("writing the report")
            write_report(made, report)
    _show(made, as_json=as_json, silent=is_stdout(output, report))


def _one_stage_a_device(options: "OptionArguments") -> dict[str, Any]:
    """What equal replicas are searched near to, unless several stages a device are asked for."""
    from pipeplan.planning.options import AUTO

    is_asked = options.get("positions") not in (1, AUTO) or options.get("split_backward")
    return {} if is_asked else {"positions": 1, "split_backward": False}


def _show(made: "Plan", *, as_json: bool, silent: bool) -> None:
    """Print the plan, and warn where it needs too much memory."""
    if as_json:
        from pipeplan.documents.files import plan_document

        print_json(plan_document(made))
    elif not silent:
        print_plan(made)
    _warn_of_memory(made)


def _make_plan(
    model: "ModelProfile",
    cluster: "Cluster",
    microbatches: int,
    global_batch: int | None,
    settings: dict[str, Any],
) -> "Plan":
    """The plan; where nothing fits, the error says what would."""
    from pipeplan.planning.door import plan
    from pipeplan.planning.global_batch import plan_global_batch

    try:
        if global_batch is not None:
            return plan_global_batch(model, cluster, global_batch, **settings)
        return plan(model, cluster, microbatches, **settings)
    except NoPlanError as error:
        from pipeplan.planning.suggestions import explain, what_would_fit

        if global_batch is not None:  # the error is that of the smallest size, one sample
            from pipeplan.planning.global_batch import scaled_model

            model, microbatches = scaled_model(model, 1), global_batch
        unasked = ("schedule", "time_limit_s")
        asked = {name: value for name, value in settings.items() if name not in unasked}
        found = what_would_fit(model, cluster, microbatches, error, **asked)
        raise InfeasibleError(explain(error, found)) from None


def _warn_of_memory(plan: "Plan") -> None:
    """Say in one line that devices need more memory than they have."""
    from pipeplan.checker import memory_warning

    excess = memory_warning(plan)
    if excess:
        note(f"warning: {excess}")


def _note_one_stage(made: "Plan") -> None:
    """Say in one line that more stages a device were asked for, but not searched."""
    from pipeplan.planning.planner.chains import MAX_DEVICES

    num_devices, asked = made.cluster.num_devices, made.options.get("positions", 1)
    is_asked = asked != 1 or made.options.get("split_backward")
    if is_asked and num_devices > MAX_DEVICES and made.num_stages == len(made.groups):
        note(
            f"note: {num_devices} devices: several stages a device and cut backwards are searched"
            f" up to {MAX_DEVICES} devices only; this plan has one stage a device"
        )


def _with_uniform_replicas(made: "Plan", schedule: str | None) -> "Plan":
    """The nearest plan with equal replicas; its price is said on stderr."""
    from pipeplan.interop.grid_plan import nearest_grid_plan

    equal = nearest_grid_plan(made, schedule)
    if equal.iteration_ms > made.iteration_ms > 0:
        more = 100 * (equal.iteration_ms / made.iteration_ms - 1)
        note(f"note: equal replicas cost {more:.1f} %: {made.iteration_ms:.6g} ms without")
    return equal


def _save_interrupted(plan: "Plan", output: str) -> str:
    """Write the best plan so far; the line that says what became of it."""
    from pipeplan.documents.files import write_plan

    try:
        write_plan(plan, output)
    except InputError as problem:
        return f"interrupted; {problem}"
    return f"interrupted; the best plan so far is in {output}, marked as interrupted"


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
    from pipeplan.report.comparison import fastest_two, render_comparison
    from pipeplan.report.html import write_report

    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    plan_path, page_path = folder / "bert.plan.json", folder / "bert.html"
    require_paths(outputs={"the plan": str(plan_path), "the page": str(page_path)})
    with progress("planning") as work:
        comparison = compare(
            zoo.model("bert-large"),
            zoo.cluster("4x2-10g"),
            16,
            on_start=lambda name: work.tell(f"with {name}"),
        )
    made = comparison.plans["best"]
    print_plan(made)
    click.echo()
    print_rich(lambda console: render_comparison(comparison, console))
    write_plan(made, plan_path)
    rows = comparison.document()["rows"]
    write_report(
        made, page_path, comparison=rows, beside=fastest_two(comparison), others=comparison.plans
    )
    verdict = check(made)
    click.echo(f"\nThe checker says: {'valid' if verdict.ok else '; '.join(verdict.errors)}.")
    click.echo(f"Plan and report: {printable(str(plan_path))}, {printable(str(page_path))}")
