"""What can go wrong between a plan and the machines that run it.

::

    PipeplanError
    └── RuntimeMismatchError   plan, model, batch and ranks do not fit together (exit code 2)
        └── RankFailedError    a rank died, hung or raised (exit code 1)
"""

from pipeplan.errors import PipeplanError

__all__ = ["RankFailedError", "RuntimeMismatchError"]


class RuntimeMismatchError(PipeplanError):
    """The plan does not fit the model, the batch or the ranks that are to run it."""


class RankFailedError(RuntimeMismatchError):
    """A rank died, hung or raised; the message names it."""

    exit_code = 1
