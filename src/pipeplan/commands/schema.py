"""`pipeplan schema`."""

import click

from pipeplan.commands.shared import print_json

__all__ = ["schema_command"]


@click.command("schema")
@click.argument("kind", type=click.Choice(("model", "cluster", "plan")))
def schema_command(kind: str) -> None:
    """Print the JSON Schema of KIND's files, with which editors complete and check them."""
    from pipeplan.documents.schemas import json_schema

    print_json(json_schema(kind))
