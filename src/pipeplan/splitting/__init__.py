"""Which modules of a torch model are the layers of a model profile, and how to cut between them.

Running a plan and profiling a model use the same rules. So names and cuts mean the same in both.
"""

from importlib import import_module
from typing import Any

from pipeplan.splitting.holding import holders
from pipeplan.splitting.layout import BEFORE, BEHIND, Layout, lay_out
from pipeplan.splitting.stage_modules import StageModule, cut

__all__ = [
    "BEFORE",
    "BEHIND",
    "Layout",
    "Part",
    "StageModule",
    "cut",
    "holders",
    "lay_out",
]

Part = StageModule
"""The earlier name of `StageModule`."""


def __getattr__(name: str) -> Any:
    if name == "profile_layers":  # the earlier name of `pipeplan.measure.profile`
        return import_module("pipeplan.measure.profiling").profile
    raise AttributeError(f"module 'pipeplan.splitting' has no attribute {name!r}")
