"""Numbers are summed along a tree of ranks; no process is started."""

import random

import pytest

torch = pytest.importorskip("torch")

from pipeplan.runtime.exchange.rank_tree import RankTree, TreeSum  # noqa: E402
from runtime.mailbox import Mailbox, MailTransport  # noqa: E402


@pytest.mark.parametrize(
    ("stage_ranks", "num_ranks"),
    [([[0]], 1), ([[2], [0, 1], [3]], 4), ([[4, 1], [0]], 7), ([[0], [1], [2]], 3)],
)
def test_all_ranks_get_the_same_sums(stage_ranks, num_ranks):
    rng, mailbox = random.Random(0), Mailbox()
    trees = [RankTree.of(rank, stage_ranks, num_ranks) for rank in range(num_ranks)]
    assert {tree.root for tree in trees} == {stage_ranks[0][0]}
    sums = [TreeSum(tree, MailTransport(mailbox, rank)) for rank, tree in enumerate(trees)]
    order = [rank for ranks in stage_ranks for rank in ranks]  # a parent is before its children
    order += [rank for rank in range(num_ranks) if rank not in order]
    for _ in range(3):
        own = [[rng.uniform(-1, 1) for _ in range(4)] for _ in range(num_ranks)]
        for rank in rng.sample(order, len(order)):
            sums[rank].expect(4)
        for rank in reversed(order):
            numbers = torch.tensor(own[rank], dtype=torch.float64)
            sums[rank].start(numbers)
            assert numbers.tolist() == own[rank], "the caller's numbers stay"
        found = [sums[rank].finish() for rank in order]
        assert all(each == found[0] for each in found)
        assert found[0] == pytest.approx([sum(column) for column in zip(*own, strict=True)])
        assert mailbox.is_empty()
    assert mailbox.num_sent == 3 * 2 * (num_ranks - 1), "one message up and one down for each rank"
