"""The limits of every number and every size, and the checks that hold them.

Readers and constructors share this table. A number is 0 or lies within its limits, so no sum or
quotient of valid input overflows, underflows or becomes NaN. `docs/formats.md` states the same
table for people who write files.
"""

import math
import numbers
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from pipeplan.errors import InputError, PlanFileError

__all__ = [
    "BANDWIDTH_GB_PER_S",
    "COUNT",
    "GRADIENT_BUCKETS",
    "LATENCY_US",
    "MAX_BLOCKS",
    "MAX_DEVICES",
    "MAX_LAYERS",
    "MAX_LISTED_DEVICES",
    "MEMORY_GB",
    "MICROBATCHES",
    "NUM_BYTES",
    "OPTIMIZER_RATIO",
    "SEED",
    "SHARE",
    "SHARED_GB_PER_S",
    "SPEED",
    "THREADS",
    "TIME_MS",
    "Limits",
    "number_text",
    "require_choice",
    "require_count",
    "require_figure",
    "require_number",
    "require_plan_size",
    "require_seed",
    "require_text",
]

Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The numbers that a quantity may have: from `least` to `most`, and 0 if it may be zero."""

    noun: str
    """What is limited, for messages: "a time"."""
    least: float
    most: float
    may_be_zero: bool = True


TIME_MS = Limits(noun="a time", least=1e-6, most=1e12)
LATENCY_US = Limits(noun="a latency", least=1e-3, most=1e12)
NUM_BYTES = Limits(noun="a number of bytes", least=1, most=1e18)
BANDWIDTH_GB_PER_S = Limits(noun="a bandwidth", least=1e-6, most=1e9)
SHARED_GB_PER_S = Limits(noun="a bandwidth", least=1e-6, most=1e9, may_be_zero=False)
MEMORY_GB = Limits(noun="a memory", least=1e-6, most=1e9)
SPEED = Limits(noun="a speed", least=1e-3, most=1e3, may_be_zero=False)
SHARE = Limits(noun="a share", least=1e-6, most=1, may_be_zero=False)
OPTIMIZER_RATIO = Limits(noun="this ratio", least=0, most=1e3)
COUNT = Limits(noun="a count", least=1, most=10**9, may_be_zero=False)
MICROBATCHES = Limits(noun="their number", least=1, most=65_536, may_be_zero=False)
GRADIENT_BUCKETS = Limits(noun="their number", least=1, most=1000, may_be_zero=False)
SEED = Limits(noun="a seed", least=0, most=2**64 - 1)

THREADS = Limits(noun="their number", least=1, most=1024, may_be_zero=False)

MAX_DEVICES = 10_000
"""In shorthand; with a matrix for all pairs up to `MAX_LISTED_DEVICES`."""
MAX_LISTED_DEVICES = 4096
MAX_LAYERS = 100_000
MAX_BLOCKS = 10_000_000
"""Of a plan's whole schedule; more than this would be a file of over 100 MB."""

LONG_NUMBER_BITS = 1000
"""Beyond this a whole number is described by its digits: Python refuses to print the longest."""


def require_number(error: type[InputError], name: str, number: Any, limits: Limits) -> None:
    """Refuse what is no number or lies outside its limits, with `error`."""
    require_figure(error, name, number)
    if number == 0:
        if limits.may_be_zero:
            return
        raise error(f"{name}: 0 is not above zero")
    if number < limits.least:
        unless = " unless it is 0" if limits.may_be_zero else ""
        raise error(
            f"{name}: {number_text(number)} is below {number_text(limits.least)},"
            f" the least that {limits.noun} may be{unless}"
        )
    if number > limits.most:
        raise error(f"{name}: {_above(number, limits)}")


def require_figure(
    error: type[InputError], name: str, number: Any, *, may_be_negative: bool = False
) -> None:
    """Refuse what is no number, is not finite or is negative, with `error`."""
    _require_real(error, name, number)
    # A whole number of any length is finite; `math.isfinite` cannot take the longest.
    if not isinstance(number, int) and not math.isfinite(number):
        raise error(f"{name}: {number} is not a finite number")
    if number < 0 and not may_be_negative:
        raise error(f"{name}: {number_text(number)} is negative")


def require_count(error: type[InputError], name: str, number: Any, limits: Limits = COUNT) -> None:
    """Refuse what is no whole number or lies outside its limits, with `error`."""
    _require_real(error, name, number)
    if not isinstance(number, numbers.Integral):
        raise error(f"{name}: {number_text(number)} is not a whole number")
    whole = int(number)
    if whole < limits.least:
        raise error(f"{name}: {number_text(whole)} is not at least {limits.least}")
    if whole > limits.most:
        raise error(f"{name}: {_above(whole, limits)}")


def require_text(error: type[InputError], name: str, value: Any) -> None:
    """Refuse what is no text, with `error`."""
    if not isinstance(value, str):
        raise error(f"{name}: {_short(value)} is not text")


def require_choice(error: type[InputError], name: str, value: Any, kind: type[Choice]) -> Choice:
    """The member of `kind` that this is, or is the text of; anything else is refused."""
    if not isinstance(value, str) or value not in tuple(kind):
        raise error(f"{name}: {_short(value)} is none of {', '.join(kind)}")
    return kind(value)


def require_seed(seed: Any) -> None:
    """Refuse what is no whole number of 64 bits."""
    try:
        require_count(InputError, "seed", seed, SEED)
    except InputError as problem:
        raise InputError(f"{problem}; a seed is a whole number from 0 to 2**64 - 1") from None


def require_plan_size(num_stages: int, microbatches: int) -> None:
    """Refuse a plan with more blocks than a plan file may hold.

    Call it with the most stages that a plan may get before planning: what is refused here could
    not be written either.
    """
    num_blocks = 2 * num_stages * microbatches
    if num_blocks > MAX_BLOCKS:
        raise PlanFileError(
            f"microbatches: {microbatches} in {num_stages} stages make {num_blocks:,} blocks, more"
            f" than the {MAX_BLOCKS:,} that a plan may have; use fewer microbatches"
        )


def number_text(number: Any) -> str:
    """The number as short as it can be told from its neighbours; safe for numbers of any length."""
    if isinstance(number, numbers.Integral):
        whole = int(number)
        if whole.bit_length() > LONG_NUMBER_BITS:
            sign = "negative " if whole < 0 else ""
            return f"a {sign}number of about {round(whole.bit_length() * math.log10(2)):,} digits"
        return str(whole) if abs(whole) < 10**21 else f"{whole:g}"
    short, exact = f"{float(number):g}", repr(float(number))
    return short if float(short) == number and len(short) <= len(exact) else exact


def _above(number: Any, limits: Limits) -> str:
    return (
        f"{number_text(number)} is above {number_text(limits.most)},"
        f" the most that {limits.noun} may be"
    )


def _require_real(error: type[InputError], name: str, number: Any) -> None:
    if type(number) is float or type(number) is int:  # the usual ones, at once
        return
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise error(f"{name}: {_short(number)} is not a number")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
