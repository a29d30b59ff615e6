"""Runs a plan for a few steps: `torchrun --nproc-per-node 4 -m pipeplan.run plan.json mine:build`.

With `--auto --global-batch 64` instead of a plan, it measures and plans by itself first.

Training needs three functions. The module of BUILD holds them, or `--data` and `--loss` name the
last two::

    build() -> nn.Module
    make_batch(step, rows) -> (batch, targets)      the same on every rank
    loss_fn(output, targets) -> mean loss over rows
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pipeplan.documents.text import only_printable, printable
from pipeplan.errors import CheckpointError, InputError, PipeplanError
from pipeplan.pipeline import Plan
from pipeplan.user_code import find_function

if TYPE_CHECKING:
    from pipeplan.runtime import Pipeline

__all__ = ["main", "run_command"]

OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}
INTERRUPTED_CODE = 128 + signal.SIGINT


class _InterruptedError(Exception):
    """Ctrl-C; click would print an empty line for a KeyboardInterrupt."""

    def __init__(self, *, is_said: bool) -> None:
        super().__init__()
        self.is_said = is_said
        """Whether the watchdog has already printed the line."""


class _NotJoinedError(Exception):
    """This rank has not found the others. Each rank says what it knows: rank 0 may be missing."""

    def __init__(self, error: PipeplanError) -> None:
        super().__init__(str(error))
        self.exit_code = error.exit_code


@click.command("run")
@click.argument("plan", type=click.Path(), metavar="[PLAN]")
@click.argument("build", required=False, metavar="BUILD")
@click.option("--auto", is_flag=True, help="Measure model and links, and plan; give no PLAN.")
@click.option("--global-batch", type=click.IntRange(min=1), help="Rows of a step's batch (--auto).")
@click.option(
    "--microbatch-size",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Rows by which the model is measured (--auto).",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False),
    default="pipeplan-auto",
    show_default=True,
    help="Where measurements and the plan are kept (--auto).",
)
@click.option("--data", help="MODULE:FUNCTION; by default make_batch beside BUILD.")
@click.option("--loss", help="MODULE:FUNCTION; by default loss_fn beside BUILD.")
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw")
@click.option("--lr", default=1e-3, show_default=True, help="The learning rate.")
@click.option("--as-is", is_flag=True, help="Refuse a plan that cannot run instead of replanning.")
@click.option("--steps", default=10, show_default=True, help="How many batches.")
@click.option("--checkpoint", type=click.Path(), help="Continue from this folder, and save there.")
@click.option(
    "--resume-from",
    type=click.Path(),
    help="Continue from this checkpoint instead of the newest one in --checkpoint.",
)
@click.option(
    "--trust", is_flag=True, help="Load a checkpoint of pipeplan's first format; it can run code."
)
@click.option("--trace", type=click.Path(), help="Write a Chrome trace of the last step.")
@click.option(
    "--join-timeout", default=300.0, show_default=True, help="Wait so long for ranks (s)."
)
@click.option("--hang-timeout", default=20.0, show_default=True, help="The limit of a block (s).")
@click.option(
    "--first-block-timeout",
    default=600.0,
    show_default=True,
    help="The same for the first of its kind, which may compile (s).",
)
@click.option(
    "--outside-timeout",
    default=600.0,
    show_default=True,
    help="The limit of a rank that is busy outside of steps while others wait (s).",
)
def run_command(
    plan: str,
    build: str | None,
    auto: bool,
    global_batch: int | None,
    microbatch_size: int,
    folder: str,
    data: str | None,
    loss: str | None,
    optimizer: str,
    lr: float,
    as_is: bool,
    steps: int,
    checkpoint: str | None,
    resume_from: str | None,
    trust: bool,
    trace: str | None,
    join_timeout: float,
    **limits: float,
) -> None:
    """Train the model that BUILD (MODULE:FUNCTION) makes, by PLAN, on torchrun's ranks."""
    if "RANK" not in os.environ:
        raise InputError("ranks: start this with torchrun --nproc-per-node N -m pipeplan.run ...")
    build = _require_arguments(plan, build, global_batch, auto=auto)
    try:
        import torch
        import torch.distributed as dist

        from pipeplan.documents.files import read_plan
        from pipeplan.runtime import Pipeline, WatchdogOptions, join_ranks

        watchdog = WatchdogOptions(**{f"{name}_s": limit for name, limit in limits.items()})
        read = None if auto else _runnable(read_plan(plan), as_is=as_is)
        torch.manual_seed(0)  # the same model on every rank
        model = find_function(build)()
        make_batch = find_function(data or _beside(build, "make_batch"))
        loss_fn = find_function(loss or _beside(build, "loss_fn"))
        try:
            join_ranks(join_timeout)
        except PipeplanError as error:
            raise _NotJoinedError(error) from None
        kind = getattr(torch.optim, OPTIMIZERS[optimizer])
        optimizer_fn = lambda found: kind(found, lr=lr)  # noqa: E731
        common = (model, loss_fn, optimizer_fn)
        if read is not None:
            made = Pipeline(read, *common, watchdog=watchdog)
        else:
            example = make_batch(0, microbatch_size)
            made = _plan_by_itself(common, example, global_batch, folder, watchdog)
        with made as pipeline:
            _resume(pipeline, checkpoint, resume_from, trust=trust)
            _train(pipeline, make_batch, steps, checkpoint)
            if trace:
                pipeline.write_trace(trace)
        dist.barrier()  # rank 0 may hold the store that the others still use
        dist.destroy_process_group()
    except KeyboardInterrupt as interrupt:
        # The watchdog adds a note with the line that it has printed.
        raise _InterruptedError(is_said=hasattr(interrupt, "__notes__")) from None


def _require_arguments(
    plan: str, build: str | None, global_batch: int | None, *, auto: bool
) -> str:
    """BUILD: behind PLAN, or alone with --auto."""
    if not auto:
        if build is None:
            raise click.UsageError("Missing argument 'BUILD'; or plan by --auto.")
        if global_batch is not None:
            raise InputError("--global-batch: is the plan's; it needs --auto")
        return build
    if build is not None:
        raise InputError(f"PLAN: {plan!r} and --auto exclude each other; give BUILD alone")
    if global_batch is None:
        raise InputError("--global-batch: is missing; --auto needs the rows of a step's batch")
    return plan


def _plan_by_itself(
    common: tuple[Any, Any, Any], example: Any, global_batch: int | None, folder: str, watchdog: Any
) -> "Pipeline":
    """A pipeline with a plan of its own, from an example batch with its targets."""
    from pipeplan.measure.auto import auto

    batch, targets = example
    assert global_batch is not None  # it was required before
    return auto(
        *common,
        batch,
        example_targets=targets,
        global_batch=global_batch,
        folder=folder,
        watchdog=watchdog,
    )


def _resume(
    pipeline: "Pipeline", checkpoint: str | None, resume_from: str | None, *, trust: bool
) -> None:
    """Continue from a checkpoint, if there is one; the one that is named has to be there."""
    path = resume_from or checkpoint
    if path is None:
        return
    if pipeline.load(path, trust=trust):
        if pipeline.rank == 0:
            click.echo(f"goes on after step {pipeline.num_steps}")
    elif resume_from:
        raise CheckpointError(f"--resume-from: {resume_from!r} holds no checkpoint")


def _train(
    pipeline: "Pipeline", make_batch: Callable[..., Any], steps: int, checkpoint: str | None
) -> None:
    """Take the steps that are left, and save; rank 0 prints a line for each."""
    plan = pipeline.plan
    predicted = ""
    if plan.predicted is not None:
        predicted = f" (predicted {plan.predicted.iteration_ms:.1f} ms)"
    rows = plan.microbatches * plan.model.microbatch_size
    while pipeline.num_steps < steps:
        loss = pipeline.step(*make_batch(pipeline.num_steps, rows))
        if pipeline.rank == 0:
            click.echo(
                f"step {pipeline.num_steps:4d}  loss {loss:.5f}"
                f"  {pipeline.iteration_ms:.1f} ms{predicted}"
            )
    if checkpoint:
        pipeline.save(checkpoint)


def _runnable(read: Plan, *, as_is: bool) -> Plan:
    """The plan; or a new one for the same inputs, if a stage has more replicas than rows."""
    rows = read.model.microbatch_size
    widest = max(range(read.num_stages), key=lambda stage: read.stages[stage].num_replicas)
    if read.stages[widest].num_replicas <= rows:
        return read
    reason = (
        f"stages[{widest}]: has {read.stages[widest].num_replicas} replicas, more than a microbatch"
        f" has rows ({rows})"
    )
    if as_is:
        raise InputError(f"{reason}; plan without --divisible, or leave out --as-is")
    from pipeplan.planning.door import plan
    from pipeplan.planning.options import AUTO
    from pipeplan.planning.whatif.question import recorded_options

    if os.environ.get("RANK") == "0":
        click.echo(
            f"pipeplan: {reason}; planning anew without such stages (--as-is refuses instead)",
            err=True,
        )
    asked = recorded_options(read)
    return plan(
        read.model,
        read.cluster,
        read.microbatches,
        seed=read.seed,
        positions=asked.get("positions", AUTO),
        split_backward=asked.get("split_backward"),
    )


def _beside(path: str, name: str) -> str:
    return f"{path.partition(':')[0]}:{name}"


def main() -> NoReturn:
    """Run, and exit; an error that all ranks share takes one line on each host."""
    try:
        run_command(standalone_mode=False)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except PipeplanError as error:
        _fail(str(error), error.exit_code)
    except _NotJoinedError as error:
        _fail(str(error), error.exit_code, on_all=True)
    except _InterruptedError as interrupted:
        _fail("" if interrupted.is_said else "interrupted", INTERRUPTED_CODE)
    except Exception as error:  # of the model or of torch: where it happened matters
        _print_traceback(error)
        sys.exit(1)
    sys.stdout.flush()
    sys.exit(0)


def _fail(message: str, exit_code: int, *, on_all: bool = False) -> NoReturn:
    """Exit; the first rank of each host, or each rank, says why."""
    index = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    if message and (on_all or index == "0"):
        click.echo(f"pipeplan: {printable(message)}", err=True)
    sys.exit(exit_code)


def _print_traceback(error: Exception) -> None:
    """Print a traceback whose lines no terminal takes for commands."""
    for line in "".join(traceback.format_exception(error)).rstrip("\n").split("\n"):
        click.echo(only_printable(line), err=True)


if __name__ == "__main__":
    main()
