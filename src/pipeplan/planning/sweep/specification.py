"""What to sweep over: the `pipeplan.sweep/1` file, read and validated."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pipeplan.documents.syntax import read_document
from pipeplan.documents.text import excerpt, nearest
from pipeplan.errors import InputError
from pipeplan.planning.options import PlanningOptions
from pipeplan.validation import MICROBATCHES, SEED

__all__ = ["SweepSpec", "read_spec"]

SPEC_FORMAT = "pipeplan.sweep/1"
MAX_CASES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec(PlanningOptions):
    """The axes of the grid, and the options for all its cases.

    Models and clusters are names of the zoo or files. There is no time limit among the settings:
    with one, two runs of the same sweep would differ.
    """

    models: tuple[str, ...]
    clusters: tuple[str, ...]
    microbatches: tuple[int, ...]
    planners: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        PlanningOptions.__post_init__(self)
        for name in ("models", "clusters", "planners"):
            _require_axis(name, getattr(self, name), str)
        _require_axis("microbatches", self.microbatches, int, 1, int(MICROBATCHES.most))
        _require_axis("seeds", self.seeds, int, 0, int(SEED.most))
        if self.num_cases > MAX_CASES:
            raise InputError(f"sweep: has {self.num_cases} cases, more than {MAX_CASES}; divide it")

    @property
    def num_cases(self) -> int:
        """The number of cells of the grid."""
        axes = (self.models, self.clusters, self.microbatches, self.planners, self.seeds)
        return math.prod(len(axis) for axis in axes)


def read_spec(path: str | Path) -> SweepSpec:
    """The specification in a YAML or JSON file; unknown fields are refused."""
    document = read_document(path, InputError)
    try:
        return _parse_spec(document)
    except InputError as problem:
        raise InputError(f"{path}: {problem}") from None


def _parse_spec(document: Any) -> SweepSpec:
    if not isinstance(document, dict):
        raise InputError("format: is missing; a file holds one object with the fields of a sweep")
    known = ("format", *(field.name for field in fields(SweepSpec)))
    for name in document:
        if name not in known:
            near = nearest(str(name), known)
            raise InputError(f"{_field_name(name)}: is not a field of a sweep{near}")
    if document.get("format") != SPEC_FORMAT:
        given = excerpt(document.get("format"))
        raise InputError(f"format: {given} is not {SPEC_FORMAT!r}, which is needed")
    values: dict[str, Any] = {
        name: _list_of(document, name)
        for name in ("models", "clusters", "microbatches", "planners", "seeds")
        if name != "seeds" or name in document
    }
    options = [field.name for field in fields(PlanningOptions)]
    values.update({name: document[name] for name in options if name in document})
    return SweepSpec(**values)


def _list_of(document: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    if name not in document:
        raise InputError(f"{name}: is missing; give a list")
    if not isinstance(document[name], list):
        raise InputError(f"{name}: is not a list with at least one entry")
    return tuple(document[name])


def _require_axis(
    name: str, values: tuple[Any, ...], kind: type, least: int = 0, most: int = 0
) -> None:
    """Refuse anything but texts, or whole numbers within the limits, each of them once."""
    if not values:
        raise InputError(f"{name}: is not a list with at least one entry")
    seen = set()
    for index, value in enumerate(values):
        where = f"{name}[{index}]"
        if type(value) is not kind:  # True is an int, but no number here
            wanted = "text" if kind is str else "a whole number"
            raise InputError(f"{where}: {excerpt(value)} is not {wanted}")
        if isinstance(value, int) and value < least:
            raise InputError(f"{where}: {excerpt(value)} is not at least {least}")
        if isinstance(value, int) and value > most:
            raise InputError(f"{where}: {excerpt(value)} is more than {most}")
        if value in seen:
            raise InputError(f"{where}: {excerpt(value)} stands twice")
        seen.add(value)


def _field_name(name: Any) -> str:
    plain = isinstance(name, str) and name.isidentifier() and len(name) <= 60
    return name if plain else excerpt(name)
