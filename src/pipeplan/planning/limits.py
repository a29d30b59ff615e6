"""The limits that a plan has to keep: memory, whole samples, and what the user asked for.

`best` and `exact` keep all of them. Published planners plan by their own rules; `broken_limits`
says which limits a plan of theirs breaks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeplan.checker import has_whole_samples, memory_excesses
from pipeplan.cluster import Cluster
from pipeplan.documents.text import excerpt, nearest
from pipeplan.errors import InfeasibleError, InputError, PipeplanError
from pipeplan.pipeline import Plan, Stage
from pipeplan.profile import ModelProfile

__all__ = [
    "BrokenLimits",
    "Limits",
    "broken_constraint",
    "broken_limits",
    "make_limits",
    "require_kept",
    "require_positions",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan has to keep; layers and devices by their index."""

    memory: bool = True
    """Whether no device may need more memory than it has."""
    whole_samples: bool = True
    """Whether each device takes whole samples of a microbatch."""
    recompute: bool = True
    """Whether a planner may recompute activations where memory is short."""
    shares: bool = True
    """Whether a planner may give devices of different speed different shares."""
    no_cut_after: frozenset[int] = frozenset()
    """Layers that share a stage with the layer behind them."""
    min_stages: int = 1
    max_stages: int | None = None
    first_on: int | None = None
    """A device that has to serve the first stage."""
    last_on: int | None = None
    without: frozenset[int] = frozenset()
    """Devices that stay unused."""

    @property
    def has_constraints(self) -> bool:
        """Whether the user asked for more than memory and whole samples."""
        return bool(
            self.no_cut_after
            or self.without
            or self.min_stages > 1
            or self.max_stages is not None
            or self.first_on is not None
            or self.last_on is not None
        )

    def allows_number(self, num_stages: int) -> bool:
        """Whether a plan may have so many stages."""
        most = num_stages if self.max_stages is None else self.max_stages
        return self.min_stages <= num_stages <= most


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenLimits:
    """Which limits a finished plan breaks."""

    fits_memory: bool = True
    has_whole_samples: bool = True
    constraint: str | None = None
    """The first constraint that the plan breaks, in words."""

    @property
    def keeps_all(self) -> bool:
        """Whether the plan breaks none."""
        return self.fits_memory and self.has_whole_samples and self.constraint is None


def broken_limits(plan: Plan, limits: Limits) -> BrokenLimits:
    """Which of the limits the plan breaks. Memory is judged even if the limits ignore it."""
    return BrokenLimits(
        fits_memory=not memory_excesses(plan),
        has_whole_samples=not limits.whole_samples
        or all(has_whole_samples(stage, plan.model.microbatch_size) for stage in plan.stages),
        constraint=broken_constraint(plan.stages, limits),
    )


def require_kept(planner: str, plan: Plan, broken: BrokenLimits, limits: Limits) -> None:
    """Refuse a plan of ours that breaks a limit, or that its own bound calls impossible."""
    wrong = broken.constraint
    if limits.memory and not broken.fits_memory:
        wrong = memory_excesses(plan)[0]
    elif not broken.has_whole_samples:
        wrong = "splits samples"
    elif plan.bound is not None and plan.bound.lower_bound_ms > plan.iteration_ms:
        wrong = f"takes {plan.iteration_ms:g} ms, less than its bound"
    if wrong:
        raise PipeplanError(
            f"planner: {planner!r} made a plan that breaks its own limits: {wrong};"
            " this is a defect of pipeplan, please report it"
        )


def broken_constraint(stages: Sequence[Stage], limits: Limits) -> str | None:
    """The first constraint that these stages break, in words; None if they keep all."""
    if not limits.allows_number(len(stages)):
        return f"has {len(stages)} stages"
    for stage in stages[:-1]:
        if stage.layers[-1] in limits.no_cut_after:
            return f"is cut after layer {stage.layers[-1]}"
    if limits.first_on is not None and limits.first_on not in stages[0].devices:
        return f"has its first stage without device {limits.first_on}"
    if limits.last_on is not None and limits.last_on not in stages[-1].devices:
        return f"has its last stage without device {limits.last_on}"
    for stage in stages:
        unwanted = limits.without.intersection(stage.devices)
        if unwanted:
            return f"uses device {min(unwanted)}"
    return None


def make_limits(
    model: ModelProfile,
    cluster: Cluster,
    *,
    divisible: bool = False,
    ignore_memory: bool = False,
    no_cut_after: Iterable[str] = (),
    together: Iterable[Sequence[str]] = (),
    keep_tied: bool = False,
    stages: int | None = None,
    max_stages: int | None = None,
    first_on: str | None = None,
    last_on: str | None = None,
    without: Iterable[str] = (),
) -> Limits:
    """The limits by the names of layers and devices; names that nobody has are refused.

    Raises `InfeasibleError` where the constraints leave no plan, with the reason.
    """
    layers = {layer.name: index for index, layer in enumerate(model.layers)}
    devices = {device.name: index for index, device in enumerate(cluster.devices)}
    groups = [list(group) for group in together]
    for group in groups:
        if len(group) < 2:
            raise InputError(f"together: {excerpt(','.join(group))} names one layer; name two")
    if keep_tied:
        groups += [list(group) for group in model.tied]
    uncut = {_index("no_cut_after", name, layers, model.name) for name in no_cut_after}
    for group in groups:
        found = [_index("together", name, layers, model.name) for name in group]
        uncut.update(range(min(found), max(found)))
    limits = Limits(
        memory=not ignore_memory,
        whole_samples=not divisible,
        no_cut_after=frozenset(uncut - {model.num_layers - 1}),
        min_stages=1 if stages is None else stages,
        max_stages=max_stages if stages is None else min(stages, max_stages or stages),
        first_on=None if first_on is None else _index("first_on", first_on, devices, cluster.name),
        last_on=None if last_on is None else _index("last_on", last_on, devices, cluster.name),
        without=frozenset(_index("without", name, devices, cluster.name) for name in without),
    )
    _require_possible(limits, model, cluster)
    return limits


def require_positions(limits: Limits, cluster: Cluster, positions: int) -> None:
    """Refuse constraints that no plan with so many stages a device can keep."""
    num_devices = cluster.num_devices - len(limits.without)
    most = num_devices * positions
    if limits.min_stages > most:
        devices = f"{num_devices} device{'s' if num_devices > 1 else ''}"
        have = f"the {devices}" if positions == 1 else f"{positions} on each of the {devices}"
        raise InfeasibleError(f"stages: {limits.min_stages} is more than {have}; ask for fewer")
    first = limits.first_on
    if positions == 1 and first is not None and first == limits.last_on and limits.min_stages > 1:
        raise InfeasibleError(
            f"first_on, last_on: {cluster.devices[first].name!r} cannot serve the first and the"
            f" last of {limits.min_stages} stages; name two devices, ask for one stage, or leave"
            " out --positions 1"
        )


def _index(field: str, name: str, known: dict[str, int], owner: str) -> int:
    if name not in known:
        kind = "device" if field in ("first_on", "last_on", "without") else "layer"
        near = nearest(name, known)
        raise InputError(f"{field}: {excerpt(name)} is no {kind} of {excerpt(owner)}{near}")
    return known[name]


def _require_possible(limits: Limits, model: ModelProfile, cluster: Cluster) -> None:
    """Refuse constraints that contradict each other."""
    names = [device.name for device in cluster.devices]
    num_left = cluster.num_devices - len(limits.without)
    if not num_left:
        raise InfeasibleError("without: names every device; leave at least one to plan on")
    for field, device in (("first_on", limits.first_on), ("last_on", limits.last_on)):
        if device in limits.without:
            raise InfeasibleError(
                f"{field}: {names[device or 0]!r} is among the devices of `without`;"
                " drop one of the two"
            )
    if limits.max_stages is not None and limits.min_stages > limits.max_stages:
        raise InfeasibleError(
            f"stages: {limits.min_stages} is above max_stages ({limits.max_stages}); drop one"
        )
    num_pieces = model.num_layers - len(limits.no_cut_after)
    if limits.min_stages > num_pieces:
        raise InfeasibleError(
            f"stages: {limits.min_stages} is more than the {num_pieces} layers that may be cut"
            " apart; ask for fewer"
        )
    first, last, samples = limits.first_on, limits.last_on, model.microbatch_size
    if first is None or last is None:
        return
    if first != last and limits.max_stages == 1 and limits.whole_samples and samples < 2:
        raise InfeasibleError(
            f"first_on, last_on: one stage on {names[first]!r} and {names[last]!r} would share"
            " a microbatch of one sample; allow two stages or use a larger microbatch_size"
        )
