"""What a change of the cluster costs, and what a new plan wins back."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pipeplan.errors import InfeasibleError, InputError
from pipeplan.pipeline import Plan
from pipeplan.planning.door import plan as make_plan
from pipeplan.planning.options import WITHOUT_FAMILIES, OptionArguments, PlanningOptions
from pipeplan.planning.registry import SEARCH_FAMILIES, planner_names
from pipeplan.planning.whatif.carrying import carry_over
from pipeplan.planning.whatif.changed_cluster import ChangedCluster, apply_changes
from pipeplan.planning.whatif.changes import AddedHosts, Changes
from pipeplan.planning.whatif.parsing import parse_added
from pipeplan.replaying import replay_plan

__all__ = [
    "WhatIf",
    "answer",
    "ignores_memory",
    "options_for",
    "recorded_options",
    "replan",
    "whatif",
]

Report = Callable[[str], None]
MAX_FULL_EFFORT_DEVICES = 32
QUICK_EFFORT = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The three plans of a question; times are comparable, since the batch is the same."""

    changes: Changes
    before: Plan
    """The plan as it is today."""
    kept: Plan | None
    """The same plan on the changed cluster; None where it does not run there."""
    kept_problem: str | None
    """Why the old plan does not run, or does not fit, after the change."""
    replanned: Plan | None
    """The best plan known for the changed cluster; the kept one where that is not slower."""
    replanned_problem: str | None
    planning_s: float

    def __repr__(self) -> str:
        plans = (self.before, self.kept, self.replanned)
        today, kept, new = (f"{p.iteration_ms:.6g} ms" if p else "none" for p in plans)
        return f"<What if {self.changes.title[:40]}: today {today}, kept {kept}, new {new}>"

    @property
    def is_kept_best(self) -> bool:
        """Whether the old plan is still the best one known."""
        return self.kept is not None and self.replanned is self.kept

    @property
    def cost(self) -> float | None:
        """By which fraction an iteration of the old plan takes longer; None if it does not run."""
        return None if self.kept is None else _change(self.before, self.kept)

    @property
    def cost_replanned(self) -> float | None:
        """By which fraction an iteration takes longer with the new plan."""
        return None if self.replanned is None else _change(self.before, self.replanned)

    @property
    def won_back(self) -> float | None:
        """By which fraction the new plan is shorter than the old one on the changed cluster."""
        if self.kept is None or self.replanned is None or not self.kept.iteration_ms:
            return None
        return 1 - self.replanned.iteration_ms / self.kept.iteration_ms

    def document(self) -> dict[str, Any]:
        """The answer for machines, without the plans."""
        return {
            "changes": list(self.changes.words),
            "before_ms": self.before.iteration_ms,
            "kept_ms": None if self.kept is None else self.kept.iteration_ms,
            "kept_problem": self.kept_problem,
            "replanned_ms": None if self.replanned is None else self.replanned.iteration_ms,
            "replanned_problem": self.replanned_problem,
            "cost": self.cost,
            "cost_replanned": self.cost_replanned,
            "won_back": self.won_back,
            "planning_s": self.planning_s,
        }


def _change(before: Plan, after: Plan) -> float | None:
    """By which fraction an iteration takes longer; None if it took no time at all before."""
    return after.iteration_ms / before.iteration_ms - 1 if before.iteration_ms else None


def whatif(
    plan: Plan,
    *,
    slower: Mapping[str, float] | None = None,
    links: Mapping[tuple[str, str], float] | None = None,
    lose: Sequence[str] = (),
    add: Sequence[str | AddedHosts] = (),
    planner: str | None = None,
    effort: float | None = None,
    report: Report | None = None,
) -> WhatIf:
    """The old plan and a new one on a cluster that has changed.

    Args:
        plan: the plan as it is today.
        slower: by the name of a device or host the factor of its speed.
        links: by two names of devices or hosts the bandwidth in GB/s, both directions.
        lose: devices or hosts that are gone.
        add: new hosts, `"2x4:12"` for two hosts of four devices with 12 GB/s inside.
        planner: who makes the new plan; by default the planner of the old one.
        effort: how much to search for it; by default less on clusters of more than 32 devices.
        report: called with a short line about progress, now and then.

    Examples:
        >>> import pipeplan as pp
        >>> plan = pp.plan(pp.zoo.model("vgg19"), pp.zoo.cluster("4x2-10g"), planner="spp")
        >>> pp.whatif(plan, slower={"h0d1": 0.5}, planner="spp").cost > 0
        True
    """
    changes = Changes(
        slower=dict(slower or {}),
        links=dict(links or {}),
        lose=tuple(lose),
        add=tuple(parse_added(hosts) if isinstance(hosts, str) else hosts for hosts in add),
    )
    if not changes:
        raise InputError("whatif: names no change; give slower, links, lose or add")
    before = replay_plan(plan).plan
    return answer(before, changes, planner=planner, effort=effort, report=report)


def answer(
    before: Plan,
    changes: Changes,
    *,
    planner: str | None = None,
    effort: float | None = None,
    report: Report | None = None,
) -> WhatIf:
    """The answer for a plan with figures of its own."""
    changed = apply_changes(before.cluster, changes)
    carried = carry_over(before, changed, ignore_memory=ignores_memory(before))
    began_s = time.perf_counter()
    replanned, problem = replan(before, changed, planner=planner, effort=effort, report=report)
    planning_s = time.perf_counter() - began_s
    fits = carried.plan is not None and carried.problem is None
    if carried.plan is not None and fits:
        best_ms = None if replanned is None else replanned.iteration_ms
        if best_ms is None or carried.plan.iteration_ms <= best_ms * (1 + 1e-9):
            replanned, problem = carried.plan, None
    return WhatIf(
        changes=changes,
        before=before,
        kept=carried.plan,
        kept_problem=carried.problem,
        replanned=replanned,
        replanned_problem=problem,
        planning_s=planning_s,
    )


def replan(
    before: Plan,
    changed: ChangedCluster,
    *,
    planner: str | None = None,
    effort: float | None = None,
    report: Report | None = None,
) -> tuple[Plan | None, str | None]:
    """A new plan for the changed cluster under the old plan's options, or why there is none."""
    planner = planner or (before.planner if before.planner in planner_names() else "best")
    asked = options_for(planner, before)
    names = {device.name for device in changed.cluster.devices}
    for field in ("first_on", "last_on"):
        if asked.get(field) not in (None, *names):
            return None, f"{field}: {asked.get(field)!r} is gone, and the plan asks for it"
    asked["without"] = tuple(name for name in asked.get("without", ()) if name in names)
    asked["effort"] = quick_effort(changed.cluster.num_devices) if effort is None else effort
    try:
        made = make_plan(
            before.model,
            changed.cluster,
            before.microbatches,
            planner,
            seed=before.seed,
            report=report,
            **asked,
        )
    except InfeasibleError as reason:
        return None, str(reason)
    return made, None


def options_for(planner: str, plan: Plan) -> OptionArguments:
    """What was asked for the plan, without what this planner does not know."""
    asked = recorded_options(plan)
    return asked if planner in SEARCH_FAMILIES else {**asked, **WITHOUT_FAMILIES}


def ignores_memory(plan: Plan) -> bool:
    """Whether the plan was made without regard to memory."""
    return recorded_options(plan).get("ignore_memory", False)


def recorded_options(plan: Plan) -> OptionArguments:
    """What was asked of the planner, from the plan's own record; what makes no sense is left out.

    A plan's file may hold anything there.
    """
    known = {each.name for each in fields(PlanningOptions)} - {"runnable"}
    found: OptionArguments = {}
    for name, value in plan.options.items():
        if name in known:
            try:
                one = PlanningOptions(**{name: value})
            except InputError:
                continue
            found[name] = getattr(one, name)  # type: ignore[literal-required]
    if (
        WITHOUT_FAMILIES.keys() & found.keys() or not plan.uses_families
    ):  # a record leaves out what is plain
        found.setdefault("positions", 1)
        found.setdefault("split_backward", False)
    return found


def quick_effort(num_devices: int) -> float:
    """The effort of a replanning that takes less than a second on 64 devices."""
    return 1.0 if num_devices <= MAX_FULL_EFFORT_DEVICES else QUICK_EFFORT
