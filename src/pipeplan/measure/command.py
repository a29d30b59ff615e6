"""Measures a model whose functions are given by name, as `pipeplan profile` does."""

import contextlib
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeplan.errors import InputError
from pipeplan.measure.profiling import Progress, measure_model
from pipeplan.measure.results import ModelMeasurement
from pipeplan.user_code import describe_error, find_function

__all__ = ["measure_named"]

BYTES_IN_KB = 1024


def measure_named(
    paths: Mapping[str, str | None],
    *,
    layers: str | None,
    device: str,
    dtype: str | None,
    amp: str | None,
    name: str | None,
    estimate: str | None,
    microbatch_size: int | None,
    at: Sequence[int],
    repeats: int | None,
    tell: Progress,
) -> ModelMeasurement:
    """Measure the model of BUILD with --batch, --loss and --targets, each `module:function`."""
    where = _device(device)
    with _in_type(dtype), _limited_memory():
        found = {what: _find(path, what) for what, path in paths.items() if path is not None}

        def build() -> nn.Module:
            made: nn.Module = found["BUILD"]()
            return made.to(where) if where.type != "cpu" and estimate is None else made

        return measure_model(
            build,
            found["--batch"],
            loss_fn=found.get("--loss"),
            targets=found.get("--targets"),
            layers=None if layers is None else [each.strip() for each in layers.split(",")],
            amp_dtype=None if amp is None else getattr(torch, amp),
            name=name or "",
            estimate=estimate,
            microbatch_size=microbatch_size,
            at=at,
            repeats=repeats,
            tell=tell,
        )


def _find(path: str, what: str) -> Any:
    """The function of this name; an error inside of its module in one line."""
    try:
        return find_function(path, what)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{what}: {path!r}: its module cannot be imported: {describe_error(error)}"
        ) from error


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise InputError(f"--device: {text!r} is no device; use cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"--device: {text!r} is not here; measure on cpu, or --estimate another device"
        )
    return device


@contextlib.contextmanager
def _in_type(dtype: str | None) -> Iterator[None]:
    """Inside, torch makes floating-point tensors of this type by default."""
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(getattr(torch, dtype))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """Inside, an allocation that this machine cannot hold fails, with a message.

    Otherwise Linux would grant it, and end the process without a word when it is used.
    """
    if sys.platform != "linux":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _kilobytes("/proc/self/status", "VmData") + _kilobytes("/proc/meminfo", "MemAvailable")
    limit = wanted * BYTES_IN_KB
    if limit and (soft == resource.RLIM_INFINITY or limit < soft):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _kilobytes(file: str, field: str) -> int:
    for line in Path(file).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    return 0
