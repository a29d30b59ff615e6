"""Says once, in one line, that NaN in a loss may stand for a value of another stage."""

import math
import sys

from pipeplan.splitting.stage_modules import StageModule

__all__ = ["NanNote"]


class NanNote:
    """Explains the first loss that is NaN."""

    def __init__(self) -> None:
        self._is_said = False

    def look(self, loss: float, step: int, module: StageModule) -> None:
        """Write the line if this loss is the first NaN, and the stages use placeholders."""
        if self._is_said or not math.isnan(loss) or not module.uses_placeholders:
            return
        self._is_said = True
        sys.stderr.write(
            f"pipeplan: the loss is NaN after {step} steps; if the model alone gives a number, a"
            " branch that the first batch did not take uses a value of another stage, for which NaN"
            " stands: let a layer return that value\n"
        )
