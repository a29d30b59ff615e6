"""The links between all ranks of torch.distributed, measured.

Three passes, all ranks at once::

    pairs    latency and bandwidth, both directions, in rounds of pairs that do not meet (`rounds`)
    cards    for each host: what its devices send to other hosts, and receive, all at once
    spine    some pairs again, each alone: are they faster without the other pairs of their round?

All ranks get the same cluster. Its hosts have their real names, and a host's devices are in the
order of its ranks: so the runtime finds them again.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipeplan.cluster import Cluster, Device
from pipeplan.errors import InputError
from pipeplan.interop.discovery import usable_memory_gb
from pipeplan.measure.link_figures import (
    UNSHARED,
    Flow,
    LinkFigures,
    cards_of,
    combined_gb_per_s,
    fit_link,
)
from pipeplan.measure.machine import host_name, machine_id, memory_bytes
from pipeplan.measure.rounds import CardTrial, Pair, card_trials, hosts_of, pair_rounds
from pipeplan.measure.wires import GlooWire, NcclWire, Wire

__all__ = ["MeasuredLinks", "measure_links", "require_seconds"]

SMALL_BYTES = 8
FIRST_BYTES, MOST_BYTES = 1 << 16, 1 << 26
"""Messages begin with the first size, and grow until they last long enough."""
GROWTH = 4
FEWEST_REPEATS, MOST_REPEATS = 3, 7
SHORT_S = 0.012
"""What one message should take at least, where time allows; it decides the number of repeats."""
SMALL_REPEATS = 9
PAIRS_PART, CARDS_PART = 0.65, 0.3
"""Of the time that all may take."""
LEAST_ROUND_S, MOST_ROUND_S = 0.06, 0.8
LEAST_TRIAL_S, MOST_TRIAL_S = 0.15, 1.0
PROBE_MESSAGES, TRIAL_MESSAGES = 6, 24
PROBE_S = 0.05
DOUBTFUL, MOST_DOUBTS = 0.8, 2
"""Flows that reach a little less together may have met a busy moment: they are tried again."""
MOST_ALONE = 3
"""Pairs that are measured again for the spine."""
SPINE = 1.15
"""A pair that is so many times as fast alone was slowed by other pairs."""
BYTES_IN_GB = 1e9
PATIENCE = timedelta(minutes=10)
Tell = Callable[[int, int], None]
"""How many of all rounds are done; called on rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """A cluster as it was measured, and what its file cannot say."""

    cluster: Cluster
    notes: tuple[str, ...] = ()
    num_rounds: int
    seconds: float


def measure_links(
    *,
    name: str = "measured",
    seconds: float = 60.0,
    one_at_a_time: bool = False,
    group: Any = None,
    tell: Tell | None = None,
) -> MeasuredLinks:
    """The links between all ranks of torch.distributed; every rank calls this.

    Args:
        name: of the cluster.
        seconds: how long it may take, about. Small clusters take less.
        one_at_a_time: measure each pair alone, however long it takes.
        group: a gloo group of all ranks whose connections are measured; by default a new one, over
            NCCL if that is the backend of torch.distributed.
        tell: called on rank 0 with the number of rounds that are done, and of all.

    Raises:
        InputError: `seconds` is no positive number, or two machines have one name.
    """
    require_seconds(seconds)
    begin_s = time.perf_counter()
    control = dist.new_group(backend="gloo", timeout=PATIENCE) if group is None else group
    try:
        wire = _make_wire(control, is_given=group is not None)
        work = _Measuring(wire, seconds=seconds, one_at_a_time=one_at_a_time, tell=tell)
        work.measure()
        cluster = work.cluster(name)
    finally:
        if group is None:
            dist.destroy_process_group(control)
    return MeasuredLinks(
        cluster=cluster,
        notes=tuple(work.notes),
        num_rounds=work.num_rounds,
        seconds=time.perf_counter() - begin_s,
    )


def require_seconds(seconds: float) -> None:
    """Refuse a time that is none."""
    if not 0 < seconds < float("inf"):
        raise InputError(f"seconds: is {seconds!r}; give a number above 0")


def _make_wire(control: Any, *, is_given: bool) -> Wire:
    if is_given or dist.get_backend() != "nccl":
        return GlooWire(control)
    return NcclWire(control, dist.group.WORLD, torch.device("cuda", torch.cuda.current_device()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankPlace:
    """What a rank says about itself."""

    host: str
    machine: str
    memory_bytes: float | None
    is_cpu: bool


class _Measuring:
    """One measurement of all links, as one rank sees it."""

    def __init__(
        self, wire: Wire, *, seconds: float, one_at_a_time: bool, tell: Tell | None
    ) -> None:
        self._wire, self._tell = wire, tell
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._places: list[_RankPlace] = self._gather(_own_place())
        self._hosts = [place.host for place in self._places]
        _require_one_machine_a_name(self._places)
        self._rounds = pair_rounds(self._hosts, one_at_a_time=one_at_a_time)
        self._trials = card_trials(self._hosts)
        self._again = [] if one_at_a_time else _pairs_with_company(self._rounds, self._hosts)
        self.num_rounds = len(self._rounds) + len(self._trials) + len(self._again)
        self._num_done = 0
        self._round_s = _share(seconds * PAIRS_PART, self._rounds, LEAST_ROUND_S, MOST_ROUND_S)
        self._trial_s = _share(seconds * CARDS_PART, self._trials, LEAST_TRIAL_S, MOST_TRIAL_S)
        self._pairs: dict[Pair, LinkFigures] = {}
        self._together: dict[tuple[str, bool], float] = {}
        self.notes: list[str] = []

    def measure(self) -> None:
        """Run all passes."""
        mine: dict[Pair, LinkFigures] = {}
        for pairs in self._rounds:
            self._measure_round(pairs, mine)
        self._pairs = self._merged(mine)
        for trial in self._trials:
            reached = self._measure_cards(trial)
            for _ in range(MOST_DOUBTS):
                if not DOUBTFUL < reached / self._one_by_one(trial) < UNSHARED:
                    break
                reached = max(reached, self._measure_cards(trial))
            self._together[self._host_of(trial), trial.is_outward] = reached
            self._count()
        alone: dict[Pair, LinkFigures] = {}
        for pair in self._again:
            self._measure_round([pair], alone)
        self._judge_spine(self._merged(alone))

    def cluster(self, name: str) -> Cluster:
        """The cluster that was measured."""
        order = [rank for ranks in hosts_of(self._hosts) for rank in ranks]
        counts: dict[str, int] = {}
        devices = []
        for rank in order:
            place = self._places[rank]
            index = counts.get(place.host, 0)
            counts[place.host] = index + 1
            total = place.memory_bytes
            if place.is_cpu and total is not None:  # the ranks of a host share it
                total /= self._hosts.count(place.host)
            memory_gb = None if total is None else usable_memory_gb(total, is_gpu=not place.is_cpu)
            devices.append(
                Device(name=f"{place.host}d{index}", host=place.host, memory_gb=memory_gb)
            )
        one_by_one = {
            (self._host_of(trial), trial.is_outward): self._one_by_one(trial)
            for trial in self._trials
        }
        cards = cards_of(self._together, one_by_one)
        return Cluster(
            name=name,
            devices=tuple(devices),
            bandwidth_gb_per_s=self._matrix(order, "gb_per_s"),
            latency_us=self._matrix(order, "latency_us"),
            uplink_gb_per_s=cards.uplinks,
            shared=cards.shared,
        )

    def _matrix(self, order: Sequence[int], figure: str) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(0.0 if a == b else getattr(self._pairs[a, b], figure) for b in order)
            for a in order
        )

    # ------------------------------------------------------------------------------- pairs

    def _measure_round(self, pairs: Sequence[Pair], results: dict[Pair, LinkFigures]) -> None:
        """Measure both directions of the pair that this rank is in, if it is in any."""
        for one, other in pairs:
            for source, target in ((one, other), (other, one)):
                if self._rank == source:
                    results[source, target] = self._measure_direction(target)
                elif self._rank == target:
                    self._wire.answer_sends(source)
        self._wire.barrier()
        self._count()

    def _measure_direction(self, target: int) -> LinkFigures:
        """Messages that grow until they last long enough, then some of this size."""
        wire, limit_s = self._wire, self._round_s / 2
        repeats = min(max(FEWEST_REPEATS, round(limit_s / SHORT_S) - 2), MOST_REPEATS)
        wanted_s = limit_s / (repeats + 2)
        wire.time_sends(target, SMALL_BYTES, 2)
        small_s = wire.time_sends(target, SMALL_BYTES, SMALL_REPEATS)
        num_bytes = FIRST_BYTES
        took_s = min(wire.time_sends(target, num_bytes, 2))
        while took_s < wanted_s / GROWTH and num_bytes < MOST_BYTES:
            num_bytes = min(num_bytes * GROWTH, MOST_BYTES)
            (took_s,) = wire.time_sends(target, num_bytes, 1)
        rate = num_bytes / max(took_s - statistics.median(small_s), took_s / 10)
        num_bytes = int(min(max(rate * wanted_s, FIRST_BYTES), MOST_BYTES))
        wire.time_sends(target, num_bytes, 1)  # memory and windows of this size
        large_s = wire.time_sends(target, num_bytes, repeats)
        wire.stop(target)
        return fit_link(small_s, large_s, num_bytes)

    # ------------------------------------------------------------------------------- cards

    def _measure_cards(self, trial: CardTrial) -> float:
        """What the flows of a trial carry together, in GB/s; the same on every rank."""
        share = 1 / len(trial.flows)
        probed = self._stream(
            trial,
            [self._pairs[f].gb_per_s * share * PROBE_S / PROBE_MESSAGES for f in trial.flows],
            PROBE_MESSAGES,
        )
        rates = [combined_gb_per_s([flow]) for flow in probed]
        # Each flow gets messages that last as long as those of the others, so all end together.
        sizes = [rate * self._trial_s / TRIAL_MESSAGES for rate in rates]
        return combined_gb_per_s(self._stream(trial, sizes, TRIAL_MESSAGES))

    def _host_of(self, trial: CardTrial) -> str:
        return self._hosts[trial.flows[0][0 if trial.is_outward else 1]]

    def _one_by_one(self, trial: CardTrial) -> float:
        """What the flows of a trial reach if each is alone, added up."""
        return sum(self._pairs[flow].gb_per_s for flow in trial.flows)

    def _stream(self, trial: CardTrial, sizes_gb: Sequence[float], count: int) -> list[Flow]:
        """Carry all flows of a trial, and tell every rank when their messages arrived."""
        sizes = [int(min(max(each * BYTES_IN_GB, FIRST_BYTES), MOST_BYTES)) for each in sizes_gb]
        flows = list(zip(trial.flows, sizes, strict=True))
        received = self._wire.stream(
            [(target, n) for (source, target), n in flows if source == self._rank],
            [(source, n) for (source, target), n in flows if target == self._rank],
            count,
        )
        mine = [pair for pair in trial.flows if pair[1] == self._rank]
        everyone = self._gather(dict(zip(mine, received, strict=True)))
        merged = {pair: flow for each in everyone for pair, flow in each.items()}
        return [merged[pair] for pair in trial.flows]

    def _judge_spine(self, alone: dict[Pair, LinkFigures]) -> None:
        """Note if pairs of different hosts slow each other."""
        faster = [
            figures.gb_per_s / self._pairs[pair].gb_per_s
            for pair, figures in alone.items()
            if self._pairs[pair].gb_per_s
        ]
        if faster and statistics.median(faster) > SPINE:
            self.notes.append(
                f"pairs of different hosts slow each other: alone, they are"
                f" {statistics.median(faster):.2g} times as fast; measure with --one-at-a-time, and"
                " write what they share under 'shared'"
            )

    # ------------------------------------------------------------------------------- ranks

    def _gather(self, mine: Any) -> list[Any]:
        """What every rank says."""
        everyone: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(everyone, mine, group=self._wire.control)
        return everyone

    def _merged(self, mine: dict[Pair, LinkFigures]) -> dict[Pair, LinkFigures]:
        return {pair: figures for each in self._gather(mine) for pair, figures in each.items()}

    def _count(self) -> None:
        self._num_done += 1
        if self._tell is not None and self._rank == 0:
            self._tell(self._num_done, self.num_rounds)


def _share(seconds: float, pieces: Sequence[object], least_s: float, most_s: float) -> float:
    """The time of each piece."""
    return min(max(seconds / max(len(pieces), 1), least_s), most_s)


def _pairs_with_company(rounds: Sequence[Sequence[Pair]], hosts: Sequence[str]) -> list[Pair]:
    """A few pairs of different hosts that were measured beside others."""
    found = [
        pair
        for pairs in rounds
        if len(pairs) > 1
        for pair in pairs
        if hosts[pair[0]] != hosts[pair[1]]
    ]
    step = max(1, len(found) // MOST_ALONE)
    return found[::step][:MOST_ALONE]


def _own_place() -> _RankPlace:
    is_cpu = not torch.cuda.is_available() or dist.get_backend() != "nccl"
    if is_cpu:
        total = memory_bytes()
    else:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return _RankPlace(
        host=host_name(),
        machine=machine_id(),
        memory_bytes=total,
        is_cpu=is_cpu,
    )


def _require_one_machine_a_name(places: Sequence[_RankPlace]) -> None:
    """Refuse two machines with one name: the runtime could not tell them apart."""
    machine_of: dict[str, str] = {}
    for rank, place in enumerate(places):
        if machine_of.setdefault(place.host, place.machine) != place.machine:
            raise InputError(
                f"hosts: rank {rank} runs on another machine that is also called {place.host!r};"
                " give each machine a name of its own"
            )
