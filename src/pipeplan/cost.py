"""The only place where bytes become milliseconds.

Implements the cost model that `docs/formats.md` states, for any plan: arbitrary device sets,
uneven shares, recomputation, latency, asymmetric links, devices of different speed.

Axes of arrays: L layers, D devices, S stages, C = S - 1 channels between neighbouring stages.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan import _core
from pipeplan.cluster import Cluster, Duplex
from pipeplan.contention import BYTES_PER_MS_IN_GB_PER_S, Contention
from pipeplan.errors import PlanFileError
from pipeplan.host_links import MAX_FULL_DEVICES, large_host_links, slowest_gb_per_s, slowest_pairs
from pipeplan.measured_times import measured_times
from pipeplan.memory_parts import MemoryParts
from pipeplan.pipeline import Stage
from pipeplan.profile import ModelProfile

__all__ = [
    "BYTES_IN_GB",
    "BYTES_PER_MS_IN_GB_PER_S",
    "CostModel",
    "Floats",
    "MemoryParts",
    "PipelineCosts",
    "median",
    "prefix_sums",
]

Floats = NDArray[np.float64]

MS_IN_US = 1e-3
BYTES_IN_GB = 1e9
FEW_PAIRS = 64
"""Up to this number of pairs of devices a loop is faster than arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """The times of all blocks, transfers and all-reduces in a pipeline of given stages."""

    forward_ms_S: Floats
    backward_ms_S: Floats
    send_forward_ms_C: Floats
    send_backward_ms_C: Floats
    all_reduce_ms_S: Floats
    half_duplex: bool
    caps: tuple[int, ...] | None = None
    """The most microbatches that each stage may hold; None: all of them."""
    flows: _core.PlanFlows | None = None
    """Where the cluster has shared links: what decides how long transfers and all-reduces take.

    Their times above are then the least that they can take.
    """

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.forward_ms_S)

    @property
    def channel_ms_C(self) -> Floats:
        """Time that a channel is busy with one microbatch: both directions, or the longer one."""
        if self.half_duplex:
            return self.send_forward_ms_C + self.send_backward_ms_C
        return np.maximum(self.send_forward_ms_C, self.send_backward_ms_C)

    def at_most(self) -> "PipelineCosts":
        """The same with the longest times that transfers and all-reduces can take (rule 13)."""
        if self.flows is None:
            return self
        longest_ms = np.array(self.flows.longest_ms(self.half_duplex))
        num_lanes = 2 * (self.num_stages - 1)
        return replace(
            self,
            send_forward_ms_C=longest_ms[0:num_lanes:2],
            send_backward_ms_C=longest_ms[1:num_lanes:2],
            all_reduce_ms_S=longest_ms[num_lanes:],
        )

    def for_kernels(self) -> _core.PipelineCosts:
        """The same costs as kernels read them."""
        return _core.PipelineCosts(
            self.forward_ms_S,
            self.backward_ms_S,
            self.send_forward_ms_C,
            self.send_backward_ms_C,
            self.all_reduce_ms_S,
            self.half_duplex,
            self.caps or (),
            self.flows,
        )


def median(values: Iterable[float]) -> float:
    """The median. `np.median` imports so much that it takes longer than planning a small case."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return float((ordered[middle] + ordered[-1 - middle]) / 2)


def prefix_sums(values: Floats) -> Floats:
    """Along the last axis the sums of the first k values, for k from 0 to their number."""
    zeros = np.zeros((*values.shape[:-1], 1))
    return np.concatenate((zeros, values.cumsum(axis=-1)), axis=-1)


class CostModel:
    """The costs of one model on one cluster, as arrays that planners and kernels read."""

    def __init__(
        self, model: ModelProfile, cluster: Cluster, *, max_replicas: int | None = None
    ) -> None:
        self.cluster = cluster
        self.max_replicas = max_replicas or cluster.num_devices
        """The most devices that a planner may give to one stage."""
        self._take_layers(model)
        self.speed_D = np.array([device.speed for device in cluster.devices], dtype=np.float64)
        self.host_links = large_host_links(cluster)
        """The links of a large cluster of hosts; None where there are full matrices."""
        self._rates_DD: list[Floats] = []
        """All rates, once they are made; copies of these costs share them."""
        self._latency_ms = np.array(cluster.latency_us, dtype=np.float64)
        if self._latency_ms.ndim == 2:
            np.fill_diagonal(self._latency_ms, 0.0)
        self._latency_ms *= MS_IN_US
        num_devices = len(self.speed_D)
        self.latency_ms_DD: Floats = np.broadcast_to(self._latency_ms, (num_devices, num_devices))
        """All latencies as a matrix; of one number if all are alike."""
        self.half_duplex = cluster.duplex is Duplex.HALF
        self.contention = Contention(cluster) if cluster.links else None
        """The links that devices share; None where there are none."""

    def _take_layers(self, model: ModelProfile) -> None:
        self.model = model
        self._flow_instance: _core.Instance | None = None
        layers = model.layers
        self.forward_ms_L = np.array([layer.forward_ms for layer in layers], dtype=np.float64)
        self.backward_ms_L = np.array([layer.backward_ms for layer in layers], dtype=np.float64)
        self.output_bytes_L = np.array([layer.output_bytes for layer in layers], dtype=np.float64)
        self.gradient_bytes_L = np.array(
            [layer.gradient_bytes for layer in layers], dtype=np.float64
        )
        self.parameter_bytes_L = np.array(
            [layer.parameter_bytes for layer in layers], dtype=np.float64
        )
        self.activation_bytes_L = np.array(
            [layer.activation_bytes for layer in layers], dtype=np.float64
        )
        self.measured = measured_times(model)
        """Times at several microbatch sizes; None where time is proportional to the samples."""

    def with_least_times(self) -> "CostModel":
        """Costs in proportion to the samples that are nowhere above these; for lower bounds."""
        if self.measured is None:
            return self
        other, measured, size = copy.copy(self), self.measured, self.model.microbatch_size
        other.forward_ms_L = measured.least_ms_L(measured.forward_ms_PL, size)
        other.backward_ms_L = measured.least_ms_L(measured.backward_ms_PL, size)
        other.measured = None
        return other

    def with_model(self, model: ModelProfile) -> "CostModel":
        """The costs of another model on the same cluster, with the same arrays for its links."""
        other = copy.copy(self)
        other._take_layers(model)
        return other

    def with_max_replicas(self, max_replicas: int | None) -> "CostModel":
        """The same costs, for planners that may give a stage so many devices."""
        other = copy.copy(self)
        other.max_replicas = max_replicas or self.cluster.num_devices
        return other

    def without_shared_links(self) -> "CostModel":
        """The same costs as if every pair of devices had a link of its own."""
        other = copy.copy(self)
        other.contention = None
        return other

    def with_longer_transfers(self, factor: float) -> "CostModel":
        """The same costs as if transfers between stages carried so many times their bytes."""
        other = copy.copy(self)
        other.output_bytes_L = self.output_bytes_L * factor
        other.gradient_bytes_L = self.gradient_bytes_L * factor
        return other

    def with_layers(self, instance: _core.Instance) -> _core.Instance:
        """An instance of the same cluster, with the layers of this model."""
        return instance.with_layers(
            forward_ms=self.forward_ms_L,
            backward_ms=self.backward_ms_L,
            output_bytes=self.output_bytes_L,
            gradient_bytes=self.gradient_bytes_L,
            parameter_bytes=self.parameter_bytes_L,
            activation_bytes=self.activation_bytes_L.tolist(),
            **self._measured_tables(),
        )

    def _measured_tables(self) -> dict[str, Any]:
        """What kernels read of times at several sizes; nothing where there are none."""
        if self.measured is None:
            return {}
        return {
            "sizes": self.measured.sizes_P.tolist(),
            "forward_at": self.measured.forward_ms_PL.ravel().tolist(),
            "backward_at": self.measured.backward_ms_PL.ravel().tolist(),
        }

    @property
    def bytes_per_ms_DD(self) -> Floats:
        """All rates as a matrix; on a large cluster of hosts it is made when first asked for."""
        if not self._rates_DD:
            # In place, because a matrix of 4,096 devices takes 134 MB.
            rates = np.array(self.cluster.bandwidth_gb_per_s, dtype=np.float64)
            np.fill_diagonal(rates, 0.0)  # ignored, so it may hold any number
            rates *= BYTES_PER_MS_IN_GB_PER_S
            self._rates_DD.append(rates)
        return self._rates_DD[0]

    @property
    def is_connected(self) -> bool:
        """Whether every two devices have paths in both directions."""
        if self.host_links is not None:
            return self.host_links.is_connected
        return bool(self.connected_DD().all())

    def connected_DD(self) -> NDArray[np.bool_]:
        """Whether two devices have paths in both directions; a device has one to itself."""
        paths = self.bytes_per_ms_DD > 0
        connected: NDArray[np.bool_] = paths & paths.T
        np.fill_diagonal(connected, True)
        return connected

    def rates_between(self, senders: Sequence[int], receivers: Sequence[int]) -> Floats:
        """A copy of the rates from some devices to others; of a device to itself any number."""
        if self.host_links is None:
            return self.bytes_per_ms_DD[np.ix_(senders, receivers)]
        from_D, to_D = (
            self.host_links.host_of_D[list(devices)] for devices in (senders, receivers)
        )
        rates: Floats = np.where(
            from_D[:, None] == to_D[None, :],
            self.host_links.inside_H[from_D][:, None],
            self.host_links.between,
        )
        return rates * BYTES_PER_MS_IN_GB_PER_S

    def kernel_instance(
        self, num_microbatches: int, limits: _core.PlanLimits | None = None
    ) -> _core.Instance:
        """The model and the cluster as planning kernels read them."""
        hosts = self.host_links
        if hosts is None:
            bytes_per_ms, host_of, inside = self.bytes_per_ms_DD, [], []
        else:
            bytes_per_ms = np.full((1, 1), hosts.between * BYTES_PER_MS_IN_GB_PER_S)
            host_of = hosts.host_of_D.tolist()
            inside = (hosts.inside_H * BYTES_PER_MS_IN_GB_PER_S).tolist()
        is_full = self._latency_ms.ndim == 2 or len(self.speed_D) <= MAX_FULL_DEVICES
        latency_ms = self.latency_ms_DD if is_full else self._latency_ms.reshape(1, 1)
        return _core.Instance(
            forward_ms=self.forward_ms_L,
            backward_ms=self.backward_ms_L,
            output_bytes=self.output_bytes_L,
            gradient_bytes=self.gradient_bytes_L,
            parameter_bytes=self.parameter_bytes_L,
            speed=self.speed_D,
            bytes_per_ms=bytes_per_ms,
            latency_ms=np.ascontiguousarray(latency_ms),
            half_duplex=self.half_duplex,
            num_microbatches=num_microbatches,
            microbatch_size=self.model.microbatch_size,
            max_replicas=self.max_replicas,
            host_of=host_of,
            inside_bytes_per_ms=inside,
            activation_bytes=self.activation_bytes_L.tolist(),
            limits=limits,
            shared=self.contention.for_kernels if self.contention else None,
            **self._measured_tables(),
        )

    def pipeline_costs(self, stages: Sequence[Stage]) -> PipelineCosts:
        """The costs of a whole plan; raises PlanFileError if devices that talk have no path."""
        costs = self.least_costs(stages)
        return replace(costs, flows=self._flows(stages)) if self.contention else costs

    def least_costs(self, stages: Sequence[Stage]) -> PipelineCosts:
        """The costs of some neighbouring stages, if nothing else uses their shared links."""
        channels = range(len(stages) - 1)
        return PipelineCosts(
            forward_ms_S=np.array([self.forward_ms(stage) for stage in stages]),
            backward_ms_S=np.array([self.backward_ms(stage) for stage in stages]),
            send_forward_ms_C=np.array(
                [self.send_forward_ms(stages[c], stages[c + 1]) for c in channels]
            ),
            send_backward_ms_C=np.array(
                [self.send_backward_ms(stages[c], stages[c + 1]) for c in channels]
            ),
            all_reduce_ms_S=np.array([self.all_reduce_ms(stage) for stage in stages]),
            half_duplex=self.half_duplex,
        )

    def _flows(self, stages: Sequence[Stage]) -> _core.PlanFlows:
        if self._flow_instance is None:  # flows know nothing of microbatches and limits
            self._flow_instance = self.kernel_instance(num_microbatches=1)
        return _core.PlanFlows(
            instance=self._flow_instance,
            end_layer=[stage.layers.stop for stage in stages],
            devices=[list(stage.devices) for stage in stages],
            shares=[list(stage.device_shares) for stage in stages],
        )

    def forward_ms(self, stage: Stage) -> float:
        """The time of one microbatch forward through the stage; its slowest device decides."""
        return max(self.device_forward_ms(stage))

    def backward_ms(self, stage: Stage) -> float:
        """The time of one microbatch backward through the stage, recomputation included."""
        return max(self.device_backward_ms(stage))

    def device_forward_ms(self, stage: Stage) -> list[float]:
        """For each device of the stage, its own time for one forward."""
        if self.measured is not None:
            return self._measured_ms(stage, forward=True, backward=False)
        work_ms = self._sum(self.forward_ms_L, stage)
        return [work_ms * relative for relative in self._relative_times(stage)]

    def device_backward_ms(self, stage: Stage) -> list[float]:
        """For each device of the stage, its own time for one backward."""
        if self.measured is not None:
            return self._measured_ms(stage, forward=stage.recompute, backward=True)
        work_ms = self._backward_work_ms(stage)
        return [work_ms * relative for relative in self._relative_times(stage)]

    def device_compute_ms(self, stage: Stage) -> list[float]:
        """For each device of the stage, its own compute time for one microbatch."""
        if self.measured is not None:
            both = zip(self.device_forward_ms(stage), self.device_backward_ms(stage), strict=True)
            return [f + b for f, b in both]
        work_ms = self._sum(self.forward_ms_L, stage) + self._backward_work_ms(stage)
        return [work_ms * relative for relative in self._relative_times(stage)]

    def send_forward_ms(self, stage: Stage, behind: Stage) -> float:
        """The time to send one microbatch's outputs from `stage` to the stage behind it."""
        return self._send_ms(float(self.output_bytes_L[stage.layers[-1]]), stage, behind)

    def send_backward_ms(self, stage: Stage, behind: Stage) -> float:
        """The time to send one microbatch's gradients from the stage behind back to `stage`."""
        return self._send_ms(float(self.gradient_bytes_L[stage.layers[-1]]), behind, stage)

    def all_reduce_ms(self, stage: Stage, num_parts: int = 1) -> float:
        """The time of a ring all-reduce of the stage's gradients, or of one of so many parts."""
        k = stage.num_replicas
        if k == 1:
            return 0.0
        slowest, latency_ms = self._slowest_link(stage.devices)
        volume = 2 * (k - 1) / k * self._sum(self.parameter_bytes_L, stage) / num_parts
        volume_ms = volume / slowest
        if self.contention:
            volume_ms = max(volume_ms, volume * self.contention.ring_ms_per_byte(stage.devices))
        return float(volume_ms + 2 * (k - 1) * latency_ms)

    def memory_gb(self, stage: Stage, in_flight: int) -> list[float]:
        """The memory that each device of the stage needs for `in_flight` microbatches."""
        return [parts.total_gb for parts in self.memory_parts(stage, in_flight)]

    def memory_parts(self, stage: Stage, in_flight: int) -> list[MemoryParts]:
        """For each device of the stage what its memory consists of."""
        parameter_gb = self._sum(self.parameter_bytes_L, stage) / BYTES_IN_GB
        beside_gb = parameter_gb * self.model.optimizer_bytes_per_parameter_byte
        gradient_gb = min(parameter_gb, beside_gb)
        activation_bytes = self._sum(self.activation_bytes_L, stage)
        kept_bytes = in_flight * activation_bytes
        if stage.recompute:
            kept_bytes = in_flight * self.model.bytes_into(stage.layers[0]) + activation_bytes
        return [
            MemoryParts(
                parameter_gb=parameter_gb,
                gradient_gb=gradient_gb,
                optimizer_gb=beside_gb - gradient_gb,
                activation_gb=kept_bytes * share / BYTES_IN_GB,
            )
            for share in stage.device_shares
        ]

    def _measured_ms(self, stage: Stage, *, forward: bool, backward: bool) -> list[float]:
        """For each device of the stage the time of its own samples."""
        assert self.measured is not None, "only where layers were measured at several sizes"
        samples = self.model.microbatch_size
        shares = stage.device_shares
        work_ms = {
            x: self.measured.stage_ms(stage.layers, x * samples, forward, backward)
            for x in set(shares)
        }
        speeds = [float(self.speed_D[device]) for device in stage.devices]
        return [work_ms[x] / speed for x, speed in zip(shares, speeds, strict=True)]

    def _sum(self, values_L: Floats, stage: Stage) -> float:
        return float(values_L[stage.layers.start : stage.layers.stop].sum())

    def _backward_work_ms(self, stage: Stage) -> float:
        work_ms = self._sum(self.backward_ms_L, stage)
        if stage.recompute:
            work_ms += self._sum(self.forward_ms_L, stage)
        return work_ms

    def _relative_times(self, stage: Stage) -> list[float]:
        """For each device its time, where a device of speed 1 takes 1 for the whole microbatch."""
        return [
            share / float(self.speed_D[device])
            for device, share in zip(stage.devices, stage.device_shares, strict=True)
        ]

    def _slowest_link(self, devices: Sequence[int]) -> tuple[float, float]:
        """The least rate and the largest latency between any two of these devices."""
        if self.host_links is not None:
            slowest = slowest_gb_per_s(self.host_links, devices) * BYTES_PER_MS_IN_GB_PER_S
            if slowest > 0:
                return slowest, float(self._latency_ms)
        if len(devices) ** 2 <= FEW_PAIRS:
            rate, latency_ms = self.bytes_per_ms_DD.item, self.latency_ms_DD.item
            slowest = min(rate(u, v) for u in devices for v in devices if u != v)
            if slowest > 0:
                return slowest, max(latency_ms(u, v) for u in devices for v in devices if u != v)
        rates = self.rates_between(devices, devices)
        np.fill_diagonal(rates, np.inf)
        slowest = float(rates.min())
        if not slowest > 0:
            raise self._no_path(rates, devices, devices)
        del rates  # before the next matrix is made: with 4,096 devices each takes 134 MB
        latencies_ms = self._between(self.latency_ms_DD, devices, devices)
        np.fill_diagonal(latencies_ms, 0.0)
        return slowest, float(latencies_ms.max())

    def _send_ms(self, num_bytes: float, sender: Stage, receiver: Stage) -> float:
        pairs_ms = self._transfer_ms(num_bytes, sender, receiver)
        if self.contention is None:
            return pairs_ms
        return max(pairs_ms, self.contention.transfer_ms(num_bytes, sender, receiver))

    def _transfer_ms(self, num_bytes: float, sender: Stage, receiver: Stage) -> float:
        if self.host_links is not None:
            pairs = slowest_pairs(self.host_links, sender, receiver)
            if all(gb_per_s > 0 for _, gb_per_s in pairs):
                return max(
                    float(self._latency_ms)
                    + parts * num_bytes / (gb_per_s * BYTES_PER_MS_IN_GB_PER_S)
                    for parts, gb_per_s in pairs
                )
        elif sender.num_replicas * receiver.num_replicas <= FEW_PAIRS:
            few_ms = self._transfer_of_few_ms(num_bytes, sender, receiver)
            if few_ms is not None:
                return few_ms
        rates = self.rates_between(sender.devices, receiver.devices)
        # A transfer flows in one direction, but its counterpart in the backward needs the way back.
        back = self.rates_between(receiver.devices, sender.devices).T
        if not (rates.min() > 0 and back.min() > 0):
            raise self._no_path(np.minimum(rates, back), sender.devices, receiver.devices)
        latency_ms = self._between(self.latency_ms_DD, sender.devices, receiver.devices)
        parts = np.outer(sender.device_shares, receiver.device_shares) * num_bytes
        return float((latency_ms + parts / rates).max())

    def _transfer_of_few_ms(self, num_bytes: float, sender: Stage, receiver: Stage) -> float | None:
        """The same in a loop, ten times faster for few pairs; None if a path is missing."""
        rate, latency_ms = self.bytes_per_ms_DD.item, self.latency_ms_DD.item
        receiving = list(zip(receiver.devices, receiver.device_shares, strict=True))
        longest_ms = 0.0
        for u, share in zip(sender.devices, sender.device_shares, strict=True):
            for v, other_share in receiving:
                forth = rate(u, v)
                if not (forth > 0 and rate(v, u) > 0):
                    return None
                ms = latency_ms(u, v) + share * other_share * num_bytes / forth
                if ms > longest_ms:
                    longest_ms = ms
        return longest_ms

    @staticmethod
    def _between(values_DD: Floats, senders: Sequence[int], receivers: Sequence[int]) -> Floats:
        """A copy of the entries from some devices to others."""
        return values_DD[np.ix_(senders, receivers)]

    def _no_path(
        self, rates: Floats, senders: Sequence[int], receivers: Sequence[int]
    ) -> PlanFileError:
        """The error that names the first pair without a path."""
        row, column = divmod(int(np.argmin(rates > 0)), len(receivers))
        devices = self.cluster.devices
        first, second = devices[senders[row]].name, devices[receivers[column]].name
        return PlanFileError(
            f"devices: {first!r} and {second!r} have to exchange data,"
            " but the cluster has no path between them in both directions"
        )
