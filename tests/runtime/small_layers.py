"""Layers of six numbers and their batches, for models that tests put together."""

import torch
from torch import nn

W = 6
"""The width of the layers."""


def rows_of(step, rows=8):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, W, generator=generator), torch.randn(rows, W, generator=generator)


def tokens_of(step, rows=8, length=5):
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(11, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, x):
        return torch.tanh(self.linear(x))
