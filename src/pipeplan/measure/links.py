"""Measures the links of a cluster: `torchrun ... -m pipeplan.measure.links -o here.cluster.json`.

From Python, `measure_links` does the same between ranks that have joined already.
"""

import os
import sys
import time
from datetime import timedelta
from typing import NoReturn

import click
import torch
import torch.distributed as dist

from pipeplan.documents.files import write_cluster
from pipeplan.documents.text import printable
from pipeplan.documents.writing import STANDARD_STREAM
from pipeplan.errors import InputError, PipeplanError, RuntimeMismatchError
from pipeplan.interop.hosts import summary_of
from pipeplan.measure.all_links import MeasuredLinks, measure_links, require_seconds
from pipeplan.splitting.torch_private import without_torch_log

__all__ = ["MeasuredLinks", "links_command", "main", "measure_links"]

JOIN_PATIENCE = timedelta(minutes=5)
PAUSE_S = 5.0
"""Between two lines of progress."""
INTERRUPTED_CODE = 130


@click.command("links")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False),
    help="The cluster file; '-' is standard output.",
)
@click.option("--name", default="measured", show_default=True, help="Of the cluster.")
@click.option(
    "--seconds",
    default=60.0,
    show_default=True,
    help="How long it may take, about; small clusters take less.",
)
@click.option("--one-at-a-time", is_flag=True, help="Measure each pair alone, however long.")
def links_command(output: str, name: str, seconds: float, one_at_a_time: bool) -> None:
    """Measure the links between all ranks, and write a cluster file on rank 0.

    Start it with torchrun, with one rank for each device, on every host.
    """
    if "RANK" not in os.environ:
        raise InputError(
            "ranks: start this with torchrun --nproc-per-node N -m pipeplan.measure.links ..."
        )
    require_seconds(seconds)
    _require_writable(output)
    rank = _join()
    progress = _Progress()
    try:
        measured = measure_links(
            name=name, seconds=seconds, one_at_a_time=one_at_a_time, tell=progress.tell
        )
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError as error:  # gloo and NCCL have no errors of their own
        raise RuntimeMismatchError(
            f"ranks: rank {rank} has lost another one while it measured"
            f" ({str(error).partition(chr(10))[0]})"
        ) from None
    if rank == 0:
        write_cluster(measured.cluster, output)
        for text in measured.notes:
            click.echo(f"pipeplan: note: {printable(text)}", err=True)
        if output != STANDARD_STREAM:
            click.echo(
                f"{printable(output)}: {summary_of(measured.cluster)}, {measured.seconds:.0f} s"
            )


def _require_writable(output: str) -> None:
    """Refuse a folder that is not there before minutes are spent."""
    folder = os.path.dirname(output) or "."
    if output != STANDARD_STREAM and not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{output}: cannot be written: is there a folder {folder!r}?")


def _join() -> int:
    """Initialize torch.distributed from torchrun's environment: NCCL with GPUs, else gloo."""
    device = None
    if torch.cuda.device_count():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    try:
        with without_torch_log():
            dist.init_process_group(
                "gloo" if device is None else "nccl", device_id=device, timeout=JOIN_PATIENCE
            )
    except (RuntimeError, ValueError) as error:
        raise RuntimeMismatchError(
            f"ranks: they have not found each other ({str(error).partition(chr(10))[0]})"
        ) from None
    return dist.get_rank()


class _Progress:
    """Lines on stderr, a few seconds apart."""

    def __init__(self) -> None:
        self._begin_s = self._last_s = time.monotonic()

    def tell(self, num_done: int, num_all: int) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s >= PAUSE_S:
            self._last_s = now_s
            click.echo(
                f"pipeplan: measuring links: {num_done} of {num_all} rounds"
                f" ({now_s - self._begin_s:.0f} s)",
                err=True,
            )


def main() -> NoReturn:
    """Run, and exit; the first rank of each host says what is wrong."""
    try:
        links_command(standalone_mode=False)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except PipeplanError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", INTERRUPTED_CODE)
    except OSError as error:
        _fail(f"{error.filename or 'output'}: {error.strerror or error}", PipeplanError.exit_code)
    sys.stdout.flush()
    sys.exit(0)


def _fail(message: str, exit_code: int) -> NoReturn:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        click.echo(f"pipeplan: {printable(message)}", err=True)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
