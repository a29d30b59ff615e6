"""Runs a plan for a few steps: `torchrun --nproc-per-node 4 -m pipeplan.run plan.json mine:build`.

The module of BUILD also holds, or `--data` and `--loss` name, the two other things that training
needs::

    build() -> nn.Module
    make_batch(step, rows) -> (batch, targets)      the same on every rank
    loss_fn(output, targets) -> mean loss over rows
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from pipeplan.errors import InputError, PipeplanError
from pipeplan.pipeline import Plan

__all__ = ["main", "run_command"]

OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}


@click.command("run")
@click.argument("plan", type=click.Path())
@click.argument("build")
@click.option("--data", help="MODULE:FUNCTION; by default make_batch beside BUILD.")
@click.option("--loss", help="MODULE:FUNCTION; by default loss_fn beside BUILD.")
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw")
@click.option("--lr", default=1e-3, show_default=True, help="The learning rate.")
@click.option("--as-is", is_flag=True, help="Refuse a plan that cannot run instead of replanning.")
@click.option("--steps", default=10, show_default=True, help="How many batches.")
@click.option("--checkpoint", type=click.Path(), help="Go on from this folder, and save there.")
@click.option("--trace", type=click.Path(), help="Write a Chrome trace of the last step.")
def run_command(
    plan: str,
    build: str,
    data: str | None,
    loss: str | None,
    optimizer: str,
    lr: float,
    as_is: bool,
    steps: int,
    checkpoint: str | None,
    trace: str | None,
) -> None:
    """Train the model that BUILD (MODULE:FUNCTION) makes, by PLAN, on torchrun's ranks."""
    if "RANK" not in os.environ:
        raise InputError("ranks: start this with torchrun --nproc-per-node N -m pipeplan.run ...")
    import torch
    import torch.distributed as dist

    from pipeplan.documents.files import read_plan
    from pipeplan.runtime import Pipeline, join_ranks

    read = _runnable(read_plan(plan), as_is=as_is)
    model = find_function(build)()
    make_batch = find_function(data or _beside(build, "make_batch"))
    loss_fn = find_function(loss or _beside(build, "loss_fn"))
    join_ranks()
    try:
        kind = getattr(torch.optim, OPTIMIZERS[optimizer])
        with Pipeline(read, model, loss_fn, lambda found: kind(found, lr=lr)) as pipeline:
            if checkpoint and pipeline.load(checkpoint) and pipeline.rank == 0:
                click.echo(f"goes on after step {pipeline.num_steps}")
            rows = read.microbatches * read.model.microbatch_size
            while pipeline.num_steps < steps:
                value = pipeline.step(*make_batch(pipeline.num_steps, rows))
                if pipeline.rank == 0:
                    click.echo(
                        f"step {pipeline.num_steps:4d}  loss {value:.5f}"
                        f"  {pipeline.iteration_ms:.1f} ms{_against(read)}"
                    )
            if checkpoint:
                pipeline.save(checkpoint)
            if trace:
                pipeline.write_trace(trace)
    finally:
        if sys.exc_info()[0] is None:
            dist.barrier()  # rank 0 may hold the store that the others still use
            dist.destroy_process_group()


def _runnable(read: Plan, *, as_is: bool) -> Plan:
    """The plan, or one for the same inputs whose stages all have a row for each replica."""
    rows = read.model.microbatch_size
    most = max(range(read.num_stages), key=lambda stage: read.stages[stage].num_replicas)
    if read.stages[most].num_replicas <= rows:
        return read
    reason = (
        f"stages[{most}]: has {read.stages[most].num_replicas} replicas, more than a microbatch"
        f" has rows ({rows})"
    )
    if as_is:
        raise InputError(f"{reason}; plan with --runnable, or leave out --as-is")
    from pipeplan.planning.door import plan

    if os.environ.get("RANK") == "0":
        click.echo(
            f"pipeplan: {reason}; planning anew without such stages (--as-is refuses instead)",
            err=True,
        )
    return plan(read.model, read.cluster, read.microbatches, runnable=True, seed=read.seed)


def find_function(path: str) -> Callable[..., Any]:
    """The function that `module:name` names, also in the current folder."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise InputError(f"{path!r}: is not of the form MODULE:FUNCTION")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0]:
            raise
        raise InputError(f"{path!r}: there is no module {module_name!r} here") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"{path!r}: the module {module_name!r} has no function {name!r}")
    found: Callable[..., Any] = function
    return found


def _beside(path: str, name: str) -> str:
    return f"{path.partition(':')[0]}:{name}"


def _against(plan: Any) -> str:
    return "" if plan.predicted is None else f" (predicted {plan.predicted.iteration_ms:.1f} ms)"


def main() -> NoReturn:
    """Run; an error that all ranks share takes one line, on rank 0's stderr."""
    try:
        run_command(standalone_mode=False)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except PipeplanError as error:
        _fail(str(error), error.exit_code)
    sys.stdout.flush()
    sys.exit(0)


def _fail(message: str, exit_code: int) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        click.echo(f"pipeplan: {' '.join(message.split())}", err=True)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
