"""The command line: parse, call the library, print. Results on stdout, all else on stderr."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pipeplan.errors import InputError, PipeplanError

if TYPE_CHECKING:
    from pipeplan.cluster import Cluster
    from pipeplan.pipeline import Plan
    from pipeplan.profile import ModelProfile

__all__ = ["cli", "main"]

EXIT_INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line; errors take one line on stderr and set the exit code."""
    try:
        cli(standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except PipeplanError as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115 - for the interpreter's last flush
        sys.exit(0)
    except OSError as error:
        _fail(f"{error.filename or 'output'}: {error.strerror or error}", 2)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", EXIT_INTERRUPTED)
    sys.exit(0)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=False)
@click.version_option(package_name="pipeplan")
def cli() -> None:
    """Plan synchronous pipeline-parallel training.

    MODEL and CLUSTER are names from the zoo (`pipeplan zoo`) or files.
    """


@cli.command("plan")
@click.argument("model")
@click.argument("cluster")
@click.option("-m", "--microbatches", default=16, show_default=True, help="Per iteration.")
@click.option("--planner", default="spp", show_default=True, help="The algorithm.")
@click.option("--seed", default=0, show_default=True, help="For random choices and clusters.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the plan here.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan_command(
    model: str,
    cluster: str,
    microbatches: int,
    planner: str,
    seed: int,
    output: str | None,
    as_json: bool,
) -> None:
    """Plan how to train MODEL on CLUSTER."""
    from pipeplan.planning import plan

    made = plan(
        _model(model),
        _cluster(cluster, seed),
        microbatches=microbatches,
        planner=planner,
        seed=seed,
    )
    if output:
        from pipeplan.files import write_plan

        write_plan(made, output)
    if as_json:
        from pipeplan.files import plan_document

        _print_json(plan_document(made))
    else:
        _print_plan(made)
    from pipeplan.checker import memory_excesses

    for excess in memory_excesses(made):
        _say(f"warning: {excess}")


@cli.command("simulate")
@click.argument("plan", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the timeline as JSON.")
def simulate_command(plan: str, as_json: bool) -> None:
    """Run PLAN in the simulator and show its timeline."""
    from pipeplan.files import read_plan

    read = read_plan(plan)
    if not as_json:
        _print_plan(read)
        return
    from pipeplan.files import timeline_document
    from pipeplan.simulator import simulate

    _print_json(timeline_document(simulate(read)))


@cli.command("check")
@click.argument("plan", type=click.Path())
@click.option("--strict-memory", is_flag=True, help="Too much memory is an error, not a warning.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def check_command(plan: str, strict_memory: bool, as_json: bool) -> None:
    """Judge PLAN: coverage, devices, links, schedule, memory, predicted figures."""
    from pipeplan.checker import check
    from pipeplan.files import read_plan

    verdict = check(read_plan(plan), strict_memory=strict_memory)
    if as_json:
        _print_json({"ok": verdict.ok, "errors": verdict.errors, "warnings": verdict.warnings})
    for warning in verdict.warnings:
        _say(f"warning: {warning}")
    if verdict.ok:
        if not as_json:
            click.echo(f"{plan}: valid")
        return
    for error in verdict.errors:
        _say(f"{plan}: {error}")
    sys.exit(InputError.exit_code)


@cli.command("zoo")
@click.argument("name", required=False)
@click.option("--device", help="V100, A100 or H100 (models).")
@click.option("--microbatch-size", type=int, help="Samples in a microbatch (models).")
@click.option("--sequence-length", type=int, help="Tokens in a sample (transformers).")
@click.option("--precision", help="fp32, fp16 or bf16 (models).")
@click.option("--seed", default=0, show_default=True, help="For random clusters.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write NAME's file here.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def zoo_command(
    name: str | None, seed: int, output: str | None, as_json: bool, **settings: Any
) -> None:
    """List the ready models and clusters, or write one of them to a file."""
    from pipeplan import zoo

    if name is None:
        _print_zoo(as_json)
        return
    from pipeplan.files import cluster_document, model_document, write_cluster, write_model

    if name in zoo.CLUSTER_NAMES:
        made = zoo.cluster(name, seed=seed)
        if output:
            write_cluster(made, output)
        else:
            _print_json(cluster_document(made))
        return
    model = zoo.model(name, **settings)
    if output:
        write_model(model, output)
    else:
        _print_json(model_document(model))


@cli.command("demo")
def demo_command() -> None:
    """Plan BERT-large for eight devices in four hosts, check the plan and draw it."""
    from pipeplan import zoo
    from pipeplan.checker import check
    from pipeplan.planning import plan

    model = zoo.model("bert-large")
    made = plan(model, zoo.cluster("4x2-10g"), microbatches=16)
    _print_plan(made)
    verdict = check(made)
    one_device_ms = 16 * sum(layer.forward_ms + layer.backward_ms for layer in model.layers)
    click.echo(
        f"\n{one_device_ms / made.iteration_ms:.2f}x as fast as one device;"
        f" the checker says: {'valid' if verdict.ok else '; '.join(verdict.errors)}"
    )


def _model(name: str) -> "ModelProfile":
    from pipeplan import zoo
    from pipeplan.files import read_model

    if name in zoo.MODEL_NAMES:
        return zoo.model(name)
    _require_file(name, "model", zoo.MODEL_NAMES)
    return read_model(name)


def _cluster(name: str, seed: int) -> "Cluster":
    from pipeplan import zoo
    from pipeplan.files import read_cluster

    if name in zoo.CLUSTER_NAMES:
        return zoo.cluster(name, seed=seed)
    _require_file(name, "cluster", zoo.CLUSTER_NAMES)
    return read_cluster(name)


def _require_file(name: str, kind: str, known: tuple[str, ...]) -> None:
    from pipeplan.spelling import nearest

    if not Path(name).exists():
        raise InputError(f"{kind}: {name!r} is neither a file nor in the zoo{nearest(name, known)}")


def _print_plan(plan: "Plan") -> None:
    from rich.console import Console

    from pipeplan.report.terminal import render_plan
    from pipeplan.simulator import simulate

    console = Console(highlight=False, markup=False)
    console.print(render_plan(plan, simulate(plan), console))


def _print_zoo(as_json: bool) -> None:
    from pipeplan import zoo

    models = [zoo.model_figures(name) for name in zoo.MODEL_NAMES]
    clusters = [zoo.cluster_figures(name) for name in zoo.CLUSTER_NAMES]
    if as_json:
        _print_json({"models": models, "clusters": clusters})
        return
    from rich.console import Console

    from pipeplan.report.listing import render_zoo

    Console(highlight=False, markup=False).print(render_zoo(models, clusters))


def _print_json(document: Any) -> None:
    from pipeplan.syntax import to_json

    sys.stdout.write(to_json(document).decode())


def _say(message: str) -> None:
    click.echo(f"pipeplan: {message}", err=True)


def _fail(message: str, exit_code: int) -> NoReturn:
    _say(" ".join(message.split()))
    sys.exit(exit_code)
