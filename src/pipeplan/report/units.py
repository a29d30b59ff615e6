"""Numbers with their units, for people."""

__all__ = ["humanise_count", "humanise_gb", "humanise_ms"]


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
