"""Gradients are summed in buckets that start inside the last backward; one process is enough.

The other rank is played by a stand-in for `all_reduce`: it adds what that rank would hold.
"""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from pipeplan.runtime import gradients  # noqa: E402
from pipeplan.runtime.gradients import GradientReducer, Reduction  # noqa: E402


class OtherRank:
    """Adds the other rank's gradients, once the work is waited for."""

    def __init__(self, other=None):
        self.started = []
        """(group, number of gradients and counts), in the order of the starts."""
        self._other = other

    def all_reduce(self, flat, group, async_op):
        assert async_op
        self.started.append((group, flat.numel() - 1))  # a sample of the values goes along
        return Work(flat, self._other)


class Work:
    def __init__(self, flat, other):
        self._flat, self._other, self.num_waits = flat, other, 0

    def wait(self):
        self._flat.add_(self._flat.clone() if self._other is None else self._other(self._flat))


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    monkeypatch.setattr(gradients.dist, "get_world_size", lambda _: 2)


@pytest.fixture
def other(monkeypatch):
    rank = OtherRank()
    monkeypatch.setattr(gradients.dist, "all_reduce", rank.all_reduce)
    return rank


def nothing_but_equal_values(flat):
    """What a rank adds that has the same two parameters, and no gradients."""
    there = torch.zeros_like(flat)
    there[-3] = flat[-3]  # the sample stands before the two counts
    return there


def make_parameters(*sizes, dtype=torch.float32):
    return [nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes]


def backward(*used):
    """Gives the i-th of these parameters the gradient i + 1."""
    sum((index + 1) * parameter.sum() for index, parameter in enumerate(used)).backward()


def test_gradients_of_all_microbatches_and_ranks_are_summed(other):
    first, second = parameters = make_parameters(2, 3)
    reducer = GradientReducer(parameters, [Reduction(parameters=parameters, group="g")])
    for step in range(2):  # the second step starts from zero again
        reducer.begin()
        backward(first, second)
        assert len(other.started) == step  # this was not the last backward
        reducer.expect_last()
        backward(first, second)
        reducer.finish()
        assert first.grad.tolist() == [4.0] * 2
        assert second.grad.tolist() == [8.0] * 3
    assert other.started == [("g", 7)] * 2  # 5 elements and 2 counts, in one bucket


def test_buckets_hold_parameters_from_behind_up_to_their_size(other):
    parameters = make_parameters(3, 3, 4, 2)  # 12, 12, 16, 8 bytes
    reducer = GradientReducer(parameters, [Reduction(parameters=parameters, group=0)], 24)
    reducer.begin()
    reducer.expect_last()
    backward(*parameters)
    reducer.finish()
    # From behind: 8 + 16 bytes and 12 + 12; each bucket with a count for each parameter.
    assert other.started == [(0, 2 + 4 + 2), (0, 3 + 3 + 2)]
    assert [parameter.grad[0].item() for parameter in parameters] == [2.0, 4.0, 6.0, 8.0]


def test_a_parameter_larger_than_a_bucket_has_its_own(other):
    parameters = make_parameters(1, 9, 1)
    reducer = GradientReducer(parameters, [Reduction(parameters=parameters, group=0)], 8)
    reducer.begin()
    reducer.finish()
    assert [numel for _, numel in other.started] == [2, 10, 2]


def test_types_are_not_mixed_in_a_bucket(other):
    parameters = [*make_parameters(1, dtype=torch.float64), *make_parameters(1, 1)]
    reducer = GradientReducer(parameters, [Reduction(parameters=parameters, group=0)])
    reducer.begin()
    backward(*parameters)
    reducer.finish()
    assert [numel for _, numel in other.started] == [4, 2]
    assert [parameter.grad.dtype for parameter in parameters] == [
        torch.float64,
        torch.float32,
        torch.float32,
    ]


def test_buckets_start_inside_the_last_backward_only_and_in_order(other):
    early, late = parameters = make_parameters(4, 4)
    reductions = [Reduction(parameters=[p], group=i) for i, p in enumerate([late, early])]
    reducer = GradientReducer(parameters, reductions)
    reducer.begin()
    backward(early, late)
    assert other.started == []
    reducer.expect_last()
    backward(early)  # its bucket is full, but the one before is not
    assert other.started == []
    backward(late)
    assert [group for group, _ in other.started] == [0, 1]
    reducer.finish()
    assert reducer.started_inside == 2
    reducer.begin()
    reducer.finish()
    assert reducer.started_inside == 0
    assert len(other.started) == 4


def test_a_bucket_waits_for_all_its_gradients(other):
    first, second, third = parameters = make_parameters(1, 1, 1)
    reducer = GradientReducer(parameters, [Reduction(parameters=parameters, group=0)])
    reducer.begin()
    reducer.expect_last()
    backward(first)
    backward(second)
    assert other.started == []
    backward(third)
    assert len(other.started) == 1


def test_a_full_bucket_starts_before_the_backward_ends(other):
    first, second = parameters = make_parameters(1, 1)
    reducer = GradientReducer(parameters, [Reduction(parameters=[p], group=0) for p in parameters])
    reducer.begin()
    reducer.expect_last()
    backward(first)
    assert len(other.started) == 1
    backward(second)
    reducer.finish()
    assert (reducer.started_inside, len(other.started)) == (2, 2)
    reducer.begin()
    reducer.expect_last()
    backward(first)
    reducer.finish()
    assert reducer.started_inside == 1
    assert first.grad.item() == 2.0
    assert second.grad is None


@pytest.mark.parametrize("used_there", [False, True])
def test_only_a_parameter_that_no_rank_uses_has_no_gradient(monkeypatch, used_there):
    def contribute(flat):
        there = nothing_but_equal_values(flat)
        if used_there:  # the second one is used on the other rank, with the gradient 5
            there[2:4], there[-1] = 5.0, 1.0
        return there

    monkeypatch.setattr(gradients.dist, "all_reduce", OtherRank(contribute).all_reduce)
    second, first = parameters = make_parameters(2, 2)  # buckets hold them from behind
    reducer = GradientReducer(parameters, [Reduction(parameters=parameters, group=0)])
    reducer.begin()
    reducer.expect_last()
    backward(first)
    reducer.finish()
    assert first.grad.tolist() == [1.0, 1.0]
    assert (second.grad is not None) == used_there
    if used_there:
        assert second.grad.tolist() == [5.0, 5.0]


def test_counts_are_those_of_ranks_not_of_microbatches(monkeypatch):
    seen = []

    def contribute(flat):
        seen.append(flat[-2:].tolist())
        return nothing_but_equal_values(flat)

    monkeypatch.setattr(gradients.dist, "all_reduce", OtherRank(contribute).all_reduce)
    first, second = parameters = make_parameters(1, 1)
    reducer = GradientReducer(parameters, [Reduction(parameters=parameters, group=0)])
    for used in ([first, second], [first], [second], []):
        reducer.begin()
        for _ in range(3):
            if used:
                backward(*used)
        reducer.finish()
    assert seen == [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]


def test_a_gradient_that_somebody_replaced_is_taken_over(other):
    (parameter,) = parameters = make_parameters(2)
    reducer = GradientReducer(parameters, [Reduction(parameters=parameters, group=0)])
    reducer.begin()
    backward(parameter)
    view = parameter.grad
    reducer.finish()
    reducer.begin()
    parameter.grad = None  # then autograd makes a tensor of its own
    backward(parameter)
    assert parameter.grad is view
    reducer.finish()
    assert parameter.grad.tolist() == [2.0, 2.0]


def test_parameters_without_a_reduction_keep_their_own_gradient(other):
    alone, shared = parameters = make_parameters(1, 1)
    reducer = GradientReducer(parameters, [Reduction(parameters=[shared], group=0)])
    for _ in range(2):
        reducer.begin()
        backward(alone, shared)
        reducer.finish()
        assert (alone.grad.item(), shared.grad.item()) == (1.0, 4.0)


def test_close_removes_the_hooks(other):
    parameters = make_parameters(1)
    reducer = GradientReducer(parameters, [Reduction(parameters=parameters, group=0)])
    reducer.begin()
    reducer.expect_last()
    reducer.close()
    backward(*parameters)
    assert other.started == []


def test_a_backward_before_the_first_step_starts_nothing(other):
    parameters = make_parameters(1)
    reducer = GradientReducer(parameters, [Reduction(parameters=parameters, group=0)])
    backward(*parameters)
    assert (reducer.started_inside, other.started) == (0, [])
    reducer.finish()
    assert (reducer.started_inside, len(other.started)) == (0, 1)


def test_gradients_that_arrive_in_parts_are_complete(other):
    """A re-entrant checkpoint gives a shared weight's gradient in parts."""
    from torch.utils.checkpoint import checkpoint

    shared, last = parameters = make_parameters(1, 1)
    reducer = GradientReducer(parameters, [Reduction(parameters=parameters, group=0)], 4)
    x = torch.ones(1, requires_grad=True)

    def run():
        y = checkpoint(lambda x: x * shared, x * last, use_reentrant=True)
        checkpoint(lambda x: 3 * x * shared, y, use_reentrant=True).backward()

    for num_backwards in (1, 2, 3):
        reducer.begin()
        for number in range(num_backwards):
            reducer.begin_backward(is_last=number == num_backwards - 1)
            run()
        reducer.finish()
        # 3 * x * shared * shared * last, on this rank and on the other one
        assert shared.grad.item() == 2 * 6 * num_backwards
        assert last.grad.item() == 2 * 3 * num_backwards


def test_what_an_earlier_step_left_is_not_summed_again(monkeypatch):
    """A parameter without a gradient adds zeros, though its part of the bucket was used before."""
    seen = []

    def contribute(flat):
        seen.append(flat.tolist())
        return nothing_but_equal_values(flat)

    monkeypatch.setattr(gradients.dist, "all_reduce", OtherRank(contribute).all_reduce)
    first, second = parameters = make_parameters(1, 1)
    reducer = GradientReducer(parameters, [Reduction(parameters=parameters, group=0)])
    for used in ([first, second], [first]):
        reducer.begin()
        backward(*used)
        reducer.finish()
    assert 0.0 not in seen[0][:2]
    assert seen[1][:2] == [0.0, 1.0]
    assert second.grad is None


def test_sparse_gradients_are_summed(other):
    table = nn.Embedding(3, 2, sparse=True)
    reducer = GradientReducer([table.weight], [Reduction(parameters=[table.weight], group=0)])
    for _ in range(2):
        reducer.begin()
        for _ in range(2):
            table(torch.tensor([0, 2, 2])).sum().backward()
        reducer.finish()
    assert table.weight.grad.layout is torch.strided


def test_a_plans_parts_are_about_equal_and_no_more_than_it_says(other):
    parameters = make_parameters(1, 9, 3, 3, 5, 3)  # from behind: 3 5 3 | 3 | 9 1, of 24
    reducer = GradientReducer(
        parameters, [Reduction(parameters=parameters, group=0, num_parts=3)], 4.0
    )
    reducer.begin()
    assert reducer.sizes_left(0) == [4 * (8 + 1 + 2), 4 * (6 + 1 + 2), 4 * (10 + 1 + 2)]
    reducer.finish()
    assert [numel for _, numel in other.started] == [8 + 2, 6 + 2, 10 + 2]


def test_the_second_half_of_a_backward_waits_for_its_own_weights_alone(other):
    early, late, unused = parameters = make_parameters(1, 1, 1)
    reductions = [Reduction(parameters=[p], group=i) for i, p in enumerate([unused, late, early])]
    reducer = GradientReducer(parameters, reductions)
    for step in range(2):
        reducer.begin()
        for microbatch in range(2):
            is_last = microbatch == 1
            reducer.begin_backward(is_last=False)
            backward(early)  # in the first half
            reducer.begin_backward(is_last=is_last, rest=[late])
            if is_last:
                assert [group for group, _ in other.started[3 * step :]] == [0]
            backward(late)
        assert [group for group, _ in other.started[3 * step :]] == [0, 1, 2]
        reducer.finish()
        assert (early.grad.item(), late.grad.item(), unused.grad) == (4.0, 4.0, None)
