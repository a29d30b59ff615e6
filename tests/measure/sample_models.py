"""What a user would name on the command line."""

import torch
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def example_batch():
    return torch.ones(4, 8)


def example_targets():
    return torch.zeros(4, 4)


def loss_fn(output, targets):
    return nn.functional.mse_loss(output, targets)


def wrong_batch():
    return torch.ones(4, 9)


def one_layer():
    return nn.Linear(8, 8)


def with_nan():
    model = build()
    model[0].weight.data.fill_(torch.nan)
    return model


def too_large():
    return nn.Sequential(nn.Linear(1_000_000, 1_000_000), nn.Linear(1_000_000, 10))


def wide_batch():
    return torch.ones(1, 1_000_000)


def broken():
    raise ValueError("no weights\nhere")


class Factory:
    build = staticmethod(build)
