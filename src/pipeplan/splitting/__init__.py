"""Which modules of a torch model are the layers of a model profile, and how to cut between them.

Running a plan and profiling a model use the same rules. So names and cuts mean the same in both.
"""

from pipeplan.splitting.holding import holders
from pipeplan.splitting.layout import BEFORE, BEHIND, Layout, lay_out
from pipeplan.splitting.stage_modules import StageModule, cut
from pipeplan.splitting.timing import profile_layers

__all__ = [
    "BEFORE",
    "BEHIND",
    "Layout",
    "Part",
    "StageModule",
    "cut",
    "holders",
    "lay_out",
    "profile_layers",
]

Part = StageModule
"""The earlier name of `StageModule`."""
