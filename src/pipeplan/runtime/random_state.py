"""Random numbers of blocks: their seeds, and the program's generators, which stay as they are."""

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

__all__ = ["BlockSeeds", "keeping_random_state", "seed_all", "seed_torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeeds:
    """Makes the seeds of a replica's blocks."""

    seed: int
    stage: int
    replica: int

    def of(self, step: int, microbatch: int) -> int:
        """The seed of one block."""
        text = f"{self.seed}/{step}/{self.stage}/{microbatch}/{self.replica}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed the generators of torch."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def seed_all(seed: int, device: torch.device) -> None:
    """Seed the generators of torch, Python and numpy."""
    seed_torch(seed, device)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextlib.contextmanager
def keeping_random_state(device: torch.device) -> Iterator[None]:
    """Inside, anything may be drawn; afterwards the program's generators are as before.

    Numpy gets another generator meanwhile: to copy the state of its own takes longer than a block.
    """
    of_python, of_torch = random.getstate(), torch.default_generator.get_state()
    of_cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_bit_generator() if numpy is not None else None
    if numpy is not None:
        numpy.random.set_bit_generator(_spare_generator(numpy))
    try:
        yield
    finally:
        torch.default_generator.set_state(of_torch)
        if of_cuda is not None:
            torch.cuda.set_rng_state(of_cuda, device)
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_bit_generator(of_numpy)


@cache
def _spare_generator(numpy: Any) -> Any:
    """The generator of blocks, which seed it."""
    return numpy.random.MT19937(0)
