"""Changes from the command line: `h1d0=0.5`, `h0,h1=1.25`, `2x4:12,memory=24`.

Names may hold `,` and `=`. So the last `=` counts, and of several commas the one between two names
that the cluster has.
"""

import re
from collections.abc import Container, Sequence

from pipeplan.documents.text import excerpt
from pipeplan.errors import InputError
from pipeplan.planning.whatif.changes import AddedHosts, Changes

__all__ = ["ADD_SYNTAX", "parse_added", "parse_changes"]

ADD_SYNTAX = "2x4:12,between=1.25,memory=24,speed=0.5,latency=25"
HOSTS = re.compile(r"(?:(?P<count>\d{1,9})x)?(?P<devices>\d{1,9})(?::(?P<gb_per_s>[^,:=]+))?")
SETTINGS = {
    "between": "between_gb_per_s",
    "memory": "memory_gb",
    "speed": "speed",
    "latency": "latency_us",
}


def parse_changes(
    known: Container[str],
    *,
    slower: Sequence[str] = (),
    links: Sequence[str] = (),
    lose: Sequence[str] = (),
    add: Sequence[str] = (),
) -> Changes:
    """The changes that the options of the command line name; `known` are the cluster's names."""
    factors: dict[str, float] = {}
    for text in slower:
        name, factor = _assigned("--slower", text, "h1d0=0.5")
        _require_new("--slower", name, factors)
        factors[name] = factor
    pairs: dict[tuple[str, str], float] = {}
    for text in links:
        both, gb_per_s = _assigned("--link", text, "h0,h1=1.25")
        pair = _pair(both, known)
        for same in (pair, pair[::-1]):
            _require_new("--link", same, pairs)
        pairs[pair] = gb_per_s
    return Changes(
        slower=factors,
        links=pairs,
        lose=tuple(lose),
        add=tuple(parse_added(text) for text in add),
    )


def parse_added(text: str) -> AddedHosts:
    """New hosts: `2x4:12` is two hosts of four devices with 12 GB/s between these."""
    first, *settings = text.split(",")
    match = HOSTS.fullmatch(first.strip())
    if match is None:
        raise InputError(
            f"--add: {excerpt(text)} does not begin with hosts x devices;"
            f" write it like {ADD_SYNTAX}"
        )
    fields: dict[str, float] = {}
    if match["gb_per_s"]:
        fields["bandwidth_gb_per_s"] = _number("--add", text, match["gb_per_s"])
    for setting in settings:
        name, _, number = setting.partition("=")
        field = SETTINGS.get(name.strip())
        if field is None:
            raise InputError(
                f"--add: {excerpt(name.strip())} is none of {', '.join(SETTINGS)};"
                f" write it like {ADD_SYNTAX}"
            )
        _require_new("--add", name.strip(), {n: 0 for n, f in SETTINGS.items() if f in fields})
        fields[field] = _number("--add", text, number)
    return AddedHosts(count=int(match["count"] or 1), devices=int(match["devices"]), **fields)


def _assigned(option: str, text: str, example: str) -> tuple[str, float]:
    name, equals, number = text.rpartition("=")
    if not equals or not name:
        raise InputError(f"{option}: {excerpt(text)} has no '='; write it like {example}")
    return name, _number(option, text, number)


def _number(option: str, text: str, number: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise InputError(f"{option}: {excerpt(number)} in {excerpt(text)} is no number") from None


def _pair(text: str, known: Container[str]) -> tuple[str, str]:
    """The two names; a comma between two known names goes before others."""
    parts = text.split(",")
    ways = [(",".join(parts[:at]), ",".join(parts[at:])) for at in range(1, len(parts))]
    if not ways:
        raise InputError(f"--link: {excerpt(text)} is not two names; write it like h0,h1=1.25")
    return next((pair for pair in ways if pair[0] in known and pair[1] in known), ways[0])


def _require_new(option: str, name: object, known: Container[object]) -> None:
    if name in known:
        raise InputError(f"{option}: {excerpt(name)} is given twice; name it once")
