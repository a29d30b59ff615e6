"""Why a cut is where it is: what it costs there, and what it would cost one layer beside it.

Where the plan would be faster with a neighbouring cut, in the same order of blocks and within the
devices' memory, the reason says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeplan.cost import CostModel
from pipeplan.errors import PlanFileError
from pipeplan.pipeline import Stage, most_in_flight
from pipeplan.report.units import humanise_bytes
from pipeplan.simulator import Codes, run_schedule

__all__ = ["Cut", "CutChoice", "find_cut", "shifted_ms"]

LEAST_GAIN = 1e-4
"""A smaller gain is not worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutChoice:
    """What one place to cut costs, between the device sets of two neighbouring stages."""

    bytes_across: float
    """Both directions, one microbatch."""
    busiest_ms: float
    """In one iteration: the busier of the two stages, or the link if that is busier still."""
    iteration_ms: float | None = None
    """Of the whole plan with this cut; None where it was not tried or does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The cut behind a stage, and the two places beside it that the planner did not take."""

    here: CutChoice
    earlier: CutChoice | None
    """One layer earlier; None where the stage would be empty."""
    later: CutChoice | None

    @property
    def reason(self) -> str:
        """Why here, in a few words."""
        beside = [choice for choice in (self.earlier, self.later) if choice]
        if not beside:
            return "the only place"
        better = self.better
        if better:
            return better
        fewest = all(self.here.bytes_across <= c.bytes_across for c in beside) and any(
            self.here.bytes_across < c.bytes_across for c in beside
        )
        # Sums of the same layers in another order differ in their last digits.
        balanced = all(self.here.busiest_ms <= c.busiest_ms * (1 + 1e-9) for c in beside)
        if fewest and balanced:
            return "fewest bytes and best balance"
        if balanced:
            return "best balance"
        return "fewest bytes nearby" if fewest else "serves the plan as a whole"

    @property
    def better(self) -> str:
        """That a neighbouring cut would make the plan faster; empty where none would."""
        here_ms = self.here.iteration_ms
        gains = [
            (1 - choice.iteration_ms / here_ms, where)
            for where, choice in (("earlier", self.earlier), ("later", self.later))
            if choice and choice.iteration_ms is not None and here_ms
        ]
        gain, where = max(gains, default=(0.0, ""))
        if gain < LEAST_GAIN:
            return ""
        return f"a layer {where} would be better: the iteration {100 * gain:.2g} % shorter"

    @property
    def evidence(self) -> str:
        """The numbers behind the reason."""
        parts = [f"{humanise_bytes(self.here.bytes_across)} cross"]
        for where, choice in (("earlier", self.earlier), ("later", self.later)):
            if choice:
                before_ms = self.here.busiest_ms
                change = choice.busiest_ms / before_ms - 1 if before_ms else 0.0
                parts.append(
                    f"a layer {where} {humanise_bytes(choice.bytes_across)},"
                    f" busier side {100 * change:+.1f} %"
                )
        return "; ".join(parts)


def shifted_ms(
    cost: CostModel, stages: Sequence[Stage], codes: Codes, index: int, at: int
) -> float | None:
    """The iteration with the cut behind stage `index` in front of layer `at`; None if it is none.

    The order of blocks stays. A shift that needs more memory than a device has does not count.
    """
    stage, behind = stages[index], stages[index + 1]
    shifted = (
        replace(stage, layers=range(stage.layers.start, at)),
        replace(behind, layers=range(at, behind.layers.stop)),
    )
    for moved, order in zip(shifted, codes[index : index + 2], strict=True):
        needs_gb = cost.memory_gb(moved, most_in_flight(order))
        for device, need_gb in zip(moved.devices, needs_gb, strict=True):
            limit_gb = cost.cluster.devices[device].memory_gb
            if limit_gb is not None and need_gb > limit_gb:
                return None
    try:
        costs = cost.pipeline_costs([*stages[:index], *shifted, *stages[index + 2 :]])
    except PlanFileError:
        return None
    return run_schedule(costs, codes).iteration_ms


def find_cut(
    cost: CostModel,
    stage: Stage,
    behind: Stage,
    microbatches: int,
    iteration_ms: Callable[[int], float | None] = lambda _: None,
) -> Cut:
    """The cut between two neighbouring stages.

    `iteration_ms` says how long the whole plan takes with the cut in front of a layer.
    """
    at = stage.layers.stop

    def choice(layer: int) -> CutChoice:
        made = _choice(cost, stage, behind, microbatches, layer)
        return replace(made, iteration_ms=iteration_ms(layer))

    return Cut(
        here=choice(at),
        earlier=choice(at - 1) if len(stage.layers) > 1 else None,
        later=choice(at + 1) if len(behind.layers) > 1 else None,
    )


def _choice(cost: CostModel, stage: Stage, behind: Stage, microbatches: int, at: int) -> CutChoice:
    """What the two stages would cost with the cut in front of layer `at`."""
    costs = cost.least_costs(
        (
            replace(stage, layers=range(stage.layers.start, at)),
            replace(behind, layers=range(at, behind.layers.stop)),
        )
    )
    layer = cost.model.layers[at - 1]
    work_ms = microbatches * (costs.forward_ms_S + costs.backward_ms_S)
    link_ms = microbatches * costs.channel_ms_C
    return CutChoice(
        bytes_across=layer.output_bytes + layer.gradient_bytes,
        busiest_ms=float(max(*(work_ms + costs.all_reduce_ms_S), *link_ms)),
    )
