"""A few numbers that stand for a tensor, by which ranks tell whether they have computed the same.

Equal code gives equal tensors on all ranks, up to rounding. So two sums and a size are enough: what
differs in the code (a factor, a mask, a detached branch) changes them far beyond rounding.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pipeplan.documents.text import printable

__all__ = ["Numbers", "WholeRun", "add_up", "are_alike", "digest", "find_other_run", "gradient_of"]

Digest = tuple[float, float, float, int]
"""The sums of both halves, the sum of all absolute values, and of how many tensors."""
Numbers = dict[str, Digest | None]
"""By what they stand for; None for a parameter without a gradient."""
OTHER_DEVICES = 3e-2
"""What devices of different kinds may differ by: some multiply float32 in fewer bits."""
READS = (
    "with the same weights and rows; its code or its loss's reads something that differs: the rank,"
    " a flag, a function, the environment, a file; let all ranks run the same program"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """What the whole model gave on one rank."""

    device: str
    """The kind of device that it ran on."""
    weights: int
    """Stands for the values of the model; runs with others cannot be compared."""
    numbers: Numbers

    def without(self, names: Collection[str]) -> "WholeRun":
        """The same without the gradients of these parameters."""
        left = {gradient_of(name) for name in names}
        kept = {what: each for what, each in self.numbers.items() if what not in left}
        return replace(self, numbers=kept)


def gradient_of(name: str) -> str:
    """What the numbers of a parameter's gradient are called."""
    return f"the gradient of parameter {name!r}"


def digest(tensor: torch.Tensor) -> Digest:
    """The numbers of one tensor."""
    values = tensor.detach()
    values = values.to_dense() if values.layout is not torch.strided else values
    values = torch.view_as_real(values) if values.is_complex() else values
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    flat = values.reshape(-1)
    half = flat.numel() // 2
    sums = (flat[:half].sum(), flat[half:].sum(), torch.linalg.vector_norm(flat, 1))
    return float(sums[0]), float(sums[1]), float(sums[2]), 1


def add_up(first: Digest | None, second: Digest | None) -> Digest | None:
    """The numbers of a sum of two tensors; its size is at most that of both.

    A tied weight may be one tensor on one rank, and two on another.
    """
    if first is None or second is None:
        return first or second
    (one, two, size, count), other = first, second
    return one + other[0], two + other[1], size + other[2], count + other[3]


def find_other_run(runs: Mapping[int, WholeRun], rounding: float) -> str | None:
    """One line about the first rank that computes something else than the first one.

    Runs with other weights are left out: nothing can be said of them.
    """
    (first, mine), *others = runs.items()
    floor = _floor(mine.numbers)
    for rank, other in others:
        if other.weights != mine.weights:
            continue
        allowed = rounding if other.device == mine.device else max(rounding, OTHER_DEVICES)
        for what in dict.fromkeys((*mine.numbers, *other.numbers)):
            pair = mine.numbers.get(what), other.numbers.get(what)
            if not are_alike(pair, allowed, floor if what.startswith("the gradient") else 0.0):
                texts = [_text(each) for each in pair]
                return (
                    f"model: {printable(what)} {texts[0]} on rank {first} and {texts[1]} on rank"
                    f" {rank}, {READS}"
                )
    return None


def _floor(numbers: Numbers) -> float:
    """A size below which a gradient is nothing but rounding."""
    return 1e-4 * max((each[2] for each in numbers.values() if each is not None), default=0.0)


def are_alike(pair: Sequence[Digest | None], allowed: float, floor: float = 0.0) -> bool:
    """Whether the numbers of two tensors agree, up to a part of their size."""
    first, second = pair
    if first is None or second is None:
        return first is second
    if any(math.isnan(number) for number in (*first, *second)):
        return [math.isnan(number) for number in first] == [math.isnan(n) for n in second]
    if first == second:
        return True
    most = allowed * max(first[2], second[2], floor)
    differences = [abs(mine - other) for mine, other in zip(first, second, strict=True)]
    return max(differences[: 3 if first[3] == second[3] == 1 else 2]) <= most


def _text(numbers: Digest | None) -> str:
    if numbers is None:
        return "is not there"
    return f"sums up to {numbers[0] + numbers[1]:.6g} (sizes to {numbers[2]:.6g})"
