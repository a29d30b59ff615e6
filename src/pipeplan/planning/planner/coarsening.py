"""Merge the layers of a long model, so that planning on it is quick.

Two neighbours are merged if their work together is small and if a cut between them would be
expensive. This goes on down to the number of layers asked for. Merging can lose the best plan.
Local search works on the original layers and finds most of the loss again. The rest shows in the
gap to the bound, which is proved without merging.

Complexity: O(L log L).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pipeplan.cost import CostModel, median
from pipeplan.pipeline import Stage
from pipeplan.profile import LayerProfile, ModelProfile, TimesAt, merged_layer, merged_times

__all__ = ["CoarseModel", "coarsen", "merged_model"]

MEDIAN_CUT_PRICE = 0.5
"""The price of merging over a cut of median size, where the work of an average group is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseModel:
    """A model with merged layers, and where each of them ends in the original model."""

    cost: CostModel
    end_layer: tuple[int, ...]
    """For each merged layer one past its last original layer."""

    def refine(self, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        """Stages of this model as stages of the model as it was."""
        ends = (0, *self.end_layer)
        return tuple(
            replace(stage, layers=range(ends[stage.layers.start], ends[stage.layers.stop]))
            for stage in stages
        )


def coarsen(cost: CostModel, max_layers: int) -> CoarseModel:
    """The model with at most `max_layers` layers, each of them merged from neighbours."""
    ends = list(range(1, len(cost.forward_ms_L) + 1))
    if len(ends) <= max_layers:
        return CoarseModel(cost=cost, end_layer=tuple(ends))
    ends = _merge_cheapest(cost, ends, max_layers)
    return CoarseModel(cost=cost.with_model(merged_model(cost, ends)), end_layer=tuple(ends))


def merged_model(cost: CostModel, ends: Sequence[int]) -> ModelProfile:
    """The model with one layer for all layers up to each end."""
    layers = cost.model.layers
    measured, own_size = cost.measured, cost.model.microbatch_size

    def times_of(first: int, end: int) -> tuple[TimesAt, ...]:
        """The sums of the layers' times at all sizes but the profile's own."""
        if measured is None:
            return ()
        return tuple(
            merged_times(int(size), float(forward_L.sum()), float(backward_L.sum()))
            for size, forward_L, backward_L in zip(
                measured.sizes_P,
                measured.forward_ms_PL[:, first:end],
                measured.backward_ms_PL[:, first:end],
                strict=True,
            )
            if size != own_size
        )

    merged = tuple(
        merged_layer(
            f"{first}-{end}",
            forward_ms=float(cost.forward_ms_L[first:end].sum()),
            backward_ms=float(cost.backward_ms_L[first:end].sum()),
            output_bytes=layers[end - 1].output_bytes,
            gradient_bytes=layers[end - 1].gradient_bytes,
            parameter_bytes=float(cost.parameter_bytes_L[first:end].sum()),
            activation_bytes=float(cost.activation_bytes_L[first:end].sum()),
            weight_grad_ms=_weight_grad_ms(layers[first:end]),
            weight_grad_bytes=sum(layer.weight_grad_bytes for layer in layers[first:end]),
            at=times_of(first, end),
        )
        for first, end in zip([0, *ends[:-1]], ends, strict=True)
    )
    return ModelProfile(
        name=cost.model.name,
        microbatch_size=cost.model.microbatch_size,
        input_bytes=cost.model.input_bytes,
        layers=merged,
        optimizer_bytes_per_parameter_byte=cost.model.optimizer_bytes_per_parameter_byte,
    )


def _weight_grad_ms(layers: Sequence[LayerProfile]) -> float | None:
    """The sum, if all layers say it."""
    known = [layer.weight_grad_ms for layer in layers if layer.weight_grad_ms is not None]
    return sum(known) if len(known) == len(layers) else None


def _merge_cheapest(cost: CostModel, ends: list[int], max_layers: int) -> list[int]:
    work_ms_L = cost.forward_ms_L + cost.backward_ms_L
    cut_bytes = {end: cost.output_bytes_L[end - 1] + cost.gradient_bytes_L[end - 1] for end in ends}
    median_bytes = median(cut_bytes.values()) or 1.0
    average_ms = float(work_ms_L.sum()) / max_layers or 1.0
    group_ms = {
        end: float(work_ms_L[first:end].sum())
        for first, end in zip([0, *ends[:-1]], ends, strict=True)
    }
    after = dict(pairwise(ends))
    before = {behind: end for end, behind in after.items()}

    def merge_price(end: int) -> tuple[float, int]:
        cheapness = min(2.0, median_bytes / max(cut_bytes[end], 1.0))
        joint_ms = group_ms[end] + group_ms[after[end]]
        return (joint_ms / average_ms + MEDIAN_CUT_PRICE * cheapness, end)

    queue = [merge_price(end) for end in after]
    heapq.heapify(queue)
    while len(group_ms) > max_layers:
        price, end = heapq.heappop(queue)
        if end not in after or merge_price(end)[0] != price:
            continue  # merged already, or an old price: the new one is in the queue too
        behind = after.pop(end)
        group_ms[behind] += group_ms.pop(end)
        if end in before:
            previous = before.pop(end)
            after[previous], before[behind] = behind, previous
            heapq.heappush(queue, merge_price(previous))
        else:
            del before[behind]
        if behind in after:
            heapq.heappush(queue, merge_price(behind))
    return sorted(group_ms)
