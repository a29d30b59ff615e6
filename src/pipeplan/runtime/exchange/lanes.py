"""One direction of a channel between two stages: who sends which rows, in what order, and tags."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.pipeline import Kind
from pipeplan.runtime.exchange.row_routing import RowRun

__all__ = ["AHEAD", "HEADER", "LATE", "TAGS_PER_MESSAGE", "TEXT", "Lane", "message_tag"]

NUM_PARTS = 4
HEADER, TEXT, AHEAD, LATE = range(NUM_PARTS)
"""The parts of a message. Those of one part arrive in the order in which they are sent. `AHEAD` are
tensors, or filler, whose receives were posted before the header came."""
TAGS_PER_MESSAGE = 2 * NUM_PARTS
"""One for each part and direction; so the rest of a tag tells these two. What is in front of the
rest tells microbatch and channel: two ranks may have several channels."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One direction of a channel, as one rank uses it for batches of one size."""

    channel: int
    kind: Kind
    runs_of: Sequence[Sequence[RowRun]]
    """By microbatch, which rows the other ranks send or get."""
    order: Sequence[int]
    """The microbatches that have rows, in the order of the sender."""
    position_of: dict[int, int]
    """The position of each microbatch in this order."""
    header_tags: tuple[int, ...]
    """The tag of each microbatch's header."""

    @classmethod
    def of(
        cls, channel: int, kind: Kind, runs_of: Sequence[Sequence[RowRun]], order: Sequence[int]
    ) -> "Lane":
        """The lane whose sender has this order of all microbatches."""
        used = [microbatch for microbatch in order if runs_of[microbatch]]
        position_of = {microbatch: position for position, microbatch in enumerate(used)}
        first = channel * len(runs_of)
        tags = [message_tag(first + microbatch, HEADER, kind) for microbatch in range(len(runs_of))]
        return cls(channel, kind, runs_of, used, position_of, tuple(tags))

    def tag(self, microbatch: int, part: int) -> int:
        """A number that tells apart what two ranks exchange in a step."""
        return message_tag(self.channel * len(self.runs_of) + microbatch, part, self.kind)


def message_tag(message: int, part: int, kind: Kind) -> int:
    """The tag of a part; messages are counted over all channels, one for each microbatch."""
    return TAGS_PER_MESSAGE * message + 2 * part + (kind is Kind.BACKWARD)
