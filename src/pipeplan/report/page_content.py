"""What the page says in words and numbers: key figures, bars, stage rows."""

import math
from dataclasses import dataclass

from pipeplan.pipeline import BoundLimit, BoundScope, Plan, Stage
from pipeplan.report.analysis.cuts import Cut
from pipeplan.report.analysis.idle import Shares
from pipeplan.report.analysis.memory import NeededMemory
from pipeplan.report.analysis.plan_analysis import PlanAnalysis
from pipeplan.report.colours import stage_colour
from pipeplan.report.names import short_text
from pipeplan.report.units import humanise_gb, humanise_ms, percent, short_ms

__all__ = [
    "STAGE_COLUMNS",
    "Bar",
    "Figure",
    "StageRow",
    "bar_parts",
    "critical_path_note",
    "footer",
    "key_figures",
    "memory_label",
    "num_folded",
    "stage_rows",
    "subtitle",
]

MAX_ROWS = 16
"""Of more stages the table shows some, and the others if asked to."""
FIRST_ROWS, LAST_ROWS = 10, 4
MAX_NAMES = 6
"""Of more devices a stage's row names the first and the last."""
SHARE_WORDS = {
    "compute": "computing",
    "communication": "waiting for links",
    "all_reduce": "all-reduce",
    "bubble": "idle otherwise",
}
SCOPE_WORDS = {
    BoundScope.ANY: "no plan is faster",
    BoundScope.EVEN_SHARES: "no plan with even shares is faster",
    BoundScope.FAMILIES: "no plan with even shares is faster, whatever stages a device has",
}
LIMIT_WORDS = {
    BoundLimit.WHOLE_SAMPLES: "whole samples",
    BoundLimit.MEMORY: "memory",
    BoundLimit.CONSTRAINTS: "what was asked",
}
STAGE_COLUMNS = (
    ("stage", ""),
    ("layers", ""),
    ("devices", ""),
    ("forward", "number"),
    ("backward", "number"),
    ("send / return", "number"),
    ("all-reduce", "number"),
    ("utilisation", "number"),
    ("memory", "number"),
    ("why cut behind it", ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One key figure: its name, its value, and a remark."""

    what: str
    value: str
    more: str
    kind: str = ""
    """`lead` for the first one, `bad` where something is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One part of a bar that shows where the time goes."""

    name: str
    words: str
    percent: str
    width: str
    label: str
    """What stands inside, in a bar that is high enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """A stage as its row of the table shows it."""

    index: int
    colour: str
    layers: str
    layer_names: str
    devices: str
    device_notes: str
    forward: str
    backward: str
    sends: str
    all_reduce: str
    utilisation: str
    meter: str
    peak_memory: str
    fits: bool
    in_flight: int
    cut: Cut | None
    is_folded: bool
    """Whether the table shows this row only if asked to."""


def subtitle(analysis: PlanAnalysis) -> str:
    """How large the plan is."""
    plan = analysis.plan
    unused = plan.cluster.num_devices - analysis.num_used_devices
    spare = f", {unused} unused" if unused else ""
    return (
        f"{_count(plan.microbatches, 'microbatch', 'microbatches')} of"
        f" {_count(plan.model.microbatch_size, 'sample', 'samples')},"
        f" {_count(analysis.num_stages, 'stage', 'stages')}{_groups(analysis)} on"
        f" {_count(analysis.num_used_devices, 'device', 'devices')}{spare}"
    )


def _groups(analysis: PlanAnalysis) -> str:
    """In how many groups the stages are, where these are fewer."""
    count = len(analysis.groups)
    return f" in {_count(count, 'group', 'groups')}" if count < analysis.num_stages else ""


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


# -------------------------------------------------------------------------- key figures


def key_figures(analysis: PlanAnalysis, claimed_ms: float | None) -> list[Figure]:
    """The figures that people look for first.

    Args:
        analysis: of the plan, whose predicted figures are those of its replay.
        claimed_ms: the iteration time that the plan's file states, if it states one.
    """
    plan, iteration_ms = analysis.plan, analysis.iteration_ms
    samples = plan.microbatches * plan.model.microbatch_size
    rate = 1e3 * samples / iteration_ms if iteration_ms else math.inf
    return [
        _iteration_figure(iteration_ms, claimed_ms),
        Figure(what="samples a second", value=_rate(rate), more=f"{samples} an iteration"),
        Figure(
            what="bubble",
            value=percent(1 - analysis.shares.compute),
            more="of devices' time not computing",
        ),
        _bound_figure(analysis),
        _guarantee_figure(plan),
        _memory_figure(analysis),
    ]


def _iteration_figure(iteration_ms: float, claimed_ms: float | None) -> Figure:
    agrees = claimed_ms is None or math.isclose(
        claimed_ms, iteration_ms, rel_tol=1e-6, abs_tol=1e-9
    )
    more = "simulated" if agrees else f"the plan says {humanise_ms(claimed_ms or 0.0)}"
    kind = "lead" if agrees else "lead bad"
    return Figure(what="iteration", value=humanise_ms(iteration_ms), more=more, kind=kind)


def _bound_figure(analysis: PlanAnalysis) -> Figure:
    plan = analysis.plan
    bound = plan.predicted.bound if plan.predicted else None
    if bound is None:
        return Figure(what="lower bound", value="none", more="not computed by this planner")
    within = ", ".join(LIMIT_WORDS[limit] for limit in bound.limits)
    more = f"{analysis.verdict}; {SCOPE_WORDS[bound.scope]}"
    if within:
        more += f" within: {within}"
    return Figure(what="lower bound", value=humanise_ms(bound.lower_bound_ms), more=more)


def _guarantee_figure(plan: Plan) -> Figure:
    guarantee_ms = plan.predicted.schedule_guarantee_ms if plan.predicted else None
    if guarantee_ms is None:
        return Figure(what="guarantee", value="none", more="only for the PE schedule")
    more = "the schedule's theorem: no longer"
    return Figure(what="guarantee", value=humanise_ms(guarantee_ms), more=more)


def _memory_figure(analysis: PlanAnalysis) -> Figure:
    need, num_excesses = _largest_need(analysis)
    return Figure(
        what="peak memory",
        value=humanise_gb(need.peak_gb),
        more=_need_words(analysis, need, num_excesses),
        kind="bad" if num_excesses else "",
    )


def memory_label(analysis: PlanAnalysis) -> str:
    """What the picture of the memory shows, for those who do not see it."""
    return f"Memory over time, at most {_need_words(analysis, *_largest_need(analysis))}"


def _largest_need(analysis: PlanAnalysis) -> tuple[NeededMemory, int]:
    """The largest need, one that does not fit before all others; how many do not fit."""
    needs = [need for memory in analysis.memory for need in memory.needs]
    excesses = [need for need in needs if not need.fits]
    return max(excesses or needs, key=lambda need: need.peak_gb), len(excesses)


def _need_words(analysis: PlanAnalysis, need: NeededMemory, num_excesses: int) -> str:
    name = short_text(analysis.plan.cluster.devices[need.device].name)
    room = "no limit" if need.limit_gb is None else f"it has {humanise_gb(need.limit_gb)}"
    more = f"; {num_excesses} do not fit" if num_excesses else ""
    return f"on {name}, {room}{more}"


def _rate(rate: float) -> str:
    if math.isinf(rate):
        return "unlimited"
    return f"{rate:.4g}" if rate < 1e4 else f"{rate:.0f}"


# ---------------------------------------------------------------------------- the bars


def bar_parts(shares: Shares) -> list[Bar]:
    """The four parts of a bar."""
    parts = []
    for name, words in SHARE_WORDS.items():
        share = getattr(shares, name)
        parts.append(
            Bar(
                name=name,
                words=words,
                percent=percent(share),
                width=f"{100 * share:.3f}%",
                label=percent(share) if share > 0.07 and name != "bubble" else "",
            )
        )
    return parts


def critical_path_note(analysis: PlanAnalysis) -> str:
    """What the critical path consists of."""
    path = analysis.critical_shares
    return (
        f"The critical path, {humanise_ms(analysis.iteration_ms)} without a gap:"
        f" {percent(path.compute)} computing, {percent(path.communication)} on links,"
        f" {percent(path.all_reduce)} all-reduce."
    )


# -------------------------------------------------------------------------- the stages


def stage_rows(analysis: PlanAnalysis) -> list[StageRow]:
    """The rows of the table of stages."""
    folded = _folded(analysis)
    return [
        _stage_row(analysis, index, is_folded=index in folded)
        for index in range(analysis.num_stages)
    ]


def stage_columns(analysis: PlanAnalysis) -> tuple[tuple[str, str], ...]:
    """The columns of the table of stages; with groups nothing is said of the cuts."""
    return STAGE_COLUMNS[:-1] if analysis.has_groups else STAGE_COLUMNS


def _stage_row(analysis: PlanAnalysis, index: int, *, is_folded: bool) -> StageRow:
    stage, figures = analysis.plan.stages[index], analysis.stages[index]
    group = analysis.group_of(index)
    memory = analysis.memory[group]
    layers, layer_names = _layers(analysis.plan, stage)
    devices, device_notes = _devices(analysis.plan, stage, has_speeds=analysis.has_speeds)
    if len(analysis.groups) < analysis.num_stages:
        device_notes = f"group {group}" + (f", {device_notes}" if device_notes else "")
    sends = ""
    is_sent = index + 1 < analysis.num_stages and analysis.group_of(index + 1) != group
    if is_sent and figures.send_ms is not None and figures.return_ms is not None:
        sends = f"{short_ms(figures.send_ms)} / {short_ms(figures.return_ms)}"
    return StageRow(
        index=index,
        colour=stage_colour(index),
        layers=layers,
        layer_names=layer_names,
        devices=devices,
        device_notes=device_notes,
        forward=short_ms(figures.forward_ms),
        backward=short_ms(figures.backward_ms),
        sends=sends,
        all_reduce=short_ms(figures.all_reduce_ms) if stage.num_replicas > 1 else "",
        utilisation=percent(figures.utilisation),
        meter=f"{100 * figures.utilisation:.1f}%",
        peak_memory=humanise_gb(max(memory.peak_gb)),
        fits=all(need.fits for need in memory.needs),
        in_flight=memory.most_in_flight,
        cut=figures.cut,
        is_folded=is_folded,
    )


def num_folded(analysis: PlanAnalysis) -> int:
    """How many rows of the table of stages are hidden at first."""
    return len(_folded(analysis))


def _folded(analysis: PlanAnalysis) -> frozenset[int]:
    """Of many stages all but the first, the last, and those that stand out."""
    count = analysis.num_stages
    if count <= MAX_ROWS:
        return frozenset()
    bottleneck = analysis.bottleneck.stage
    return frozenset(
        index
        for index in range(FIRST_ROWS, count - LAST_ROWS)
        if index != bottleneck
        and all(need.fits for need in analysis.memory[analysis.group_of(index)].needs)
    )


def _layers(plan: Plan, stage: Stage) -> tuple[str, str]:
    """The numbers and the names of a stage's first and last layer."""
    names = [short_text(plan.model.layers[n].name) for n in (stage.layers[0], stage.layers[-1])]
    if len(stage.layers) == 1:
        return str(stage.layers.start), names[0]
    return f"{stage.layers.start} to {stage.layers.stop - 1}", f"{names[0]} to {names[1]}"


def _devices(plan: Plan, stage: Stage, *, has_speeds: bool) -> tuple[str, str]:
    """The names of a stage's devices, and what else there is to say of them."""

    def name_of(position: int) -> str:
        name = short_text(plan.cluster.devices[stage.devices[position]].name, 16)
        return name if stage.shares is None else f"{name} ({percent(stage.shares[position])})"

    if stage.num_replicas > MAX_NAMES:
        shown = f"{name_of(0)} to {name_of(stage.num_replicas - 1)}"
    else:
        shown = " ".join(name_of(position) for position in range(stage.num_replicas))
    notes = []
    if stage.num_replicas > 1:
        notes.append(f"{stage.num_replicas} replicas")
    if has_speeds:
        speeds = [plan.cluster.devices[device].speed for device in stage.devices]
        low, high = min(speeds), max(speeds)
        notes.append(f"speed {low:g}" if low == high else f"speeds {low:g} to {high:g}")
    if stage.recompute:
        notes.append("recomputes")
    return shown, ", ".join(notes)


def footer(plan: Plan) -> str:
    """Where the plan comes from."""
    model, cluster = plan.model, plan.cluster
    version = f"pipeplan {short_text(plan.version)}" if plan.version else "pipeplan"
    return (
        f"Planner {short_text(plan.planner)}, seed {plan.seed}, {version}. Model"
        f" {short_text(model.name, 60)}: {_count(model.num_layers, 'layer', 'layers')}. Cluster"
        f" {short_text(cluster.name, 60)}: {_count(cluster.num_devices, 'device', 'devices')},"
        f" {cluster.duplex} duplex."
    )
