"""pipeplan plans synchronous pipeline-parallel training on clusters of any connectivity.

>>> import pipeplan as pp
>>> plan = pp.plan(pp.zoo.model("bert-large"), pp.zoo.cluster("4x2-10g"), microbatches=16)
>>> pp.write_plan(plan, "bert.plan.json")

Names load on first use, so that importing the package costs nothing.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeplan import zoo
    from pipeplan.checker import Verdict, check
    from pipeplan.cluster import Cluster, Device, Duplex, HostGroup, expand_hosts
    from pipeplan.documents.files import (
        read_cluster,
        read_model,
        read_plan,
        write_cluster,
        write_model,
        write_plan,
    )
    from pipeplan.errors import (
        InfeasibleError,
        InputError,
        NoPlanError,
        PipeplanError,
        PlanningInterrupted,
        ScheduleError,
    )
    from pipeplan.pipeline import Block, Bound, Kind, Plan, Prediction, Schedule, Stage, Timeline
    from pipeplan.planning.comparison import Comparison, ComparisonRow, compare
    from pipeplan.planning.door import plan
    from pipeplan.planning.global_batch import plan_global_batch
    from pipeplan.planning.sweep.running import sweep
    from pipeplan.planning.whatif.outlook import Outlook, Prospect, outlook
    from pipeplan.planning.whatif.question import WhatIf, whatif
    from pipeplan.profile import LayerProfile, ModelProfile
    from pipeplan.replaying import simulate
    from pipeplan.report.html import write_report
    from pipeplan.report.picture import plot
    from pipeplan.report.sweep_picture import plot_sweep
    from pipeplan.report.trace import write_trace
    from pipeplan.shared_links import SharedLink
    from pipeplan.version import VERSION as __version__

__all__ = [
    "Block",
    "Bound",
    "Cluster",
    "Comparison",
    "ComparisonRow",
    "Device",
    "Duplex",
    "HostGroup",
    "InfeasibleError",
    "InputError",
    "Kind",
    "LayerProfile",
    "ModelProfile",
    "NoPlanError",
    "Outlook",
    "PipeplanError",
    "Plan",
    "PlanningInterrupted",
    "Prediction",
    "Prospect",
    "Schedule",
    "ScheduleError",
    "SharedLink",
    "Stage",
    "Timeline",
    "Verdict",
    "WhatIf",
    "__version__",
    "check",
    "compare",
    "expand_hosts",
    "outlook",
    "plan",
    "plan_global_batch",
    "plot",
    "plot_sweep",
    "read_cluster",
    "read_model",
    "read_plan",
    "simulate",
    "sweep",
    "whatif",
    "write_cluster",
    "write_model",
    "write_plan",
    "write_report",
    "write_trace",
    "zoo",
]

_NAMES_IN = {
    "checker": ("Verdict", "check"),
    "cluster": ("Cluster", "Device", "Duplex", "HostGroup", "expand_hosts"),
    "errors": (
        "InfeasibleError",
        "InputError",
        "NoPlanError",
        "PipeplanError",
        "PlanningInterrupted",
        "ScheduleError",
    ),
    "documents.files": (
        "read_cluster",
        "read_model",
        "read_plan",
        "write_cluster",
        "write_model",
        "write_plan",
    ),
    "pipeline": ("Block", "Bound", "Kind", "Plan", "Prediction", "Schedule", "Stage", "Timeline"),
    "planning.comparison": ("Comparison", "ComparisonRow", "compare"),
    "planning.door": ("plan",),
    "planning.global_batch": ("plan_global_batch",),
    "planning.sweep.running": ("sweep",),
    "planning.whatif.outlook": ("Outlook", "Prospect", "outlook"),
    "planning.whatif.question": ("WhatIf", "whatif"),
    "profile": ("LayerProfile", "ModelProfile"),
    "report.html": ("write_report",),
    "report.picture": ("plot",),
    "report.sweep_picture": ("plot_sweep",),
    "report.trace": ("write_trace",),
    "replaying": ("simulate",),
    "shared_links": ("SharedLink",),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}
_PARTS_WITH_TORCH = ("measure", "runtime")
"""They are not imported with the rest, since they need PyTorch."""


def __getattr__(name: str) -> Any:
    if name == "zoo":
        return import_module("pipeplan.zoo")
    if name == "__version__":
        return import_module("pipeplan.version").VERSION
    if name not in _MODULE_OF:
        hint = f"; write `import pipeplan.{name}` first" if name in _PARTS_WITH_TORCH else ""
        raise AttributeError(f"module 'pipeplan' has no attribute {name!r}{hint}")
    value = getattr(import_module(f"pipeplan.{_MODULE_OF[name]}"), name)
    if "pipeplan.pipeline" in sys.modules:
        import_module("pipeplan.pipeline").draw_in_notebooks(_notebook_html)
    globals()[name] = value  # the next use finds it without coming here
    return value


def _notebook_html(plan: "Plan") -> str:
    html: str = import_module("pipeplan.report.notebook").notebook_html(plan)
    return html


def __dir__() -> list[str]:
    return __all__
