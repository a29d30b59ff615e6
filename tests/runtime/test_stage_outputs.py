"""A backward begins with gradients that nobody else holds, and computes what it would anyway."""

import weakref

import pytest

pytest.importorskip("torch")

import torch

from pipeplan.runtime.stage_outputs import exits_of


def run(tensors, gradients):
    exits = exits_of(tensors, gradients)
    pairs = [
        (e, g) for e, g in zip(exits, gradients, strict=True) if e is not None and g is not None
    ]
    torch.autograd.backward([e for e, _ in pairs], [g for _, g in pairs])


def test_gradient_is_freed_behind_the_first_node():
    x = torch.randn(128, 128, requires_grad=True)
    middle = x * 2
    gradients = [torch.ones(128, 128)]
    gone = weakref.ref(gradients[0])
    held = []
    middle.register_hook(lambda gradient: held.append(gone() is not None))
    run([torch.tanh(middle)], gradients)
    assert held == [False]


@pytest.mark.parametrize("size", [2, 128])
def test_same_gradients_and_hooks(size):
    torch.manual_seed(0)
    start = torch.randn(size, size, dtype=torch.float64)
    given = [torch.randn(size, size, dtype=torch.float64) for _ in range(3)]

    def outputs(x, seen):
        first = x.sin()
        first.register_hook(lambda gradient: seen.append(gradient.clone()) or 3 * gradient)
        return [first, first * x, first, x.detach(), x.exp()]

    gradients = [given[0], given[1], given[2], None, None]
    x, y = start.clone().requires_grad_(), start.clone().requires_grad_()
    seen, wanted = [], []
    run(outputs(x, seen), list(gradients))
    torch.autograd.backward(outputs(y, wanted)[:3], gradients[:3])
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-14, atol=0)
    torch.testing.assert_close(seen, wanted, rtol=1e-14, atol=0)
