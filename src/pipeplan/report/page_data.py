"""The numbers that the page's script draws from, as JSON with base64 arrays inside.

A plan with up to `MAX_ITEMS` items sends them all, and the script finds the rest from them. A
larger plan sends a summary, whose size depends on its number of stages alone.
"""

import base64
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.pipeline import GroupTimeline
from pipeplan.report.analysis.plan_analysis import PlanAnalysis
from pipeplan.report.analysis.shared_links import MAX_USE_CHANGES
from pipeplan.report.analysis.summary import summarise
from pipeplan.report.colours import stage_colour
from pipeplan.report.trace import MAX_EVENTS, count_events
from pipeplan.simulator import Run

__all__ = ["is_summary", "summary_note", "timeline_data"]

MAX_ITEMS = 600_000
"""Blocks and transfers; such a page has about 13 MB and opens in about a second."""


def is_summary(analysis: PlanAnalysis) -> bool:
    """Whether the plan is too large to show item by item."""
    return len(analysis.items) > MAX_ITEMS


def summary_note(analysis: PlanAnalysis) -> str:
    """What the page says of the summary; empty if it shows everything."""
    if not is_summary(analysis):
        return ""
    return (
        f"A summary: this plan has {len(analysis.items) / 1e6:.2g} million blocks and transfers,"
        " too many to show one by one. The lanes show how busy each moment is: the paler, the more"
        " idle; the greener, the more backward. All figures are those of the whole plan."
    )


def timeline_data(analysis: PlanAnalysis) -> dict[str, Any]:
    """Everything that the script draws.

    The ends of items follow from their starts, but for transfers that share links.
    """
    plan = analysis.plan
    file_name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{plan.model.name[:80]}-{plan.cluster.name[:80]}")
    data = {
        "iteration_ms": analysis.iteration_ms,
        "microbatches": plan.microbatches,
        "file_name": file_name.strip("-.")[:80] or "plan",
        "phases": [
            {"name": phase.name, "start_ms": phase.start_ms, "end_ms": phase.end_ms}
            for phase in analysis.phases
        ],
        "stages": [_stage_data(analysis, index) for index in range(analysis.num_stages)],
    }
    if analysis.has_groups:
        data["groups"] = [_group_data(analysis, index) for index in range(len(analysis.groups))]
    if is_summary(analysis):
        return {**data, **_summary_data(analysis)}
    if isinstance(analysis.run, GroupTimeline):
        return {**data, **_group_item_data(analysis)}
    return {**data, **_item_data(analysis, analysis.run)}


def _group_item_data(analysis: PlanAnalysis) -> dict[str, Any]:
    """Every item with all its numbers: with groups little follows from the rest."""
    items = analysis.items
    first_sent = items.transfer_number_2CM.min(axis=2).T.ravel()
    return {
        "summary": None,
        "has_trace": False,  # the page cannot write the trace of groups; `pipeplan trace` can
        "last": analysis.last_item,
        "waits": _base64(analysis.waited_for, "<i4"),
        "sharing": _sharing_data(analysis) if analysis.cost.contention else None,
        "items": {
            "count": len(items),
            "first_transfer": items.first_transfer,
            "first_reduce": items.first_all_reduce,
            "first_block": items.first_block_G1.tolist(),
            "first_sent": first_sent.tolist(),
            "first_part": items.first_part_S1.tolist(),
            "reduces": [items.reduces_of(g).tolist() for g in range(items.num_groups)],
            "kind": _base64(items.kind_N, "u1"),
            "place": _base64(items.place_N, "<i4"),
            "microbatch": _base64(items.microbatch_N, "<i4"),
            "start_ms": _base64(items.start_ms_N, "<f8"),
            "end_ms": _base64(items.end_ms_N, "<f8"),
            "held": _base64(
                np.concatenate([memory.in_flight[1:] for memory in analysis.memory]), "<f8"
            ),
        },
    }


def _item_data(analysis: PlanAnalysis, run: Run) -> dict[str, Any]:
    items = analysis.items
    sent = items.microbatch_N[items.first_transfer : items.first_all_reduce]
    return {
        "summary": None,
        "has_trace": count_events(analysis.plan) <= MAX_EVENTS,
        "last": analysis.last_item,
        "order": _base64(run.order_SM2, "<i4"),
        "block_start_ms": _base64(run.block_start_ms_SM2, "<f8"),
        "sent": _base64(sent, "<i4"),
        "transfer_start_ms": _base64(run.transfer_start_ms_C2M, "<f8"),
        "waits": _base64(analysis.waited_for, "<i4"),
        "sharing": _sharing_of_stages(analysis) if analysis.costs.flows is not None else None,
    }


def _sharing_of_stages(analysis: PlanAnalysis) -> dict[str, Any]:
    """The same as `_sharing_data` with the ends of transfers, which are no items of the page."""
    items = analysis.items
    ends_ms = items.end_ms_N[items.first_transfer : items.first_all_reduce]
    return {"transfer_end_ms": _base64(ends_ms, "<f8"), **_sharing_data(analysis)}


def _sharing_data(analysis: PlanAnalysis) -> dict[str, Any]:
    """Transfers that share links have lengths of their own, and some slow each other."""
    use = analysis.shared_use
    slowed = sorted(use.slowed.items())
    return {
        "links": [f"{link.name} ({link.direction})" for link in use.links],
        "slowed": _base64(np.array([number for number, _ in slowed]), "<i4"),
        "cluster_devices": analysis.plan.cluster.num_devices,
        "busiest": [
            {
                "name": f"{link.name} ({link.direction})",
                "gb_per_s": link.gb_per_s,
                "times_ms": _base64(link.times_ms, "<f8"),
                "used": _base64(link.used, "<f8"),
            }
            for link in use.busiest(MAX_USE_CHANGES)
        ],
        "by": _base64(np.array([found.by for _, found in slowed]), "<i4"),
        "on": _base64(np.array([found.link for _, found in slowed]), "<i4"),
        "more_ms": _base64(np.array([found.more_ms for _, found in slowed]), "<f8"),
    }


def _summary_data(analysis: PlanAnalysis) -> dict[str, Any]:
    summary = summarise(analysis.items, analysis.memory, analysis.iteration_ms)
    return {
        "summary": {
            "bins": summary.num_bins,
            "busy": _base64(summary.busy_RK, "u1"),
            "backward": _base64(summary.backward_RK, "u1"),
            "in_flight": _base64(summary.in_flight_SK, "<f8" if analysis.has_groups else "<i4"),
        },
        "has_trace": False,
        "last": analysis.last_item - analysis.items.first_all_reduce,
    }


def _stage_data(analysis: PlanAnalysis, index: int) -> dict[str, Any]:
    figures, items = analysis.stages[index], analysis.items
    parts = items.parts_of(index)
    reduce = [float(items.start_ms_N[parts].min(initial=analysis.iteration_ms))]
    reduce.append(float(items.end_ms_N[parts].max(initial=reduce[0])))
    return {
        "colour": stage_colour(index),
        "forward_ms": figures.forward_ms,
        "backward_ms": figures.backward_ms,
        "send_ms": figures.send_ms,
        "return_ms": figures.return_ms,
        "all_reduce": reduce,
        **({} if analysis.has_groups else {"devices": _device_data(analysis, index)}),
    }


def _group_data(analysis: PlanAnalysis, index: int) -> dict[str, Any]:
    return {
        "stages": list(analysis.groups[index].stages),
        "devices": _device_data(analysis, index),
    }


def _device_data(analysis: PlanAnalysis, index: int) -> list[dict[str, Any]]:
    """The devices of a group, which mostly is a stage."""
    memory = analysis.memory[index]
    paces = analysis.device_paces[analysis.groups[index].stages[0]]
    return [
        {
            "name": analysis.plan.cluster.devices[device].name,
            "index": device,
            "pace": paces[position],
            "base_gb": memory.base_gb[position],
            "per_microbatch_gb": memory.per_microbatch_gb[position],
            "peak_gb": memory.peak_gb[position],
            "limit_gb": memory.limit_gb[position],
        }
        for position, device in enumerate(memory.devices)
    ]


def _base64(numbers: NDArray[Any], kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(numbers, dtype=kind).tobytes()).decode()
