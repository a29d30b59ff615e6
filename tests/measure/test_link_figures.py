"""From times to figures: links and cards whose truth is known."""

import random

import pytest

from pipeplan.measure.link_figures import Flow, cards_of, combined_gb_per_s, fit_link
from pipeplan.shared_links import SharedLink


@pytest.mark.parametrize("seed", range(50))
def test_links_are_found_in_their_times(seed):
    rng = random.Random(seed)
    latency_us, gb_per_s = rng.uniform(1, 500), 10 ** rng.uniform(-3, 2.5)
    num_bytes = int(gb_per_s * 1e9 * 0.02)
    small = [2e-6 * latency_us] * 9
    large = [2e-6 * latency_us + num_bytes / gb_per_s / 1e9] * 5
    small[rng.randrange(9)] *= 30  # what a busy machine does
    large[rng.randrange(5)] *= 3
    figures = fit_link(small, large, num_bytes)
    assert figures.latency_us == pytest.approx(latency_us, rel=1e-3)
    assert figures.gb_per_s == pytest.approx(gb_per_s, rel=1e-3)


def test_times_that_say_nothing_stay_within_limits():
    figures = fit_link([0.0], [0.0], 100)
    assert (figures.latency_us, figures.gb_per_s) == (1e-3, pytest.approx(1e5))
    figures = fit_link([2e-3], [1e-3], 10**6)  # the longer message was faster
    assert figures.gb_per_s == pytest.approx(1.0)


def even_flow(gb_per_s: float, begin_s: float, count: int = 10, num_bytes: int = 10**7) -> Flow:
    each_s = num_bytes / gb_per_s / 1e9
    arrivals = tuple(begin_s + (n + 1) * each_s for n in range(count))
    return Flow(num_bytes=num_bytes, arrivals_s=arrivals)


def test_flows_add_up_while_all_are_under_way():
    """The second begins later and is faster; before and behind, the first one is alone."""
    first, second = even_flow(1.0, 0.0), even_flow(2.0, 0.02)
    assert combined_gb_per_s([first, second]) == pytest.approx(3.0)
    assert combined_gb_per_s([first]) == pytest.approx(1.0)


def test_a_flow_that_speeds_up_when_others_have_ended_counts_only_before():
    """Two flows of 1 GB/s; the first ends at 50 ms, and from then on the second has 2 GB/s."""
    short = even_flow(1.0, 0.0, count=5)
    rest = tuple(0.05 + n * 0.005 for n in range(1, 6))
    long = Flow(num_bytes=10**7, arrivals_s=(*even_flow(1.0, 0.0, count=5).arrivals_s, *rest))
    assert combined_gb_per_s([short, long]) == pytest.approx(2.0)


def test_flows_that_never_meet_do_not_add_up():
    assert combined_gb_per_s([even_flow(1.0, 0.0), even_flow(3.0, 5.0)]) == pytest.approx(3.0)


def both_ways(**rates: tuple[float, float]) -> dict[tuple[str, bool], float]:
    return {
        (host, way): rates[host][column]
        for host in rates
        for column, way in enumerate((True, False))
    }


def test_cards():
    together = both_ways(a=(1.2, 1.22), b=(3.9, 3.95), c=(1.0, 2.0))
    one_by_one = both_ways(a=(4.0, 4.0), b=(4.0, 4.0), c=(4.0, 2.0))
    cards = cards_of(together, one_by_one)
    assert cards.uplinks == {"a": 1.21}
    assert cards.shared == (
        SharedLink(name="card of c", members=("c",), gb_per_s=1.0, in_gb_per_s=2.0),
    )


def test_hosts_that_share_nothing_have_no_cards():
    rates = both_ways(a=(4.0, 4.1), b=(3.9, 4.2))
    cards = cards_of(rates, rates)
    assert (cards.uplinks, cards.shared) == (None, ())
