"""Numbers with their units, for people."""

from pipeplan.cost import BYTES_IN_GB

__all__ = [
    "humanise_bytes",
    "humanise_count",
    "humanise_gb",
    "humanise_ms",
    "percent",
    "short_ms",
    "signed_percent",
]


def humanise_ms(ms: float) -> str:
    """A time in the unit that keeps it short: `12.3 ms`, `4.56 s`."""
    if ms >= 10_000:
        return f"{ms / 1e3:.4g} s"
    return f"{ms:.3f} ms" if ms < 10 else f"{ms:.1f} ms"


def humanise_gb(gb: float) -> str:
    """A memory size: `1.25 GB`, `320 MB`."""
    return f"{gb:.3g} GB" if gb >= 1 else f"{gb * 1e3:.3g} MB"


def humanise_count(number: float) -> str:
    """A large number: `335 M`, `6.74 G`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def humanise_bytes(num_bytes: float) -> str:
    """A size in bytes, down to single ones: `4.19 MB`, `320 B`."""
    if num_bytes >= 1e6:
        return humanise_gb(num_bytes / BYTES_IN_GB)
    return f"{num_bytes / 1e3:.3g} kB" if num_bytes >= 1e3 else f"{num_bytes:.3g} B"


def short_ms(ms: float) -> str:
    """A time in ms as a cell of a table shows it, without its unit."""
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 10 else f"{ms:.3g}"


def percent(part: float) -> str:
    """A part of a whole: `12.5 %`."""
    return f"{100 * part:.1f} %"


def signed_percent(change: float) -> str:
    """A change: `+12.5 %`, `-3.0 %`; one that rounds to nothing has no sign."""
    text = f"{100 * change:+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text
