"""`pipeplan zoo`."""

from typing import Any

import click

from pipeplan.commands.shared import print_json

__all__ = ["zoo_command"]


@click.command("zoo")
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
            print_json(cluster_document(made))
        return
    model = zoo.model(name, **settings)
    if output:
        write_model(model, output)
    else:
        print_json(model_document(model))


def _print_zoo(as_json: bool) -> None:
    from pipeplan import zoo

    models = [zoo.model_figures(name) for name in zoo.MODEL_NAMES]
    clusters = [zoo.cluster_figures(name) for name in zoo.CLUSTER_NAMES]
    if as_json:
        print_json({"models": models, "clusters": clusters})
        return
    from rich.console import Console

    from pipeplan.report.listing import render_zoo

    Console(highlight=False, markup=False).print(render_zoo(models, clusters))
