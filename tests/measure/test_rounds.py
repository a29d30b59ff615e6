"""Rounds in which pairs are measured: every pair once, no host twice at a time."""

import random
from itertools import combinations

import pytest

from pipeplan.measure.rounds import card_trials, hosts_of, pair_rounds


def random_hosts(rng: random.Random) -> list[str]:
    return [f"h{rng.randrange(1, 9)}" for _ in range(rng.randint(1, 24))]


@pytest.mark.parametrize("seed", range(100))
def test_every_pair_is_measured_once_and_no_host_twice_at_a_time(seed):
    hosts = random_hosts(random.Random(seed))
    rounds = pair_rounds(hosts)
    assert all(rounds)
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))
    assert set(met) == {frozenset(pair) for pair in combinations(range(len(hosts)), 2)}
    for pairs in rounds:
        busy = [host for pair in pairs for host in {hosts[rank] for rank in pair}]
        assert len(busy) == len(set(busy))


def test_one_at_a_time():
    rounds = pair_rounds(["a", "a", "b", "c"], one_at_a_time=True)
    assert [len(pairs) for pairs in rounds] == [1] * 6
    assert len({pair for (pair,) in rounds}) == 6


@pytest.mark.parametrize(
    ("num_hosts", "num_devices", "num_rounds"),
    [(8, 8, 28 + 7 * 64), (64, 1, 63), (1, 8, 28), (3, 2, 1 + 3 * 4), (1, 1, 0)],
)
def test_rounds_are_few(num_hosts, num_devices, num_rounds):
    hosts = [f"h{h}" for h in range(num_hosts) for _ in range(num_devices)]
    assert len(pair_rounds(hosts)) == num_rounds


@pytest.mark.parametrize("seed", range(60))
def test_trials_of_cards_leave_the_host_and_spread(seed):
    hosts = random_hosts(random.Random(seed))
    ranks_of = hosts_of(hosts)
    trials = card_trials(hosts)
    for trial in trials:
        mine = ranks_of[trial.host]
        ends = trial.flows if trial.is_outward else [(b, a) for a, b in trial.flows]
        assert len(set(ends)) == len(ends) >= 2
        assert all(a in mine and b not in mine for a, b in ends)
        num_others = len(hosts) - len(mine)
        assert {a for a, _ in ends} == set(mine)
        assert len(ends) == min(max(len(mine), 4), len(mine) * num_others)
        used = [hosts[b] for _, b in ends]
        assert len(set(used)) >= min(len(ends), len(ranks_of) - 1, num_others)
    judged = {(trial.host, trial.is_outward) for trial in trials}
    for host, ranks in enumerate(ranks_of):
        can_share = len(ranks) * (len(hosts) - len(ranks)) >= 2
        assert ((host, True) in judged) == ((host, False) in judged) == can_share
