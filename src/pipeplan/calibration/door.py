"""From a plan and a run of it to what differs, corrected inputs, and a plan made from them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pipeplan.calibration.corrected import correct_cluster, correct_model
from pipeplan.calibration.findings import Finding, find_computation, find_links
from pipeplan.calibration.measured_run import MeasuredRun
from pipeplan.cluster import Cluster
from pipeplan.errors import InfeasibleError
from pipeplan.pipeline import Plan
from pipeplan.planning.door import plan as make_plan
from pipeplan.planning.registry import planner_names
from pipeplan.planning.whatif.question import options_for
from pipeplan.profile import ModelProfile
from pipeplan.replaying import replay_plan
from pipeplan.report.units import humanise_ms, percent

__all__ = ["Calibration", "calibrate"]

SAME = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a run says about its plan's inputs."""

    predicted_ms: float
    """Of the plan as it was made."""
    measured_ms: float
    findings: tuple[Finding, ...]
    model: ModelProfile
    """The corrected profile."""
    cluster: Cluster
    """The corrected cluster."""
    kept: Plan
    """The same plan with the corrected inputs: what they explain of the measured time."""
    replanned: Plan | None
    """The best plan known for the corrected inputs; None where it was not asked for."""

    @property
    def is_kept_best(self) -> bool:
        """Whether no better plan than the old one was found, or asked for."""
        return self.replanned is None or self.replanned is self.kept

    @property
    def gain(self) -> float:
        """By which part a step would be shorter with the new plan."""
        if self.replanned is None or not self.kept.iteration_ms:
            return 0.0
        return 1 - self.replanned.iteration_ms / self.kept.iteration_ms

    @property
    def gain_words(self) -> str:
        """What a new plan would win, in one sentence."""
        if self.replanned is None or self.is_kept_best:
            return "No better plan was found; the old one stays the best."
        return (
            f"A new plan would take {humanise_ms(self.replanned.iteration_ms)} a step instead of"
            f" {humanise_ms(self.kept.iteration_ms)}: {percent(self.gain)} less."
        )

    def document(self) -> dict[str, Any]:
        """The figures as plain data."""
        devices, layers = self.cluster.devices, self.model.layers
        return {
            "predicted_ms": self.predicted_ms,
            "measured_ms": self.measured_ms,
            "explained_ms": self.kept.iteration_ms,
            "replanned_ms": None if self.replanned is None else self.replanned.iteration_ms,
            "gain": self.gain,
            "findings": [
                {
                    "subject": str(finding.subject),
                    "factor": finding.factor,
                    "backward_factor": finding.backward_factor,
                    "devices": [devices[device].name for device in finding.devices],
                    "receivers": [devices[device].name for device in finding.receivers],
                    "layers": [layers[layer].name for layer in finding.layers],
                    "words": finding.words,
                }
                for finding in self.findings
            ],
            "speeds": {device.name: device.speed for device in devices},
        }


def calibrate(
    plan: Plan,
    run: MeasuredRun,
    *,
    replans: bool = True,
    planner: str | None = None,
    effort: float | None = None,
    report: Callable[[str], None] | None = None,
) -> Calibration:
    """What a run says about its plan's inputs, and the best plan for the corrected ones.

    Args:
        plan: the plan that ran.
        run: one iteration of it.
        replans: whether to plan anew.
        planner: who makes the new plan; by default the planner of the old one.
        effort: how much to search for it; by default as much as for the old one.
        report: called with a short line about progress, now and then.
    """
    before = replay_plan(plan).plan
    findings = tuple(find_computation(before, run) + find_links(before, run))
    model = correct_model(before.model, findings)
    cluster = correct_cluster(before.cluster, findings)
    kept = replay_plan(replace(before, model=model, cluster=cluster, predicted=None)).plan
    replanned = _replan(kept, planner, effort, report) if replans else None
    return Calibration(
        predicted_ms=before.iteration_ms,
        measured_ms=run.iteration_ms,
        findings=findings,
        model=model,
        cluster=cluster,
        kept=kept,
        replanned=replanned,
    )


def _replan(
    kept: Plan,
    planner: str | None,
    effort: float | None,
    report: Callable[[str], None] | None,
) -> Plan:
    """The best plan known for the inputs of `kept`, which is one of them."""
    planner = planner or (kept.planner if kept.planner in planner_names() else "best")
    asked = options_for(planner, kept)
    if effort is not None:
        asked["effort"] = effort
    try:
        made = make_plan(
            kept.model,
            kept.cluster,
            kept.microbatches,
            planner,
            seed=kept.seed,
            report=report,
            **asked,
        )
    except InfeasibleError:
        return kept
    return kept if kept.iteration_ms <= made.iteration_ms * SAME else made
