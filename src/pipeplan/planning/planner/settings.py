"""How much `best` looks at, by the number of devices: one table, a reason a column.

The rows keep planning within the time that people wait, measured by `benchmarks/speed`: about
0.1 s up to 16 devices, 1 s up to 256, some seconds beyond. Quality was measured by
`benchmarks/quality` and on random clusters of 16 and 64 devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

from pipeplan.planning.problem import Problem

__all__ = [
    "ANY_PLAN",
    "BEFORE_PROOF",
    "LARGE_GAP",
    "MAX_CLASS_DEVICES",
    "MAX_NEAR_DEVICES",
    "MAX_PARTITION_STEPS",
    "MAX_PROOF_STEPS",
    "MAX_PROVED_DEVICES",
    "MAX_SET_STEPS",
    "MAX_SET_TRIPLES",
    "NEAR_STEPS",
    "NUM_RANDOM_ORDERS",
    "PRICE_STEPS",
    "SET_STEPS_PER_LAYER",
    "SMALL_GAP",
    "SMALL_GAP_BUDGET",
    "SearchSettings",
    "SearchStep",
    "Sizes",
    "Starts",
    "Step",
    "budget_factor",
    "is_proved_quickly",
    "proves_relaxed",
    "published_starts",
    "replica_counts",
    "search_cycle",
    "set_proof",
    "settings_for",
    "unit_of",
]


class Sizes(Enum):
    """Which numbers of replicas a step of planning on orders tries."""

    POWERS = "powers of two"
    HALFWAY = "powers of two, and halfway between two of them"
    QUARTERS = "1 to 8, then steps of about a quarter, up to all devices"
    FEW_QUARTERS = "the same up to a quarter of the devices"
    ALL = "every number"


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of the recursion over device orders."""

    sizes: Sizes
    capacity: int
    """Points kept in a front: 1 plans on one criterion, 8 loses almost nothing."""
    num_orders: float
    """How many orders: at first in the order in which they are made, later the best ones."""


class Starts(Enum):
    """What a step of local search starts from."""

    BEST = "the best plans, near copies too: on large clusters the best basin is worth all the time"
    DIFFERENT = "the best plans that are no near copies"
    PLAIN = "even splits on several orders"
    MIXED = "the best plans that are no near copies and even splits, half of each"


FIRST_HEAT, LATER_HEAT, LARGE_HEAT = 0.01, 0.005, 0.0025
"""Of searches in the beginning, of those that go on from the best plans (half as much keeps more of
them), and on more than 64 devices, where a search is short. With 0.02 and 0.04 plans on irregular
clusters of 64 devices were 0.2 and 1 % slower; on 128 and 256 random ones with 0.02 6 to 9 %."""


@dataclass(frozen=True, slots=True)
class SearchStep:
    """Some searches at once."""

    starts: Starts
    budget: float
    """Of each search, as a part of the row's budget."""
    num_searches: int = 4
    """Fixed, so that threads change nothing. Where one basin is worth all the time, two long
    searches find more than four short ones."""
    heat: float = FIRST_HEAT
    """How much slower the plans are that a search takes at first, as a part of the time."""
    overflow_price: float = 0.0
    """What too little memory costs at first, as a part of the time; 0: such plans are not taken."""

    @property
    def cost(self) -> float:
        """What all its searches spend."""
        return self.budget * self.num_searches


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """One row of the table."""

    max_devices: float
    orders_by_cuts: bool
    """Whether the paper's order by minimum cuts is tried; beyond 128 devices the cuts take longer
    than everything else together."""
    num_orders: float
    """Device orders that are made; beyond 256 devices each takes a while."""
    steps: tuple[Step, ...]
    """Coarse before fine: each step prunes with the best time of the one before. Reversed orders
    stand last, and beyond 32 devices they do not pay."""
    num_candidates: int
    """Plans that each recursion gives to be simulated; the tenth is rarely the best."""
    max_layers: int
    """Layers that planning on orders looks at; its time grows with their square."""
    tries_partitions: bool
    """Whether the paper's partitions are tried; beyond 64 devices that takes seconds."""
    cycle: tuple[SearchStep, ...]
    """The steps of local search that effort 1 buys."""
    budget: float
    """What a search may spend in a step of budget 1, about a nanosecond a unit."""
    published: tuple[str, ...] | None
    """Published planners whose complete plans are tried too: those that take little time. None
    stands for all of them."""


_SMALL = (
    Step(Sizes.POWERS, 1, inf),
    Step(Sizes.POWERS, 4, inf),
    Step(Sizes.QUARTERS, 4, inf),
    Step(Sizes.ALL, 8, inf),
)
_MEDIUM = (
    Step(Sizes.POWERS, 1, inf),
    Step(Sizes.POWERS, 4, 2),
    Step(Sizes.QUARTERS, 4, 2),
    Step(Sizes.ALL, 8, 2),
)
_LARGE = (Step(Sizes.POWERS, 1, 4), Step(Sizes.POWERS, 2, 2), Step(Sizes.HALFWAY, 3, 1))
_HUGE = (Step(Sizes.POWERS, 1, 4), Step(Sizes.FEW_QUARTERS, 2, 2))
_VAST = (Step(Sizes.POWERS, 1, 2), Step(Sizes.FEW_QUARTERS, 2, 2))


_FROM_BEST = (SearchStep(Starts.BEST, 1.0, heat=LARGE_HEAT),)
_MIXED = (
    SearchStep(Starts.DIFFERENT, 0.5),
    SearchStep(Starts.PLAIN, 0.25),
    SearchStep(Starts.PLAIN, 0.25),
    SearchStep(Starts.DIFFERENT, 1.0),
)

_DEEPER = (
    SearchStep(Starts.DIFFERENT, 0.25),
    SearchStep(Starts.BEST, 0.25, 2, LATER_HEAT),
    SearchStep(Starts.BEST, 0.25, 2, LATER_HEAT),
    SearchStep(Starts.BEST, 0.5, 2, LATER_HEAT),
    SearchStep(Starts.BEST, 0.5, 2, LATER_HEAT),
) * 2
"""Twice the same: the second time from plans that the first one made better and different. Once
with twice the budget, plans on random links of 64 devices were 0.2 % slower in the mean of 63 runs,
and with two searches that take nearly all of it, 0.6 %."""

_THROUGH_OVERFLOW = (SearchStep(Starts.MIXED, 1.0, heat=0.4, overflow_price=1.0),) * 4
"""Where devices have different memory: plans that fit are then far apart, and searches walk through
plans that do not fit. On 34 clusters with 10 to 19 devices and a planted plan, plans were 1.90
times as slow as the planted one in geometric mean without and 1.10 with these steps; with a heat of
0.01 1.33, with a price of 0.3 1.16. With equal memory they find nothing."""

BEFORE_PROOF = SearchStep(Starts.DIFFERENT, 0.25)
"""Where the proof looks at all sets of devices."""
_AFTER_SETS = (
    SearchStep(Starts.DIFFERENT, 0.5),
    SearchStep(Starts.DIFFERENT, 1.0),
    SearchStep(Starts.PLAIN, 0.25),
)
"""The cycle where all sets of devices were planned on. Effort 1 buys its first step where the gap
is small, and the first two where it is large. Of 240 problems with 8 to 16 devices, most of them
with little memory, searches from plain plans and second cycles made none faster by over 0.01 %."""
LARGE_GAP, SMALL_GAP_BUDGET = 0.02, 2.5e6
"""What a small gap is, and the most that a search then spends in a step of budget 1. With little
memory gaps are larger, and so little a search would lose 4 %."""
SMALL_GAP = 0.003
"""Nearer to the bound, plans are not searched from where all sets of devices were planned on: of 43
such problems a search made five faster, by 0.04 % at most."""

_QUICK = ("data-parallel", "gpipe", "1f1b", "grid")
_QUICKEST = ("data-parallel", "1f1b")

TABLE = tuple(
    SearchSettings(
        max_devices=max_devices,
        orders_by_cuts=max_devices <= 128,
        num_orders=inf if max_devices <= 256 else max(step.num_orders for step in steps),
        steps=steps,
        num_candidates=num_candidates,
        max_layers=max_layers,
        tries_partitions=max_devices <= 64,
        cycle=cycle,
        budget=budget,
        published=published,
    )
    for max_devices, steps, num_candidates, max_layers, cycle, budget, published in (
        (8, _SMALL, 10, 256, _MIXED, 3e6, None),
        (16, _MEDIUM, 5, 256, _MIXED * 2, 3e6, None),
        (32, _MEDIUM, 5, 256, _MIXED * 2, 11e6, _QUICK),
        (64, _LARGE, 5, 256, _DEEPER, 80e6, _QUICK),
        (128, _HUGE, 5, 64, _FROM_BEST, 75e6, _QUICKEST),
        (256, _HUGE, 5, 64, _FROM_BEST, 75e6, _QUICKEST),
        (inf, _VAST, 5, 64, _FROM_BEST, 56e6, _QUICKEST),
    )
)

ANY_PLAN, NUM_RANDOM_ORDERS = Step(Sizes.QUARTERS, 1, 1), 16
"""How plans are looked for that fit, where the usual orders have none, and on how many orders."""
MAX_PUBLISHED_LAYERS = 128
"""Layers beyond which only the quickest published plans are tried: most of the published recursions
take the square of the layers or more."""
MAX_ORDER_UNITS = 512
"""Units of neighbouring devices that planning on orders looks at."""
EQUAL_DEVICES_BUDGET, MANY_MICROBATCHES = 0.1, 2
"""The part of a search's budget that is spent where all devices and links are alike and there are
so many microbatches a device. Local search found nothing better on such clusters of 8 to 512
devices; with fewer microbatches it found 1.5 %."""
REGULAR_BUDGET, MAX_REGULAR_RATES, REGULAR_DEVICES = 0.4, 3, range(33, 65)
"""The part of a search's budget that is spent where links have few different rates, as in hosts
that are alike: the recursion on orders finds most of what there is. Small clusters get it all, and
large ones too, where a search is short for their size anyway."""
MAX_CLASS_DEVICES = 24
"""Devices up to which classes of exchangeable ones are looked for, to plan on sets of devices."""
MAX_SET_TRIPLES, MAX_SET_STEPS, SET_STEPS_PER_LAYER = 300_000, 2e9, 1.8
"""How many triples of sets, and of these times layers^1.8, planning on sets is worth its time for:
up to nine devices that all differ, or two hosts of eight equal ones. Its time was measured to grow
like that, about a nanosecond a step."""
MAX_PARTITION_STEPS = 2e6
"""Layers times devices squared up to which the paper's partitions are made of all layers, and so
`best` is never slower than `spp`: 480 layers on 64 devices. Beyond, of merged ones: of all layers
they took a third of the time with 1,000 layers, and were 7 and 31 % slower than the best plan."""
MAX_PROOF_STEPS = 2e6
"""Suffixes that are looked at to list single plans on sets, about 10 nanoseconds each. A tenth is
nearly always enough."""
SHARED_PROOF_STEPS = 0.3 * MAX_PROOF_STEPS
"""The same where links are shared. Of 48 plans and bounds on eight devices none changed."""
MAX_NEAR_DEVICES, NEAR_STEPS = 24, 3e7
"""Devices up to which small sets are looked at one by one for the bound, and how many steps that
may take for effort 1: pairs of devices up to 16 of one speed. Triples need ten times the effort.
With them the gap falls by half."""
PRICE_STEPS = 2e7
"""How many steps effort 1 spends on prices of devices, about 10 nanoseconds each. Only where speeds
differ: else the relaxed bound knows all that prices do."""
MAX_PROVED_DEVICES, MIN_RELAXED_EFFORT = 128, 0.5
"""Beyond so many devices the work bound stands. With less effort, many devices of several speeds
have no relaxed bound, which takes up to 0.7 s on 64 devices: prices alone proved 3 % more and 1 %
less in three cases."""
MAX_RELAXED_LAYERS = {False: 512, True: 128}
"""Beyond so many layers, devices of several speeds have no relaxed bound, by whether memory counts:
with 921 on 12 devices it took 6 s, and with 177 and little memory 4 s. Both times it proved no more
than the work does."""
NUM_SET_CANDIDATES = 30
"""Plans that planning on sets gives to be simulated: it runs once, and its plans are the best."""
SHARED_BUDGET, REGULAR_SHARED_BUDGET = 0.4, 0.5
"""The part of a search's budget where links are shared, and the same on regular clusters, which get
little already: the problem without them is searched, too, and its plan is a start. Three to six
times as much made 3 of 58 plans faster by more than 0.1 %."""
SET_SHARED_BUDGET, SET_SHARED_CYCLE = 0.25, 0.25
"""The same where all sets of devices were planned on, and the part of a cycle that effort 1 buys
there: the whole cycle with a budget of 0.5 made 2 of 48 plans faster by more than 0.1 %."""
NUM_SHARED_CANDIDATES = 300
"""The same where links are shared. Then plans with the same bound differ by what their transfers
wait for each other, and only a simulation tells: one of 48 plans was 5 % faster."""


def settings_for(num_devices: int) -> SearchSettings:
    """The row for a cluster of that size."""
    return next(row for row in TABLE if num_devices <= row.max_devices)


def unit_of(num_devices: int) -> int:
    """Neighbours of an order that planning on orders keeps together.

    Beyond 512 devices a model has far fewer layers than devices, and stages are large. Whole units
    then lose nothing, and the recursion takes a part of the time: 2.0 s instead of 4.1 at 1,024.
    """
    return max(1, -(-num_devices // MAX_ORDER_UNITS))


def proves_relaxed(problem: Problem, num_devices: int, num_layers: int) -> bool:
    """Whether the relaxed bound is worth its time. It gives no plans."""
    if not problem.needs_bound:
        return False
    if not problem.any_shares:
        return True
    is_quick = problem.effort >= MIN_RELAXED_EFFORT or num_devices <= MAX_NEAR_DEVICES
    return is_quick and num_layers <= MAX_RELAXED_LAYERS[problem.limits_memory]


def is_proved_quickly(num_devices: int) -> bool:
    """Whether a proof takes less time than the search that it may spare.

    Without shared links many plans are proven optimal: then 16 devices take 8 ms instead of 95. On
    64 devices proofs take longer, and succeed less often.
    """
    return num_devices <= MAX_NEAR_DEVICES


def set_proof(*, shares_links: bool) -> tuple[int, float]:
    """Of planning on sets: plans to be simulated, and steps to list single ones."""
    if shares_links:
        return NUM_SHARED_CANDIDATES, SHARED_PROOF_STEPS
    return NUM_SET_CANDIDATES, MAX_PROOF_STEPS


def search_cycle(
    row: SearchSettings, *, on_sets: bool, near: bool, shares_links: bool, memory_differs: bool
) -> tuple[tuple[SearchStep, ...], float]:
    """The steps of local search, which are repeated, and how much of their cost effort 1 buys."""
    through = _THROUGH_OVERFLOW if memory_differs and not near else ()
    steps, bought = row.cycle, _cost(row.cycle)
    if on_sets and (near or not shares_links):
        steps, bought = _AFTER_SETS, _cost(_AFTER_SETS[: 1 if near else 2])
    elif on_sets:
        bought *= SET_SHARED_CYCLE
    return (*through, *steps), _cost(through) + bought


def _cost(steps: Sequence[SearchStep]) -> float:
    return sum(step.cost for step in steps)


def budget_factor(
    num_devices: int,
    num_microbatches: int,
    *,
    has_equal_devices: bool,
    num_rates: int,
    shares_links: bool = False,
    plans_on_sets: bool = False,
) -> float:
    """The part of a search's budget that is worth its time.

    With equal devices and many microbatches the slowest stage is nearly all that counts, and the
    recursion makes it as fast as can be. On regular clusters its orders are good ones.
    """
    if has_equal_devices and num_microbatches >= MANY_MICROBATCHES * num_devices:
        return EQUAL_DEVICES_BUDGET
    is_regular = num_rates <= MAX_REGULAR_RATES and num_devices in REGULAR_DEVICES
    factor = REGULAR_BUDGET if is_regular else 1.0
    if not shares_links:
        return factor
    if plans_on_sets:
        return factor * SET_SHARED_BUDGET
    return factor * (REGULAR_SHARED_BUDGET if is_regular else SHARED_BUDGET)


def published_starts(num_devices: int, num_layers: int) -> tuple[str, ...] | None:
    """Which published planners give `best` complete plans to start from; None: all of them."""
    if num_layers > MAX_PUBLISHED_LAYERS:
        return _QUICKEST
    return settings_for(num_devices).published


def replica_counts(sizes: Sizes, num_devices: int) -> list[int]:
    """The numbers of replicas, rising."""
    powers = [2**k for k in range(num_devices.bit_length()) if 2**k <= num_devices]
    match sizes:
        case Sizes.POWERS:
            return powers
        case Sizes.HALFWAY:
            halfway = [size + size // 2 for size in powers[1:]]
            return sorted({*powers, *(size for size in halfway if size < num_devices)})
        case Sizes.QUARTERS:
            return _quarter_steps(num_devices)
        case Sizes.FEW_QUARTERS:
            return _quarter_steps(num_devices // 4)
        case Sizes.ALL:
            return list(range(1, num_devices + 1))


def _quarter_steps(most: int) -> list[int]:
    """1 to 8, then steps of about a quarter, on multiples of 4; and the powers of two."""
    sizes = list(range(1, 9))
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(2, sizes[-1] // 16 * 4))
    powers = [2**k for k in range(most.bit_length())]
    return sorted({size for size in (*sizes, *powers) if size <= most})
