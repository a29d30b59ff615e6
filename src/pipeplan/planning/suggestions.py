"""What would fit where nothing does: smaller microbatches, more or larger devices, less asked.

Each suggestion is planned before it is made. The number of these plannings is bounded, and they
take little effort: one plan is enough, with one stage a device. What has no room is not planned at
all (`planner/room.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pipeplan.cluster import Cluster
from pipeplan.errors import InfeasibleError, InputError, NoPlanError, PlanFileError
from pipeplan.planning.door import attempt, make_problem
from pipeplan.planning.global_batch import scaled_model
from pipeplan.planning.options import PlanningOptions
from pipeplan.planning.planner.room import may_fit
from pipeplan.planning.whatif.copied_devices import with_copies
from pipeplan.profile import ModelProfile
from pipeplan.validation import MAX_LISTED_DEVICES, MICROBATCHES

__all__ = ["explain", "what_would_fit"]

EFFORT = 0.01
MAX_TRIES = 8
"""Plannings for each kind of suggestion."""
MOST_TIMES = 8
"""More than so many times the devices are not tried."""
CONSTRAINTS = {
    "stages": "--stages",
    "max_stages": "--max-stages",
    "no_cut_after": "--no-cut-after",
    "together": "--together",
    "keep_tied": "--keep-tied",
    "first_on": "--first-on",
    "last_on": "--last-on",
    "without": "--without",
}
MEMORY_STEPS = (1.001, 1.25, 1.5, 2.0)
"""How many times the stated need is tried, when memory is what would help."""


def explain(error: NoPlanError, suggestions: Sequence[str]) -> str:
    """What is needed and what would fit, in one line."""
    what = str(error)
    if error.need_gb is not None and error.stage is not None:
        has = "" if error.memory_gb is None else f", which has {error.memory_gb:g} GB"
        on = f"each device of stage {error.stage}"
        if len(error.devices) == 1:
            on = f"{error.devices[0]!r} in stage {error.stage}"
        what = f"no plan fits: the closest needs {_need_text(error)} GB on {on}{has}"
    if not suggestions:
        return f"{what}; nothing near was found to fit, but --ignore-memory plans anyway"
    return f"{what}; fits {', or '.join(suggestions)}"


def _need_text(error: NoPlanError) -> str:
    """The need in as few digits as show that it is more than there is."""
    need_gb, has_gb = error.need_gb or 0.0, error.memory_gb or 0.0
    texts = [f"{need_gb:.{digits}g}" for digits in range(3, 17)]
    return next((text for text in texts if float(text) > has_gb), texts[0])


def what_would_fit(
    model: ModelProfile,
    cluster: Cluster,
    microbatches: int,
    error: NoPlanError,
    *,
    planner: str = "best",
    seed: int = 0,
    report: Callable[[str], None] | None = None,
    **options: Any,
) -> list[str]:
    """Changes under which a plan exists, each of them planned, in words."""
    tell = report or (lambda _: None)
    asked = PlanningOptions(**{**options, "effort": EFFORT})

    def fits(
        a_model: ModelProfile = model,
        a_cluster: Cluster = cluster,
        number: int = microbatches,
        changed: dict[str, Any] | None = None,
        is_planned: bool = True,
    ) -> bool:
        arguments = {**_plain(asked, a_cluster), **(changed or {})}
        try:
            problem = make_problem(a_model, a_cluster, number, seed=seed, **arguments)
            if not may_fit(problem):
                return False
            return (
                not is_planned
                or attempt(replace(problem, needs_bound=False), planner).plan is not None
            )
        except (InfeasibleError, InputError, PlanFileError):
            return False

    tell("would it fit with less asked?")
    found = _fewer_constraints(asked, fits)
    if error.need_gb is None:
        return found
    tell("would it fit with smaller microbatches?")
    found += _smaller_microbatches(model, microbatches, fits)
    tell("would it fit with more devices?")
    found += _more_devices(cluster, fits)
    tell("would it fit with more memory?")
    found += _more_memory(cluster, error, fits)
    return found


def _plain(asked: PlanningOptions, cluster: Cluster) -> dict[str, Any]:
    """The arguments; one stage a device where that can be, because its plans are soon made."""
    arguments = asked.arguments()
    if asked.uses_families and (asked.stages or 1) <= cluster.num_devices - len(asked.without):
        arguments |= {"positions": 1, "split_backward": False}
    return arguments


def _fewer_constraints(asked: PlanningOptions, fits: Callable[..., bool]) -> list[str]:
    defaults = PlanningOptions().arguments()
    given = [name for name in CONSTRAINTS if getattr(asked, name) != defaults[name]]
    return [
        f"without {CONSTRAINTS[name]}" for name in given if fits(changed={name: defaults[name]})
    ]


def _smaller_microbatches(
    model: ModelProfile, microbatches: int, fits: Callable[..., bool]
) -> list[str]:
    """The largest smaller size that fits, for the same batch."""
    size = model.microbatch_size
    batch = size * microbatches
    sizes = [n for n in range(size - 1, 0, -1) if batch % n == 0][-MAX_TRIES:]
    for smaller in sizes:
        number = batch // smaller
        if number > MICROBATCHES.most:
            break
        try:
            scaled = scaled_model(model, smaller)
        except InputError:
            break
        if fits(a_model=scaled, number=number):
            return [f"with microbatch size {smaller} (and {number} microbatches)"]
    return []


def _more_devices(cluster: Cluster, fits: Callable[..., bool]) -> list[str]:
    """The least number of whole hosts like the first, or of devices in a single host, that fits."""
    first = cluster.devices[0].host
    mates = [i for i, device in enumerate(cluster.devices) if device.host == first]
    is_one_host = len(mates) == cluster.num_devices
    if is_one_host and len(mates) == 1:
        return []  # the links of another device are not known
    copied = [mates[0]] if is_one_host else mates

    def grown(count: int) -> Cluster:
        larger = cluster
        for _ in range(count):
            larger = with_copies(larger, copied, first if is_one_host else None)
        return larger

    most = min(MOST_TIMES * cluster.num_devices, MAX_LISTED_DEVICES // 4) - cluster.num_devices

    def has_room(count: int) -> bool:
        return fits(a_cluster=grown(count), is_planned=False)

    count = least_that_fits(most // len(copied), has_room)
    if count is None or not fits(a_cluster=grown(count)):
        return []
    number = cluster.num_devices + count * len(copied)
    like = "" if len(set(map(_kind, cluster.devices))) == 1 else f" (more like {first})"
    return [f"with {number} devices{like}"]


def _kind(device: Any) -> tuple[float, float | None]:
    return device.speed, device.memory_gb


def least_that_fits(most: int, fits: Callable[[int], bool]) -> int | None:
    """The least count from 1 to `most` that fits, or one near it after `MAX_TRIES` tries."""
    low, high, tries = 0, 1, 0
    while not fits(min(high, most)):
        low, high, tries = high, 2 * high, tries + 1
        if low >= most or tries >= MAX_TRIES:
            return None
    high = min(high, most)
    while high - low > 1 and tries < MAX_TRIES:
        middle, tries = (low + high) // 2, tries + 1
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _more_memory(cluster: Cluster, error: NoPlanError, fits: Callable[..., bool]) -> list[str]:
    """The least memory of every device that is known to be enough."""
    for factor in MEMORY_STEPS:
        need_gb = float(f"{(error.need_gb or 0.0) * factor:.3g}")
        if need_gb < (error.need_gb or 0.0):
            need_gb = float(f"{(error.need_gb or 0.0) * factor * 1.005:.3g}")
        devices = tuple(
            device
            if device.memory_gb is None or device.memory_gb >= need_gb
            else replace(device, memory_gb=need_gb)
            for device in cluster.devices
        )
        if fits(a_cluster=replace(cluster, devices=devices)):
            is_even = len({device.memory_gb for device in devices}) == 1
            return [f"with {'' if is_even else 'at least '}{need_gb:g} GB on each device"]
    return []
