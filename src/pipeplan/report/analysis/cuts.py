"""Why a cut is where it is: what it costs there, and what it would cost one layer beside it."""

from dataclasses import dataclass, replace

from pipeplan.cost import CostModel
from pipeplan.pipeline import Stage
from pipeplan.report.units import humanise_bytes

__all__ = ["Cut", "CutChoice", "find_cut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutChoice:
    """What one place to cut costs, between the device sets of two neighbouring stages."""

    bytes_across: float
    """Both directions, one microbatch."""
    busiest_ms: float
    """In one iteration: the busier of the two stages, or the link if that is busier still."""


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


def find_cut(cost: CostModel, stage: Stage, behind: Stage, microbatches: int) -> Cut:
    """The cut between two neighbouring stages."""
    at = stage.layers.stop

    def choice(layer: int) -> CutChoice:
        return _choice(cost, stage, behind, microbatches, layer)

    return Cut(
        here=choice(at),
        earlier=choice(at - 1) if len(stage.layers) > 1 else None,
        later=choice(at + 1) if len(behind.layers) > 1 else None,
    )


def _choice(cost: CostModel, stage: Stage, behind: Stage, microbatches: int, at: int) -> CutChoice:
    """What the two stages would cost with the cut in front of layer `at`."""
    costs = cost.pipeline_costs(
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
