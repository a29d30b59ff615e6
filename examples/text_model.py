"""A small language model over characters, and its text. `train_text.py` trains it."""

from pathlib import Path

import torch
from torch import nn

TEXT = Path(__file__).with_name("text.txt").read_text()
ALPHABET = sorted(set(TEXT))
TOKENS = torch.tensor([ALPHABET.index(letter) for letter in TEXT])
LENGTH, WIDTH, NUM_BLOCKS = 64, 96, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=later, need_weights=False)[0]
        return x + self.feed(x)


class TextModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(ALPHABET), WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(ALPHABET), bias=False)
        self.head.weight = self.letters.weight  # tied, whatever stages hold the two

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.letters(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model() -> nn.Module:
    torch.manual_seed(0)
    model = TextModel()
    nn.init.normal_(model.letters.weight, std=0.05)
    return model


def make_batch(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(TOKENS) - LENGTH - 1, (rows,), generator=generator)
    pieces = TOKENS[starts[:, None] + torch.arange(LENGTH + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def example_batch() -> torch.Tensor:
    """What `pipeplan profile` measures the model with: a microbatch of four pieces of text."""
    return make_batch(0, 4)[0]


def example_targets() -> torch.Tensor:
    return make_batch(0, 4)[1]
