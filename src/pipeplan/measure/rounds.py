"""Which pairs of ranks are measured at once, so that no measurement disturbs another one.

Two pairs that use one host's card share it, and two copies inside a host may share a switch. So in
each round a host has one pair at most: one of its own, or one with another host. Hosts meet as
teams do in a tournament::

    round 0   h0-h3  h1-h2        the first host stays, all others move on by one place
    round 1   h0-h2  h3-h1
    round 2   h0-h1  h2-h3        after H - 1 rounds everybody has met everybody

While two hosts meet, their devices take turns. Eight hosts of eight devices take 28 rounds inside
and 7 * 64 between hosts, where 2,016 pairs one by one would take 2,016.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product, zip_longest

__all__ = ["CardTrial", "Pair", "card_trials", "hosts_of", "pair_rounds"]

Pair = tuple[int, int]
"""Two ranks."""

FEWEST_FLOWS = 4
"""A host with fewer devices sends from each of them to several others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardTrial:
    """Flows that all leave one host, or all enter it, at once."""

    host: int
    is_outward: bool
    flows: tuple[Pair, ...]
    """Sender and receiver."""


def hosts_of(host_names: Sequence[str]) -> list[list[int]]:
    """The ranks of each host; hosts in the order of their first ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(host_names):
        ranks.setdefault(name, []).append(rank)
    return list(ranks.values())


def pair_rounds(host_names: Sequence[str], *, one_at_a_time: bool = False) -> list[list[Pair]]:
    """Every pair of ranks once, in rounds; `host_names` has the host of each rank."""
    hosts = hosts_of(host_names)
    if one_at_a_time:
        return [[pair] for pair in combinations(range(len(host_names)), 2)]
    rounds = _side_by_side([list(combinations(ranks, 2)) for ranks in hosts])
    for meetings in _tournament(len(hosts)):
        rounds += _side_by_side([list(product(hosts[a], hosts[b])) for a, b in meetings])
    return rounds


def _side_by_side(turns: Sequence[Sequence[Pair]]) -> list[list[Pair]]:
    """Rounds in which each of these lists has one turn; shorter lists end earlier."""
    return [[pair for pair in pairs if pair is not None] for pairs in zip_longest(*turns)]


def _tournament(num_teams: int) -> list[list[Pair]]:
    """Rounds in which every two teams meet once; with an odd number one team rests."""
    places: list[int | None] = [*range(num_teams), *([None] if num_teams % 2 else [])]
    half = len(places) // 2
    rounds = []
    for _ in range(len(places) - 1):
        opposite = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(a, b) for a, b in opposite if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def card_trials(host_names: Sequence[str]) -> list[CardTrial]:
    """For each host, flows to many other hosts at once, and flows from them.

    The other ends are spread over hosts, so that their cards are busy with few flows each.
    """
    hosts = hosts_of(host_names)
    trials = []
    for host, ranks in enumerate(hosts):
        others = hosts[host + 1 :] + hosts[:host]
        num_flows = min(max(len(ranks), FEWEST_FLOWS), len(ranks) * (len(host_names) - len(ranks)))
        if num_flows < 2:
            continue  # what one pair reaches is its bandwidth
        pairs = _spread(ranks, others, num_flows)
        back = tuple((other, rank) for rank, other in pairs)
        trials.append(CardTrial(host=host, is_outward=True, flows=tuple(pairs)))
        trials.append(CardTrial(host=host, is_outward=False, flows=back))
    return trials


def _spread(ranks: Sequence[int], others: Sequence[Sequence[int]], num_flows: int) -> list[Pair]:
    """Different pairs of these ranks and others; each time the host, then the rank, used least."""
    uses = [0] * len(others)
    uses_of = {rank: 0 for other in others for rank in other}
    pairs: list[Pair] = []
    taken: set[Pair] = set()
    for index in range(num_flows):
        rank = ranks[index % len(ranks)]
        free = (
            (uses[host], uses_of[other], host, other)
            for host, its_ranks in enumerate(others)
            for other in its_ranks
            if (rank, other) not in taken
        )
        *_, host, other = min(free)
        uses[host] += 1
        uses_of[other] += 1
        taken.add((rank, other))
        pairs.append((rank, other))
    return pairs
