"""Whether layers run inside torch.utils.checkpoint, which runs them again in the backward."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils import checkpoint

__all__ = ["CheckpointFinder", "is_inside_checkpoint"]


def is_inside_checkpoint() -> bool:
    """Whether the caller runs inside torch.utils.checkpoint."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class CheckpointFinder:
    """Notices checkpoints, around modules that are called or when somebody looks."""

    def __init__(self) -> None:
        self.has_found = False

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look at the modules that are called inside."""
        handle = nn.modules.module.register_module_forward_pre_hook(self.look)
        try:
            yield
        finally:
            handle.remove()

    def look(self, *_: Any) -> None:
        """Look whether this is inside of one."""
        self.has_found = self.has_found or is_inside_checkpoint()
