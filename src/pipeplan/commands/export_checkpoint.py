"""`pipeplan export-checkpoint`."""

import click

from pipeplan.commands.paths import is_stdout, require_paths

__all__ = ["export_checkpoint_command"]


@click.command("export-checkpoint")
@click.argument("directory", type=click.Path())
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False),
    help="A .safetensors file; - is standard output.",
)
def export_checkpoint_command(directory: str, output: str) -> None:
    """Write the model of a checkpoint to one file.

    DIRECTORY is a checkpoint, or a folder of checkpoints: then the newest one counts.
    """
    require_paths(outputs={"-o": output})
    from pathlib import Path

    from pipeplan.documents.text import printable
    from pipeplan.runtime.checkpoints.exporting import export_checkpoint

    done = export_checkpoint(Path(directory), output)
    if not is_stdout(output):
        click.echo(
            f"{printable(output)}: {done.num_tensors} tensors, {done.num_bytes / 1e6:,.1f} MB,"
            f" after step {done.num_steps}"
        )
