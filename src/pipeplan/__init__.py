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
    from pipeplan.errors import InfeasibleError, InputError, PipeplanError, ScheduleError
    from pipeplan.pipeline import Block, Bound, Kind, Plan, Prediction, Schedule, Stage, Timeline
    from pipeplan.planning.door import plan
    from pipeplan.profile import LayerProfile, ModelProfile
    from pipeplan.replaying import simulate
    from pipeplan.report.html import write_report

__all__ = [
    "Block",
    "Bound",
    "Cluster",
    "Device",
    "Duplex",
    "HostGroup",
    "InfeasibleError",
    "InputError",
    "Kind",
    "LayerProfile",
    "ModelProfile",
    "PipeplanError",
    "Plan",
    "Prediction",
    "Schedule",
    "ScheduleError",
    "Stage",
    "Timeline",
    "Verdict",
    "check",
    "expand_hosts",
    "plan",
    "read_cluster",
    "read_model",
    "read_plan",
    "simulate",
    "write_cluster",
    "write_model",
    "write_plan",
    "write_report",
    "zoo",
]

_NAMES_IN = {
    "checker": ("Verdict", "check"),
    "cluster": ("Cluster", "Device", "Duplex", "HostGroup", "expand_hosts"),
    "errors": ("InfeasibleError", "InputError", "PipeplanError", "ScheduleError"),
    "documents.files": (
        "read_cluster",
        "read_model",
        "read_plan",
        "write_cluster",
        "write_model",
        "write_plan",
    ),
    "pipeline": ("Block", "Bound", "Kind", "Plan", "Prediction", "Schedule", "Stage", "Timeline"),
    "planning.door": ("plan",),
    "profile": ("LayerProfile", "ModelProfile"),
    "report.html": ("write_report",),
    "replaying": ("simulate",),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "zoo":
        return import_module("pipeplan.zoo")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'pipeplan' has no attribute {name!r}")
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
