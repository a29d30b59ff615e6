"""What each message probably carries: what it carried the last time.

Most programs send the same kinds of tensors in every step. So the receiver may post receives for
the tensors before their header has come. Both ends of a message make the same forecast by the same
rule, from messages that both of them know::

    the first message                        no forecast: its tensors wait for the header
    later ones                               like the last one with the same key and microbatch
    after a message of another layout        the same, but nothing is posted before the header,
                                             until two messages in a row have the same layout

A key stands for the shapes of the batch, and for training or evaluation. A wrong forecast costs
time. It never changes what arrives.
"""

from collections import OrderedDict
from typing import NamedTuple

from pipeplan.pipeline import Kind
from pipeplan.runtime.exchange.contents import Contents
from pipeplan.runtime.exchange.packing import Packing, find_packing

__all__ = ["Forecast", "Forecasts", "LaneForecasts", "StepForecasts"]

MOST_KEYS = 128
"""Both ends forget the key that was not used for longest, in the same step."""


class Forecast(NamedTuple):
    """What a message probably carries."""

    contents: Contents
    is_stable: bool
    """Whether the last two messages had the same layout. If so, receives are posted for it."""
    packing: Packing | None
    """How such a message travels in one piece; None if it is too large."""


Slot = tuple[int, int]
"""Microbatch and the other rank."""


class LaneForecasts:
    """The forecasts of all messages of a step in one direction of a channel, at one end."""

    def __init__(self) -> None:
        self._of_slot: dict[Slot, Forecast] = {}
        self.get = self._of_slot.get
        """The forecast of a message; None if there was none before."""
        self.largest_row_bytes = 0
        """The largest row of any message."""

    def note(self, slot: Slot, contents: Contents, num_rows: int) -> None:
        """Learn what a message carried."""
        last = self._of_slot.get(slot)
        is_stable = last is None or contents.has_layout_of(last.contents)
        self._of_slot[slot] = Forecast(contents, is_stable, find_packing(contents, num_rows))
        row_bytes = -(-contents.num_bytes(num_rows) // num_rows)
        self.largest_row_bytes = max(self.largest_row_bytes, row_bytes)


class StepForecasts:
    """The forecasts of all messages of a step over one end of a channel."""

    def __init__(self) -> None:
        self.forward, self.backward = LaneForecasts(), LaneForecasts()

    def of(self, kind: Kind) -> LaneForecasts:
        """Those of one direction."""
        return self.forward if kind is Kind.FORWARD else self.backward


class Forecasts:
    """The forecasts of one end of a channel over all steps."""

    def __init__(self) -> None:
        self._of_key: OrderedDict[int, StepForecasts] = OrderedDict()

    def begin(self, key: int) -> StepForecasts:
        """The forecasts for a step with this key."""
        found = self._of_key.get(key)
        if found is None:
            found = self._of_key[key] = StepForecasts()
        self._of_key.move_to_end(key)
        if len(self._of_key) > MOST_KEYS:
            self._of_key.popitem(last=False)
        return found
