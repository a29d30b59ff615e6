"""Every foreign format that can be written, by its name, and what becomes of a refusal."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from pipeplan.checker import memory_excesses
from pipeplan.documents.text import excerpt, nearest
from pipeplan.errors import InputError
from pipeplan.interop.chakra import export_chakra
from pipeplan.interop.deepspeed import export_deepspeed
from pipeplan.interop.exported import CannotExport, Exported, Exporter, ExportSettings
from pipeplan.interop.grid_plan import export_grid_plan
from pipeplan.interop.layer_roles import Role
from pipeplan.interop.megatron import export_megatron
from pipeplan.interop.nearest import describe, find_nearest
from pipeplan.interop.source_text import json_in
from pipeplan.interop.timeline_csv import export_timeline_csv
from pipeplan.interop.torch_schedule import export_torch_csv
from pipeplan.interop.torchtitan import export_torchtitan
from pipeplan.pipeline import Plan, unpack_codes
from pipeplan.replaying import Replayed, replay_plan
from pipeplan.schedules import PORTFOLIO

__all__ = ["ALL_FORMATS", "FORMATS", "TRACE", "export_plan", "parse_layer_map"]

PLAIN, EVEN = "--positions 1 --no-split-backward", "--uniform-replicas --schedule 1f1b"
"""Options that make plans without families, and plans in the only order that a program runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How to write one format."""

    export: Exporter
    rules: tuple[str, ...] = PORTFOLIO
    """The orders that the program can run, for the nearest plan."""
    takes_map: bool = False
    """Whether it needs to know what the layers are."""
    takes_groups: bool = False
    """Whether it can express several stages a device, and I and W."""
    options: str = PLAIN
    """What makes plans that it can express."""


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "torch-csv": Format(export=export_torch_csv, takes_groups=True),
        "torchtitan": Format(export=export_torchtitan, takes_map=True, takes_groups=True),
        "megatron": Format(
            export=export_megatron,
            rules=("1f1b",),
            takes_map=True,
            takes_groups=True,
            options=EVEN,
        ),
        "deepspeed": Format(export=export_deepspeed, rules=("1f1b",), options=EVEN),
        "grid-plan": Format(export=export_grid_plan, takes_groups=True),
        "csv": Format(export=export_timeline_csv, takes_groups=True),
        "chakra": Format(export=export_chakra),
    }
)

TRACE = "chrome-trace"
"""The one format that is not written here: `pipeplan trace` writes the same file."""
ALL_FORMATS = (*FORMATS, TRACE)


def export_plan(
    plan: Plan, target: str, settings: ExportSettings, *, take_nearest: bool = False
) -> Exported:
    """The plan as files of another program.

    If the program cannot express it, `CannotExport` names the reason and the nearest plan; with
    `take_nearest` that plan is exported instead, and a note says what it costs.
    """
    if target not in FORMATS:
        raise InputError(f"to: {target!r} is no format{nearest(target, ALL_FORMATS)}")
    chosen = FORMATS[target]
    if settings.layer_map and not chosen.takes_map:
        raise InputError(f"map: does not apply to {target}; leave it out")
    replayed = replay_plan(plan)
    try:
        done = _export(chosen, replayed, settings)
        return replace(done, notes=(*done.notes, *replayed.warnings))
    except CannotExport as problem:
        reason = str(problem)
    reasons = [reason]

    def accept(each: Replayed) -> None:
        try:
            _export(chosen, each, settings)
        except CannotExport as problem:
            reasons.append(str(problem))
            raise

    other = find_nearest(replayed, accept, chosen.rules)
    if other is None:
        # Other plans may fail for another reason, which is then the one to mend.
        others = "" if reasons[-1] == reason else f"; others: {reasons[-1]}"
        raise CannotExport(
            f"{target}: {reason}; no plan of this model and cluster can be exported{others}"
        )
    words = describe(other, replayed)
    if not take_nearest:
        again = f", or plan with {chosen.options}" if plan.uses_families else ""
        again += " and without --shard-optimizer" if plan.shard_optimizer else ""
        raise CannotExport(f"{target}: {reason}; the nearest plan is {words}: add --nearest{again}")
    done = _export(chosen, other, settings)
    return replace(done, notes=(f"{reason}; exported is the nearest plan: {words}", *done.notes))


def _export(chosen: Format, replayed: Replayed, settings: ExportSettings) -> Exported:
    """The files, with a line about memory if the plan needs more than there is."""
    if replayed.plan.uses_families and not chosen.takes_groups:
        raise CannotExport(f"the plan has {_families(replayed.plan)}, which cannot be said there")
    return _with_memory_note(chosen.export(replayed, settings), replayed)


def _families(plan: Plan) -> str:
    """What the plan uses beyond one stage a device with whole backwards."""
    codes = [plan.schedule.group_codes(group) for group in range(len(plan.schedule))]
    used = {
        "several stages a device": len(plan.schedule) < len(plan.stages),
        "backwards cut in two": any((unpack_codes(each)[1] > 1).any() for each in codes),
        "gradient buckets": any(stage.gradient_buckets > 1 for stage in plan.stages),
        "a sharded optimizer": plan.shard_optimizer,
    }
    return " and ".join(name for name, is_used in used.items() if is_used)


def _with_memory_note(done: Exported, replayed: Replayed) -> Exported:
    """The export with a line about memory, if the plan needs more than there is."""
    excesses = memory_excesses(replayed.plan, replayed.cost)
    return replace(done, notes=(*done.notes, *(f"memory: {each}" for each in excesses[:1])))


def parse_layer_map(text: str) -> dict[str, str | tuple[str, ...]]:
    """The map in a JSON text: from a layer's name to its role, or to the list of its modules."""
    document = json_in(text)
    if not isinstance(document, dict):
        raise InputError("map: is not an object that goes from layers to roles or modules")
    return {name: _map_entry(name, entry) for name, entry in document.items()}


def _map_entry(name: str, entry: Any) -> str | tuple[str, ...]:
    if isinstance(entry, str) and entry in tuple(Role):
        return entry
    if isinstance(entry, list) and all(isinstance(module, str) for module in entry):
        return tuple(entry)
    raise InputError(
        f"map: {excerpt(name)}: {excerpt(entry)} is neither a list of modules nor one of"
        f" {', '.join(Role)}"
    )
