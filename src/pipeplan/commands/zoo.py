"""`pipeplan zoo`."""

from typing import Any

import click

from pipeplan.commands.completion import complete_zoo
from pipeplan.commands.paths import require_paths
from pipeplan.commands.shared import SEED, print_json, print_rich
from pipeplan.errors import InputError

__all__ = ["zoo_command"]


@click.command("zoo")
@click.argument("name", required=False, shell_complete=complete_zoo)
@click.option("--device", help="V100, A100 or H100 (models).")
@click.option("--microbatch-size", type=int, help="Samples in a microbatch (models).")
@click.option("--sequence-length", type=int, help="Tokens in a sample (transformers).")
@click.option("--precision", help="fp32, fp16 or bf16 (models).")
@click.option("--seed", type=SEED, default=0, show_default=True, help="For random clusters.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write NAME's file here.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def zoo_command(
    name: str | None, seed: int, output: str | None, as_json: bool, **settings: Any
) -> None:
    """List the ready models and clusters, or write one of them to a file."""
    require_paths(outputs={"-o": output}, as_json=as_json)
    from pipeplan import zoo

    given = [option for option, value in settings.items() if value is not None]
    if name is None:
        _refuse(given, "a listing")
        if output:
            raise InputError("output: needs the NAME of what to write")
        _print_zoo(as_json)
        return
    from pipeplan.documents.files import (
        cluster_document,
        model_document,
        write_cluster,
        write_model,
    )

    if name in zoo.CLUSTER_NAMES:
        _refuse(given, "a cluster")
        cluster = zoo.cluster(name, seed=seed)
        if output:
            write_cluster(cluster, output)
        else:
            print_json(cluster_document(cluster))
        return
    if name not in zoo.MODEL_NAMES:
        from pipeplan.documents.text import nearest

        names = (*zoo.MODEL_NAMES, *zoo.CLUSTER_NAMES)
        raise InputError(f"name: {name!r} is not in the zoo{nearest(name, names)}")
    model = zoo.model(name, **settings)
    if output:
        write_model(model, output)
    else:
        print_json(model_document(model))


def _refuse(settings: list[str], what: str) -> None:
    """Only a model has settings."""
    if settings:
        raise InputError(f"{settings[0]}: does not apply to {what}; leave it out or name a model")


def _print_zoo(as_json: bool) -> None:
    from pipeplan import zoo

    models = [zoo.model_figures(name) for name in zoo.MODEL_NAMES]
    clusters = [zoo.cluster_figures(name) for name in zoo.CLUSTER_NAMES]
    if as_json:
        print_json({"models": models, "clusters": clusters})
        return
    from pipeplan.report.zoo_table import render_zoo

    print_rich(lambda console: render_zoo(models, clusters, console))
