"""Model and cluster with what was found in a run."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from pipeplan.calibration.findings import Finding, Subject
from pipeplan.cluster import Cluster, Matrix
from pipeplan.profile import LayerProfile, ModelProfile

__all__ = ["correct_cluster", "correct_model"]

US_IN_MS = 1e3
SPEED_LIMITS = (1e-3, 1e3)


def correct_model(model: ModelProfile, findings: Iterable[Finding]) -> ModelProfile:
    """The profile with the times that layers really take; the same object if none differ."""
    factors = np.ones((2, model.num_layers))
    for finding in findings:
        if finding.subject in (Subject.ALL, Subject.LAYERS):
            layers = list(finding.layers or range(model.num_layers))
            factors[:, layers] *= np.array([[finding.factor], [finding.backward_factor]])
    if (factors == 1).all():
        return model
    pairs = zip(model.layers, factors[0].tolist(), factors[1].tolist(), strict=True)
    return replace(model, layers=tuple(_scaled(*each) for each in pairs))


def _scaled(layer: LayerProfile, forward: float, backward: float) -> LayerProfile:
    weight_grad_ms = layer.weight_grad_ms
    return replace(
        layer,
        forward_ms=layer.forward_ms * forward,
        backward_ms=layer.backward_ms * backward,
        weight_grad_ms=None if weight_grad_ms is None else weight_grad_ms * backward,
        at=tuple(
            replace(
                times,
                forward_ms=times.forward_ms * forward,
                backward_ms=times.backward_ms * backward,
            )
            for times in layer.at
        ),
    )


def correct_cluster(cluster: Cluster, findings: Iterable[Finding]) -> Cluster:
    """The cluster with the speeds and links that were measured."""
    devices = list(cluster.devices)
    slower = np.ones((cluster.num_devices, cluster.num_devices))
    later_us = np.zeros_like(slower)
    for finding in findings:
        if finding.subject is Subject.DEVICE:
            (device,) = finding.devices
            least, most = SPEED_LIMITS
            speed = min(max(devices[device].speed / finding.factor, least), most)
            devices[device] = replace(devices[device], speed=speed)
        elif finding.subject is Subject.LINK:
            front, back = list(finding.devices), list(finding.receivers)
            for pairs in (np.ix_(front, back), np.ix_(back, front)):
                slower[pairs] *= finding.factor
                later_us[pairs] += finding.late_ms * US_IN_MS
    changed = replace(cluster, devices=tuple(devices))
    if (slower == 1).all() and not later_us.any():
        return changed
    latency = np.broadcast_to(np.array(cluster.latency_us, dtype=np.float64), slower.shape)
    return replace(
        changed,
        bandwidth_gb_per_s=_matrix(np.array(cluster.bandwidth_gb_per_s) / slower),
        latency_us=_matrix(latency * slower + later_us),
    )


def _matrix(numbers: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> Matrix:
    return tuple(map(tuple, numbers.tolist()))
