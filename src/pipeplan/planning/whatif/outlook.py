"""What could happen to a plan, and what would help it: a short table, the largest effects first.

Harm: a device at half speed, a lost device, a link at a quarter of its bandwidth. Every such change
is replayed, which is quick. Of each kind the worst few are planned anew.
Help: one more device, one more host, links twice as fast; each is planned anew.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from pipeplan.cluster import Cluster, HostMatrix, Matrix
from pipeplan.pipeline import Plan
from pipeplan.planning.whatif.carrying import Carried, carry_over
from pipeplan.planning.whatif.changed_cluster import ChangedCluster, apply_changes
from pipeplan.planning.whatif.changed_shared_links import with_faster_cards
from pipeplan.planning.whatif.changes import Changes
from pipeplan.planning.whatif.copied_devices import with_copies
from pipeplan.planning.whatif.question import ignores_memory, replan
from pipeplan.replaying import replay_plan
from pipeplan.validation import BANDWIDTH_GB_PER_S, MAX_LISTED_DEVICES, SPEED, number_text

__all__ = ["Outlook", "Prospect", "ProspectKind", "outlook"]

STRAGGLER_SPEED = 0.5
SLOW_LINK = 0.25
FAST_LINK = 2.0
MAX_REPLAYED = 64
"""Of more devices or links only so many are tried."""
LEAST_LINKS, MAX_LINK_NUMBERS = 4, 4_000_000
"""Each link that is tried makes a matrix; on large clusters these are few."""
NUM_SHOWN, NUM_SHOWN_LARGE = 2, 1
"""Of each kind of harm, on clusters of up to `MAX_SMALL` devices and on larger ones."""
MAX_SMALL = 16
EFFORT, EFFORT_LARGE = 0.25, 0.1


class ProspectKind(StrEnum):
    """What happens, or what is bought."""

    STRAGGLER = "straggler"
    LOSS = "loss"
    SLOW_LINK = "slow-link"
    DEVICE = "more-devices"
    FAST_LINK = "faster-links"

    @property
    def is_harm(self) -> bool:
        """Whether it makes the cluster worse."""
        return self in (ProspectKind.STRAGGLER, ProspectKind.LOSS, ProspectKind.SLOW_LINK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """One thing that could happen, and how long an iteration would take then."""

    kind: ProspectKind
    what: str
    options: str | None
    """What to give `pipeplan whatif` to look closer; None where no option says this."""
    kept_ms: float | None
    """With the plan as it is; None where it does not run."""
    kept_problem: str | None
    replanned_ms: float | None
    """With a new plan, or the old one if that is not slower; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The prospects of a plan, harm first, each part with the largest effect first."""

    before: Plan
    prospects: tuple[Prospect, ...]

    def __repr__(self) -> str:
        today_ms = self.before.iteration_ms
        return f"<Outlook: {len(self.prospects)} prospects, {today_ms:.6g} ms today>"

    def document(self) -> dict[str, Any]:
        """The table for machines."""
        return {
            "before_ms": self.before.iteration_ms,
            "prospects": [
                {
                    "kind": str(each.kind),
                    "what": each.what,
                    "options": each.options,
                    "kept_ms": each.kept_ms,
                    "kept_problem": each.kept_problem,
                    "replanned_ms": each.replanned_ms,
                }
                for each in self.prospects
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    kind: ProspectKind
    what: str
    changed: ChangedCluster
    carried: Carried
    options: str | None = None


def outlook(plan: Plan, *, report: Callable[[str], None] | None = None) -> Outlook:
    """What a straggler, a loss or a slow link would cost, and what more hardware would buy."""
    tell = report or (lambda _: None)
    before = replay_plan(plan).plan
    is_small = before.cluster.num_devices <= MAX_SMALL
    num_shown = NUM_SHOWN if is_small else NUM_SHOWN_LARGE
    cases: list[_Case] = []
    for kind, make in (
        (ProspectKind.STRAGGLER, _stragglers),
        (ProspectKind.LOSS, _losses),
        (ProspectKind.SLOW_LINK, _slow_links),
    ):
        tell(f"trying each {kind}")
        cases += _worst(make(before), num_shown)
    cases += [*_more_devices(before), *_faster_links(before)]
    prospects = []
    for number, case in enumerate(cases, 1):
        tell(f"planning for {case.what} ({number} of {len(cases)})")
        prospects.append(_prospect(before, case, EFFORT if is_small else EFFORT_LARGE))
    return Outlook(before=before, prospects=_ranked(prospects))


def _ranked(prospects: Iterable[Prospect]) -> tuple[Prospect, ...]:
    """Harm by what the old plan suffers, worst first; help by what it buys."""

    def key(each: Prospect) -> tuple[bool, float, float]:
        kept = math.inf if each.kept_ms is None else each.kept_ms
        replanned = math.inf if each.replanned_ms is None else each.replanned_ms
        if each.kind.is_harm:
            return False, -kept, -replanned
        return True, replanned, 0.0

    return tuple(sorted(prospects, key=key))


def _prospect(before: Plan, case: _Case, effort: float) -> Prospect:
    made, _ = replan(before, case.changed, effort=effort)
    times_ms = [] if made is None else [made.iteration_ms]
    if case.carried.plan is not None and case.carried.problem is None:
        times_ms.append(case.carried.plan.iteration_ms)
    return Prospect(
        kind=case.kind,
        what=case.what,
        options=case.options,
        kept_ms=None if case.carried.plan is None else case.carried.plan.iteration_ms,
        kept_problem=case.carried.problem,
        replanned_ms=min(times_ms, default=None),
    )


def _worst(cases: Iterable[_Case], most: int) -> list[_Case]:
    """The cases that cost the old plan most; of those that cost the same the first."""

    def cost_ms(case: _Case) -> float:
        return math.inf if case.carried.plan is None else case.carried.plan.iteration_ms

    different: dict[str, _Case] = {}
    for case in sorted(cases, key=lambda case: -cost_ms(case)):
        same = case.carried.problem if case.carried.plan is None else f"{cost_ms(case):.6g}"
        different.setdefault(same or "", case)
    return list(different.values())[:most]


# -------------------------------------------------------------------------------- harm


def _used_devices(plan: Plan) -> list[int]:
    return [device for group in plan.groups for device in group.devices]


def _case(plan: Plan, kind: ProspectKind, what: str, changes: Changes, options: str) -> _Case:
    changed = apply_changes(plan.cluster, changes)
    return _Case(
        kind=kind,
        what=what,
        changed=changed,
        carried=carry_over(plan, changed, ignore_memory=ignores_memory(plan)),
        options=options,
    )


def _stragglers(plan: Plan) -> Iterator[_Case]:
    for index in _first_few(_used_devices(plan)):
        device = plan.cluster.devices[index]
        if device.speed * STRAGGLER_SPEED < SPEED.least:
            continue
        yield _case(
            plan,
            ProspectKind.STRAGGLER,
            f"{device.name} at half speed",
            Changes(slower={device.name: STRAGGLER_SPEED}),
            f"--slower {device.name}={STRAGGLER_SPEED:g}",
        )


def _losses(plan: Plan) -> Iterator[_Case]:
    if plan.cluster.num_devices < 2:
        return
    for index in _first_few(_used_devices(plan)):
        name = plan.cluster.devices[index].name
        yield _case(
            plan, ProspectKind.LOSS, f"{name} lost", Changes(lose=(name,)), f"--lose {name}"
        )


def _slow_links(plan: Plan) -> Iterator[_Case]:
    """Each pair of hosts, or of devices of one host, that the plan uses."""
    devices, links = plan.cluster.devices, plan.cluster.bandwidth_gb_per_s
    if plan.cluster.num_devices > MAX_LISTED_DEVICES:
        return
    pairs: dict[tuple[str, str], tuple[int, int]] = {}
    for first, second in map(sorted, _used_pairs(plan)):
        hosts = (devices[first].host, devices[second].host)
        names = hosts if hosts[0] != hosts[1] else (devices[first].name, devices[second].name)
        if names[::-1] not in pairs:
            pairs.setdefault(names, (first, second))
    most = max(LEAST_LINKS, MAX_LINK_NUMBERS // plan.cluster.num_devices**2)
    for (low, high), (first, second) in _first_few(list(pairs.items()), most):
        slow = max(min(links[first][second], links[second][first]) * SLOW_LINK, 0.0)
        if slow < BANDWIDTH_GB_PER_S.least:
            continue
        slow = float(f"{slow:.4g}")
        yield _case(
            plan,
            ProspectKind.SLOW_LINK,
            f"{low} to {high} at a quarter",
            Changes(links={(low, high): slow}),
            f"--link {low},{high}={number_text(slow)}",
        )


def _used_pairs(plan: Plan) -> Iterator[tuple[int, int]]:
    """Devices that talk to each other: of neighbouring stages, and replicas."""
    for group in plan.groups:
        yield from combinations(_first_few(group.devices), 2)
    for stage, behind in pairwise(plan.stages):
        if set(stage.devices) == set(behind.devices):
            continue
        for first in _first_few(stage.devices):
            for second in _first_few(behind.devices):
                yield first, second


def _first_few(values: Sequence[Any], most: int = MAX_REPLAYED) -> list[Any]:
    """All of few values; of many an even selection."""
    most = min(most, MAX_REPLAYED)
    if len(values) <= most:
        return list(values)
    return [values[i * len(values) // most] for i in range(most)]


# -------------------------------------------------------------------------------- help


def _more_devices(plan: Plan) -> Iterator[_Case]:
    """One more device beside the first of each kind, and one more host like the first."""
    cluster = plan.cluster
    if cluster.num_devices > MAX_LISTED_DEVICES // 2:
        return
    hosts: dict[str, list[int]] = {}
    for index, device in enumerate(cluster.devices):
        hosts.setdefault(device.host, []).append(index)
    fastest = max(range(cluster.num_devices), key=lambda i: (cluster.devices[i].speed, -i))
    example = cluster.devices[fastest]
    mates = hosts[example.host]
    if len(mates) > 1:
        yield _grown(plan, [fastest], example.host, f"one more device in {example.host}")
    if len(hosts) == 1:
        return  # how fast links to another host would be is not known
    devices = "1 device" if len(mates) == 1 else f"{len(mates)} devices"
    yield _grown(plan, mates, None, f"one more host like {example.host} ({devices})")


def _grown(plan: Plan, copied: list[int], host: str | None, what: str) -> _Case:
    """The cluster with copies of some devices, in their host or in a new one."""
    changed = ChangedCluster(
        cluster=with_copies(plan.cluster, copied, host),
        index_of={device: device for device in range(plan.cluster.num_devices)},
    )
    carried = carry_over(plan, changed, ignore_memory=ignores_memory(plan))
    return _Case(kind=ProspectKind.DEVICE, what=what, changed=changed, carried=carried)


def _faster_links(plan: Plan) -> Iterator[_Case]:
    """All links between hosts twice as fast, cards included, and all links inside hosts."""
    cluster = plan.cluster
    if cluster.num_devices > MAX_LISTED_DEVICES:
        return
    hosts = np.array([device.host for device in cluster.devices])
    between = hosts[:, None] != hosts[None, :]
    off_diagonal = ~np.eye(cluster.num_devices, dtype=bool)
    for where, what in (
        (between, "links between hosts twice as fast"),
        (~between & off_diagonal, "links inside hosts twice as fast"),
    ):
        if not where.any():
            continue
        faster = replace(cluster, bandwidth_gb_per_s=_scaled(cluster, where))
        changed = ChangedCluster(
            cluster=with_faster_cards(faster, FAST_LINK) if where is between else faster,
            index_of={device: device for device in range(cluster.num_devices)},
        )
        yield _Case(
            kind=ProspectKind.FAST_LINK,
            what=what,
            changed=changed,
            carried=carry_over(plan, changed, ignore_memory=ignores_memory(plan)),
        )


def _scaled(cluster: Cluster, where: Any) -> Matrix | HostMatrix:
    matrix = np.array(cluster.bandwidth_gb_per_s, dtype=np.float64)
    faster = np.minimum(matrix * FAST_LINK, BANDWIDTH_GB_PER_S.most)
    return _matrix(np.where(where, faster, matrix))


def _matrix(numbers: Any) -> Matrix:
    return tuple(map(tuple, numbers.tolist()))
