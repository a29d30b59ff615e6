"""What keeps an iteration from being shorter, in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.cost import PipelineCosts
from pipeplan.report.analysis.idle import Shares
from pipeplan.report.units import humanise_ms

__all__ = ["Bottleneck", "find_bottleneck", "find_group_bottleneck"]

BUSY_ALL_THE_TIME = 0.97
BUSY_MOSTLY = 0.75
ALIKE = 1.05
"""Stages whose microbatches differ by less than this factor are about equally busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The busiest stage or link, and what it means for the iteration."""

    stage: int | None
    """The stage, or None if the bottleneck is a link."""
    channel: int | None
    """The link between stages `channel` and `channel + 1`, or None."""
    busy: float
    """The part of the iteration in which it is busy."""
    words: str


def find_bottleneck(
    costs: PipelineCosts, shares: Shares, microbatches: int, iteration_ms: float
) -> Bottleneck:
    """The stage or link that is busy for the longest time, and what would help.

    Args:
        costs: of the pipeline.
        shares: where the devices' time goes.
        microbatches: how many there are.
        iteration_ms: how long the iteration takes.
    """
    whole_ms = iteration_ms or 1.0
    work_ms = microbatches * (costs.forward_ms_S + costs.backward_ms_S)
    stage = int((work_ms + costs.all_reduce_ms_S).argmax())
    computes, reduces = float(work_ms[stage]), float(costs.all_reduce_ms_S[stage])
    link_ms = microbatches * costs.channel_ms_C
    channel = int(link_ms.argmax()) if len(link_ms) else None
    if channel is not None and link_ms[channel] > computes + reduces:
        busy = float(link_ms[channel]) / whole_ms
        return Bottleneck(
            stage=None,
            channel=channel,
            busy=busy,
            words=f"The link between stages {channel} and {channel + 1} is busy"
            f" {_how_much(busy)}: {microbatches} transfers of"
            f" {humanise_ms(float(link_ms[channel]) / microbatches)} each. A faster link, or a cut"
            " with fewer bytes, would help.",
        )
    busy = (computes + reduces) / whole_ms
    if reduces > computes:
        words = (
            f"Stage {stage} all-reduces {_how_much(reduces / whole_ms)}: faster links between its"
            " devices, fewer replicas or more microbatches an iteration would help."
        )
        return Bottleneck(stage=stage, channel=None, busy=busy, words=words)
    what = f"Stage {stage} computes {_how_much(computes / whole_ms)}"
    if reduces > 0.02 * whole_ms:
        what += f" and all-reduces {100 * reduces / whole_ms:.0f} %"
    return Bottleneck(
        stage=stage, channel=None, busy=busy, words=f"{what}{_remedy(costs, shares, stage, busy)}"
    )


def find_group_bottleneck(
    computes: Sequence[float], shares: Shares, iteration_ms: float
) -> Bottleneck:
    """The group of devices that computes for the longest time, of groups with several stages.

    Args:
        computes: the part of the iteration in which each group computes.
        shares: where the devices' time goes.
        iteration_ms: how long the iteration takes.
    """
    group = max(range(len(computes)), key=lambda index: computes[index])
    busy = computes[group] if iteration_ms else 0.0
    idle = 100 * (shares.bubble + shares.communication)
    words = (
        f"Group {group} computes {_how_much(busy)}, and no group longer. Devices wait {idle:.0f} %"
        f" of the time, of which {100 * shares.communication:.0f} points are for links."
    )
    return Bottleneck(stage=None, channel=None, busy=busy, words=words)


def _remedy(costs: PipelineCosts, shares: Shares, stage: int, busy: float) -> str:
    """Why that is, and what would help."""
    if busy < BUSY_MOSTLY and costs.num_stages > 1:
        idle = 100 * (shares.bubble + shares.communication)
        return (
            f", and no stage or link is busier: devices wait {idle:.0f} % of the time while the"
            " pipeline fills and drains. More microbatches, or fewer stages, would help."
        )
    if costs.num_stages == 1:
        return ": the whole model is one stage. Faster or more devices would help."
    work = (costs.forward_ms_S + costs.backward_ms_S).tolist()
    others = sorted(work[:stage] + work[stage + 1 :])
    if others and work[stage] > ALIKE * others[-1] > 0:
        percent = 100 * (work[stage] / others[-1] - 1)
        return (
            f": its microbatch takes {percent:.0f} % longer than that of any other stage. A faster"
            " device or one more replica there would help."
        )
    num_alike = sum(each > work[stage] / ALIKE for each in others)
    if num_alike == len(others):
        return ": the stages are well balanced. Faster or more devices would help."
    nearly = "one other stage" if num_alike == 1 else f"{num_alike} other stages"
    return (
        f", and {nearly} nearly as long; the rest have less to do. Faster devices or more replicas"
        " for these would help."
    )


def _how_much(part: float) -> str:
    return "all the time" if part >= BUSY_ALL_THE_TIME else f"{100 * part:.0f} % of the time"
