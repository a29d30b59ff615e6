"""`pipeplan profile`."""

from typing import Any

import click

from pipeplan.commands.paths import is_stdout, require_paths
from pipeplan.commands.progress import progress
from pipeplan.commands.shared import note, print_json, print_rich
from pipeplan.errors import InputError
from pipeplan.user_code import require_form

__all__ = ["profile_command"]

DTYPES = ("float32", "bfloat16", "float16")


@click.command("profile")
@click.argument("build")
@click.option(
    "--batch",
    required=True,
    metavar="MODULE:FUNCTION",
    help="Makes what the model is called with: a tensor, a tuple by position, a dict by name.",
)
@click.option(
    "--loss",
    metavar="MODULE:FUNCTION",
    help="The mean loss of the model's output and the targets; belongs to the last layer.",
)
@click.option("--targets", metavar="MODULE:FUNCTION", help="Makes the targets of the loss.")
@click.option(
    "--microbatch-size",
    type=click.IntRange(1, 10**9),
    help="Rows of a microbatch; by default those of the batch.",
)
@click.option("--at", metavar="SIZES", help="Measure times at these microbatch sizes, too: 1,2,8.")
@click.option("--layers", metavar="NAMES", help="Modules that are the layers, such as a,b.0,b.1.")
@click.option(
    "--device", default="cpu", show_default=True, help="Where to measure: cpu, cuda, cuda:1."
)
@click.option(
    "--estimate",
    metavar="DEVICE",
    help="Compute times instead of measuring, without memory for the model: v100, a100, h100, or"
    " peak TFLOPs and GB/s such as 312,2039.",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Build the model and the batch in this type (torch's default type).",
)
@click.option("--amp", type=click.Choice(DTYPES[1:]), help="Measure under autocast to this type.")
@click.option(
    "--repeats", type=click.IntRange(1, 10_000), help="Runs; by default a few seconds of them."
)
@click.option("--name", help="Of the model; by default its class.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the profile here.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def profile_command(
    build: str,
    batch: str,
    loss: str | None,
    targets: str | None,
    output: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure the PyTorch model that BUILD (MODULE:FUNCTION) makes, layer by layer.

    Modules are found as `python -m` finds them: in the current folder, too.
    """
    require_paths(outputs={"-o": output}, as_json=as_json)
    paths = {"BUILD": build, "--batch": batch, "--loss": loss, "--targets": targets}
    for what, path in paths.items():
        if path is not None:
            require_form(path, what)
    if targets is not None and loss is None:
        raise InputError("--targets: needs a --loss that uses them")
    sizes = _sizes(options.pop("at"))
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise InputError("profile: needs PyTorch; pip install 'pipeplan[torch]'") from None
    from pipeplan.documents.files import write_model
    from pipeplan.measure.command import measure_named

    with progress("measuring") as work:
        measured = measure_named(paths, at=sizes, tell=work.count, **options)
        if output is not None:
            write_model(measured.profile, output)
    if as_json:
        print_json(measured.document())
    elif not is_stdout(output):
        from pipeplan.measure.showing import render_model

        print_rich(lambda _: render_model(measured))
    if output is None and not as_json:
        note("note: nothing was written; -o my.model.json keeps the profile for pipeplan plan")


def _sizes(text: str | None) -> list[int]:
    """The microbatch sizes in a text like `1,2,8`."""
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    for part in parts:
        if not (part.isascii() and part.isdigit() and 1 <= int(part[:12]) <= 10**9):
            raise InputError(f"--at: {part!r} is no microbatch size; give numbers such as 1,2,8")
    return [int(part) for part in parts]
