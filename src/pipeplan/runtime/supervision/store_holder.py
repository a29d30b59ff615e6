"""Who holds the store, and what to say when it is gone or does not answer."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.runtime.supervision.processes import Process

__all__ = ["StoreHolder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHolder:
    """The process that holds the store: rank 0, or torchrun's agent of the first node."""

    rank: int | None
    """None if it is an agent of torchrun."""
    process: Process
    """Rank 0, or the agent that has started this rank."""

    @classmethod
    def of_this_launch(cls, processes: Sequence[Process], parent: int) -> "StoreHolder":
        """The holder, by the variables that torchrun sets."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return cls(rank=None, process=Process.of(parent))
        return cls(rank=0, process=processes[0])

    def reason(self, silence_s: float, *, is_gone: bool) -> str:
        """What is wrong with it; for a rank, words that follow its name."""
        if self.rank is not None:
            if self.process.is_gone:
                return f"died (process {self.process.pid} is gone)"
            if is_gone:
                return "is out of reach: its store is gone"
            return f"stopped answering: its store has not answered for {silence_s:.0f} s"
        if is_gone:
            return "the store of torchrun is gone"
        if self.process.is_stopped:
            return f"torchrun (process {self.process.pid}) is stopped, and it holds the store"
        return f"the store of torchrun has not answered for {silence_s:.0f} s"
