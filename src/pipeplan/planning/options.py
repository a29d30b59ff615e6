"""The options that `plan`, `compare` and `sweep` share: the only list of them.

The commands offer the same options (`commands/planning_options.py`), and a sweep's file has a field
for each.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

from pipeplan.cluster import Cluster
from pipeplan.documents.text import excerpt
from pipeplan.errors import InputError
from pipeplan.planning.limits import Limits, make_limits
from pipeplan.profile import ModelProfile
from pipeplan.validation import COUNT, number_text, require_count, require_figure

__all__ = [
    "AUTO",
    "MAX_EFFORT",
    "MIN_EFFORT",
    "WITHOUT_FAMILIES",
    "OptionArguments",
    "PlanningOptions",
]

MIN_EFFORT, MAX_EFFORT = 0.01, 1000.0
FLAGS = (
    "divisible",
    "ignore_memory",
    "keep_tied",
    "shard_optimizer",
    "runnable",
)
AUTO = "auto"
AUTO_POSITIONS = 8
"""The most stages of a device that `auto` tries."""
MAX_AUTO_DEVICES, MAX_AUTO_MICROBATCHES = 64, 512
"""Beyond, several stages a device and cut backwards are searched only if somebody asks for them:
they would take longer than all the rest of planning, and find little."""
UNRECORDED = {"positions": 1, "split_backward": False}
"""What a plan's record leaves out, whatever the defaults are: plans with one stage a device and
whole backwards, as they were before there were others."""
POSITIONS = (1, 64)
NAME_LISTS = ("no_cut_after", "without")


class OptionArguments(TypedDict, total=False):
    """The fields of `PlanningOptions` as keyword arguments; a test compares the two."""

    divisible: bool
    ignore_memory: bool
    no_cut_after: tuple[str, ...]
    together: tuple[tuple[str, ...], ...]
    keep_tied: bool
    stages: int | None
    max_stages: int | None
    first_on: str | None
    last_on: str | None
    without: tuple[str, ...]
    positions: int | str
    split_backward: bool | None
    shard_optimizer: bool
    effort: float
    runnable: bool


WITHOUT_FAMILIES: OptionArguments = {
    "positions": 1,
    "split_backward": False,
    "shard_optimizer": False,
}
"""One stage a device, whole backwards and whole optimizers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """What may be asked of any planner; layers and devices by their names."""

    divisible: bool = False
    """Whether samples may be split: a stage may have more devices than a microbatch has samples."""
    ignore_memory: bool = False
    """Whether plans may need more memory than the devices have."""
    no_cut_after: tuple[str, ...] = ()
    """Layers that share a stage with the layer behind them."""
    together: tuple[tuple[str, ...], ...] = ()
    """Groups of layers that share a stage, with all layers between them."""
    keep_tied: bool = False
    """Whether the layers that the model calls tied share a stage."""
    stages: int | None = None
    max_stages: int | None = None
    first_on: str | None = None
    """The device that serves the first stage, alone or with others."""
    last_on: str | None = None
    without: tuple[str, ...] = ()
    """Devices that stay unused."""
    positions: int | str = AUTO
    """The most stages of a device, up to 64. `auto` chooses up to 64 devices and 512 microbatches;
    beyond it stands for 1, unless backwards are to be cut."""
    split_backward: bool | None = None
    """Whether backwards may be cut into input gradients and weight gradients. None: where all
    layers have `weight_grad_ms`, and where `auto` chooses or `positions` is above 1."""
    shard_optimizer: bool = False
    """Whether replicas share the optimizer's moments instead of each keeping all of them."""
    effort: float = 1.0
    """How much to search, from 0.01 to 1,000; 1 is the usual amount."""
    runnable: bool = False
    """Has no effect any more: plans can be run unless `divisible` says otherwise."""

    def __post_init__(self) -> None:
        for name in FLAGS:
            if type(getattr(self, name)) is not bool:
                value = excerpt(getattr(self, name))
                raise InputError(f"{name}: {value} is neither true nor false")
        if self.split_backward is not None and type(self.split_backward) is not bool:
            value = excerpt(self.split_backward)
            raise InputError(f"split_backward: {value} is neither true, false nor null")
        for name in NAME_LISTS:
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        if not isinstance(self.together, list | tuple):
            raise InputError(f"together: {excerpt(self.together)} is not a list of groups")
        groups = tuple(_names("together", group) for group in self.together)
        object.__setattr__(self, "together", groups)
        for name in ("first_on", "last_on"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InputError(f"{name}: {excerpt(value)} is not the name of a device")
        for name in ("stages", "max_stages"):
            if getattr(self, name) is not None:
                require_count(InputError, name, getattr(self, name), COUNT)
                object.__setattr__(self, name, int(getattr(self, name)))
        _require_positions(self.positions)
        require_figure(InputError, "effort", self.effort)
        if not MIN_EFFORT <= self.effort <= MAX_EFFORT:
            raise InputError(
                f"effort: {number_text(self.effort)} is not a number"
                f" within {MIN_EFFORT:g}..{MAX_EFFORT:g}"
            )
        object.__setattr__(self, "effort", float(self.effort))

    @property
    def uses_families(self) -> bool:
        """Whether plans may need the second version of the format; of settled options."""
        return self.positions != 1 or bool(self.split_backward) or self.shard_optimizer

    @property
    def asked_families(self) -> list[str]:
        """Which options ask for more than one stage a device, whole backwards, whole optimizers."""
        plain = {"positions": (1, AUTO), "split_backward": (False, None)}
        return [
            name
            for name in WITHOUT_FAMILIES
            if getattr(self, name) not in plain.get(name, (False,))
        ]

    @property
    def max_positions(self) -> int:
        """The most stages of a device; of settled options."""
        return AUTO_POSITIONS if self.positions == AUTO else int(self.positions)

    def settled(
        self, model: ModelProfile, num_devices: int, num_microbatches: int, *, is_free: bool
    ) -> "PlanningOptions":
        """The same with a number or `auto` that is meant, and with a yes or no to cut backwards.

        `is_free` says whether the planner chooses stages and order itself. Others keep one stage a
        device and whole backwards, unless they are asked otherwise.
        """
        is_asked = bool(self.split_backward) or self.positions not in (1, AUTO)
        is_small = num_devices <= MAX_AUTO_DEVICES and num_microbatches <= MAX_AUTO_MICROBATCHES
        chooses = is_asked or (is_free and is_small)
        positions = self.positions if chooses or self.positions != AUTO else 1
        split = self.split_backward
        if split is None:
            split = is_free and chooses and model.has_weight_gradients
        return replace(self, positions=positions, split_backward=split)

    def limits(self, model: ModelProfile, cluster: Cluster) -> Limits:
        """The limits that a plan of this model on this cluster has to keep."""
        others = ("effort", "runnable", "positions", "split_backward", "shard_optimizer")
        asked = {name: value for name, value in self.arguments().items() if name not in others}
        return make_limits(model, cluster, **asked)

    def arguments(self) -> dict[str, Any]:
        """All options by name, those of a subclass left out."""
        return {each.name: getattr(self, each.name) for each in fields(PlanningOptions)}

    def record(self) -> dict[str, Any]:
        """Settled options as a plan records them: effort, and what differs from the usual.

        What is usual never changes, so that old files keep their meaning.
        """
        usual = {each.name: each.default for each in fields(PlanningOptions)} | UNRECORDED
        return {
            name: _plain(getattr(self, name))
            for name in usual
            if name == "effort" or getattr(self, name) != usual[name]
        }


def _require_positions(given: Any) -> None:
    least, most = POSITIONS
    is_number = isinstance(given, int) and not isinstance(given, bool)
    if given != AUTO and not (is_number and least <= given <= most):
        raise InputError(
            f"positions: {excerpt(given)} is neither a whole number within {least}..{most}"
            f" nor {AUTO!r}"
        )


def _names(field: str, given: Any) -> tuple[str, ...]:
    """A list of names as a tuple; a single text would be taken for its letters."""
    if not isinstance(given, list | tuple):
        raise InputError(f"{field}: {excerpt(given)} is not a list of names")
    for name in given:
        if not isinstance(name, str):
            raise InputError(f"{field}: {excerpt(name)} is not a name")
    return tuple(given)


def _plain(value: Any) -> Any:
    """Tuples as lists, as files hold them."""
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
