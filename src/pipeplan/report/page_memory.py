"""What each device's memory holds at its peak, as the page shows it: a bar with the limit."""

from dataclasses import dataclass

from pipeplan.report.analysis.memory import MemoryParts
from pipeplan.report.analysis.plan_analysis import PlanAnalysis
from pipeplan.report.colours import stage_colour
from pipeplan.report.names import short_text
from pipeplan.report.units import humanise_gb

__all__ = ["PART_WORDS", "MemoryBar", "MemoryPart", "memory_bars", "memory_caption"]

PART_WORDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
}
MAX_NAMES = 4
FARTHEST_LIMIT = 4.0
"""A limit that is farther away than so many times the largest peak is not drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """One part of a bar."""

    name: str
    words: str
    amount: str
    width: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBar:
    """The devices of one group, which mostly is a stage, that need the same."""

    stage: int
    """The number of the group."""
    colour: str
    devices: str
    parts: list[MemoryPart]
    peak: str
    limit: str
    """In words; empty where there is none."""
    limit_at: str
    """Where the mark of the limit stands; empty where it is too far away to be drawn."""
    fits: bool
    in_flight: int
    recomputes: bool


def memory_bars(analysis: PlanAnalysis) -> list[MemoryBar]:
    """A bar for each kind of device, all on one scale."""
    peaks_gb = [peak for memory in analysis.memory for peak in memory.peak_gb]
    limits_gb = [limit for memory in analysis.memory for limit in memory.limit_gb if limit]
    near_gb = [limit for limit in limits_gb if limit <= FARTHEST_LIMIT * max(peaks_gb)]
    full_gb = max(*peaks_gb, *near_gb, 0.0) or 1.0
    groups = range(len(analysis.groups))
    return [bar for index in groups for bar in _group(analysis, index, full_gb)]


def _group(analysis: PlanAnalysis, index: int, full_gb: float) -> list[MemoryBar]:
    memory, devices = analysis.memory[index], analysis.plan.cluster.devices
    alike: dict[tuple[MemoryParts, float | None], list[int]] = {}
    for position, parts in enumerate(memory.parts):
        alike.setdefault((parts, memory.limit_gb[position]), []).append(position)
    return [
        MemoryBar(
            stage=index,
            colour=stage_colour(analysis.groups[index].stages[0]),
            devices=_names([devices[memory.devices[position]].name for position in positions]),
            parts=[_part(name, parts, full_gb) for name in PART_WORDS],
            peak=humanise_gb(parts.total_gb),
            limit="" if limit_gb is None else humanise_gb(limit_gb),
            limit_at=_percent(limit_gb, full_gb) if limit_gb and limit_gb <= full_gb else "",
            fits=memory.needs[positions[0]].fits,
            in_flight=memory.most_in_flight,
            recomputes=any(
                analysis.plan.stages[stage].recompute for stage in analysis.groups[index].stages
            ),
        )
        for (parts, limit_gb), positions in alike.items()
    ]


def _part(name: str, parts: MemoryParts, full_gb: float) -> MemoryPart:
    size_gb = float(getattr(parts, f"{name}_gb"))
    return MemoryPart(
        name=name,
        words=PART_WORDS[name],
        amount=humanise_gb(size_gb),
        width=_percent(size_gb, full_gb),
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3f}%"


def _names(names: list[str]) -> str:
    shown = " ".join(short_text(name, 16) for name in names[:MAX_NAMES])
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return shown + more


def memory_caption(analysis: PlanAnalysis) -> str:
    """How the fullest device's memory is used, in a sentence."""
    index, position = max(
        (
            (index, position)
            for index, memory in enumerate(analysis.memory)
            for position in range(len(memory.devices))
        ),
        key=lambda at: (
            not analysis.memory[at[0]].needs[at[1]].fits,
            analysis.memory[at[0]].peak_gb[at[1]],
        ),
    )
    memory = analysis.memory[index]
    parts, limit_gb = memory.parts[position], memory.limit_gb[position]
    name = short_text(analysis.plan.cluster.devices[memory.devices[position]].name)
    activations = parts.activations_gb / (parts.total_gb or 1.0)
    noun = "group" if len(analysis.groups) < analysis.num_stages else "stage"
    room = "" if limit_gb is None else f" of its {humanise_gb(limit_gb)}"
    return (
        f"{name} in {noun} {index} needs the most: {humanise_gb(parts.total_gb)}{room},"
        f" {100 * activations:.0f} % of it activations of {_microbatches(memory.most_in_flight)}."
    )


def _microbatches(count: int) -> str:
    return "1 microbatch" if count == 1 else f"{count} microbatches in flight"
