"""Piper's bottleneck dynamic program, without tensor parallelism.

Reference:
    Tarnawski et al. 2021 (Piper), NeurIPS, §4. For layers l.. on k devices, a stage of layers
    l..j-1 on d of them: `dp(l, k) = min over j, d of max( dp(j, k - d), TPS )` with

        TPS = compute/d + (2 (bytes in + bytes out)/d + 4 (d-1) W/(d M)) / B

    Their downsets of a chain are its prefixes; their N is our number of microbatches M.
    Objective: the largest time per sample of any stage. Compute and communication do not overlap,
    and the transfer over a cut counts on both of its sides. Cost model: one flat bandwidth, equal
    devices. Memory: a stage keeps ceil(k/d) microbatches, k = devices of this and all later stages.
    Differs: no tensor parallelism, so their number s of stage replicas equals k and needs no axis.
    A whole stage recomputes or not, instead of each layer. If nothing fits into memory, memory is
    ignored. Devices may stay unused, as in the original. Run with 1F1B and a barrier.

Complexity: O(L^2 D^2).
"""

import numpy as np
from numpy.typing import NDArray

from pipeplan.cost import CostModel, Floats
from pipeplan.pipeline import Stage
from pipeplan.planning.baselines.cuts import Split
from pipeplan.planning.baselines.view import ClusterView, execute, range_sums, view_cluster
from pipeplan.planning.problem import Draft, Problem

__all__ = ["plan_piper", "split_piper"]

SYNC_VOLUME = 4
"""Gradients and weights, each sent and received."""
TRANSFER_VOLUME = 2
"""Activations one way, gradients the other."""


def plan_piper(problem: Problem) -> Draft:
    """Piper's stages under 1F1B."""
    view = view_cluster(problem.cost)
    split = split_piper(problem.cost, view, problem.num_microbatches)
    return execute(problem, split.stages, "1f1b")


def split_piper(cost: CostModel, view: ClusterView, num_microbatches: int) -> Split:
    """The stages whose slowest one takes the least time for a microbatch."""
    within = _solve(cost, view, num_microbatches, view.memory_bytes)
    if within.stages:
        return within
    return _solve(cost, view, num_microbatches, np.inf)


def _solve(cost: CostModel, view: ClusterView, num_microbatches: int, memory_bytes: float) -> Split:
    """The best split; one without stages if nothing fits into `memory_bytes`."""
    num_layers, num_devices = len(cost.forward_ms_L), view.num_devices
    table = _StageTimes(cost, view, num_microbatches, memory_bytes)
    best_ms = np.full((num_devices + 1, num_layers + 1), np.inf)  # [k, l]
    best_ms[0, num_layers] = 0.0
    layers = np.arange(num_layers + 1)
    choice_j = np.zeros(best_ms.shape, dtype=np.int64)
    choice_d = np.zeros(best_ms.shape, dtype=np.int64)
    for k in range(1, num_devices + 1):
        for d in range(1, k + 1):
            stage_ms_LL = table.stage_ms(d, in_flight=-(-k // d))
            total_ms = np.maximum(stage_ms_LL, best_ms[k - d][None, :])
            where = total_ms.argmin(axis=1)
            value = total_ms[layers, where]
            better = value < best_ms[k]
            best_ms[k] = np.where(better, value, best_ms[k])
            choice_j[k] = np.where(better, where, choice_j[k])
            choice_d[k] = np.where(better, d, choice_d[k])
    used = int(best_ms[:, 0].argmin())
    bottleneck_ms = float(best_ms[used, 0])
    if not np.isfinite(bottleneck_ms):
        return Split(stages=(), objective_ms=bottleneck_ms)
    stages = []
    layer, k = 0, used
    while layer < num_layers:
        end, d = int(choice_j[k, layer]), int(choice_d[k, layer])
        first = used - k
        stages.append(
            Stage(
                layers=range(layer, end),
                devices=view.ranks[first : first + d],
                recompute=table.needs_recompute(-(-k // d), layer, end),
            )
        )
        layer, k = end, k - d
    return Split(stages=tuple(stages), objective_ms=bottleneck_ms)


class _StageTimes:
    """TPS of every range of layers; infinite if the range does not fit into memory."""

    def __init__(
        self, cost: CostModel, view: ClusterView, num_microbatches: int, memory_bytes: float
    ) -> None:
        size = len(cost.forward_ms_L) + 1
        self._compute_ms_LL = range_sums(cost.forward_ms_L + cost.backward_ms_L) / view.speed
        self._forward_ms_LL = range_sums(cost.forward_ms_L) / view.speed
        crossing = np.concatenate(([0.0], cost.output_bytes_L[:-1], [0.0]))
        crossing_LL = crossing[:, None] + crossing[None, :]
        self._transfer_ms_LL = TRANSFER_VOLUME * crossing_LL / view.flat_bytes_per_ms
        parameter_bytes_LL = range_sums(cost.parameter_bytes_L)
        self._sync_ms_LL = (
            SYNC_VOLUME * parameter_bytes_LL / (num_microbatches * view.flat_bytes_per_ms)
        )
        state_factor = 1 + cost.model.optimizer_bytes_per_parameter_byte
        self._room_bytes_LL = memory_bytes - state_factor * parameter_bytes_LL
        self._kept_bytes_LL = range_sums(cost.activation_bytes_L)
        self._entering_bytes_L = np.concatenate(([cost.model.input_bytes], cost.output_bytes_L))
        self._no_layer = np.tril(np.ones((size, size), dtype=bool))
        self._num_microbatches = num_microbatches
        self._limited = bool(np.isfinite(memory_bytes))
        self._cache: dict[tuple[int, int], Floats] = {}
        self._times: dict[int, tuple[Floats, Floats]] = {}
        self._fitting: dict[int, tuple[NDArray[np.bool_], NDArray[np.bool_]]] = {}

    def stage_ms(self, d: int, in_flight: int) -> Floats:
        """[l, j]: the time of layers l..j-1 on d devices."""
        in_flight = min(in_flight, self._num_microbatches) if self._limited else 1
        key = (d, in_flight)
        if key not in self._cache:
            times_ms, again_ms = self._on_devices(d)
            if self._limited:
                fits, fits_again = self._where_fits(in_flight)
                again_ms = np.where(fits_again, again_ms, np.inf)
                times_ms = np.where(fits, times_ms, again_ms)
            self._cache[key] = times_ms
        return self._cache[key]

    def _on_devices(self, d: int) -> tuple[Floats, Floats]:
        """The times on d devices, without and with recomputation, whether they fit or not."""
        if d not in self._times:
            plain_ms = (self._compute_ms_LL + self._transfer_ms_LL) / d + self._sync_ms_LL * (
                d - 1
            ) / d
            times_ms = np.where(self._no_layer, np.inf, plain_ms)
            self._times[d] = times_ms, times_ms + self._forward_ms_LL / d
        return self._times[d]

    def _where_fits(self, in_flight: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Where so many microbatches fit, without and with recomputation."""
        if in_flight not in self._fitting:
            self._fitting[in_flight] = self._fits(in_flight), self._fits_again(in_flight)
        return self._fitting[in_flight]

    def needs_recompute(self, in_flight: int, start: int, end: int) -> bool:
        """Whether the stage fits into memory only with recomputation."""
        in_flight = min(in_flight, self._num_microbatches)
        return self._limited and not bool(self._fits(in_flight)[start, end])

    def _fits(self, in_flight: int) -> NDArray[np.bool_]:
        fits: NDArray[np.bool_] = in_flight * self._kept_bytes_LL <= self._room_bytes_LL
        return fits

    def _fits_again(self, in_flight: int) -> NDArray[np.bool_]:
        kept = in_flight * self._entering_bytes_L[:, None] + self._kept_bytes_LL
        fits: NDArray[np.bool_] = kept <= self._room_bytes_LL
        return fits
