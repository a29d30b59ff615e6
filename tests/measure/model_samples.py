"""Small models of many kinds, with parameters and cut bytes counted by hand."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ROWS, LENGTH, VOCABULARY, WIDTH, INNER, LAYERS = 4, 10, 64, 32, 64, 3
IMAGE, PATCH, LABELS = 16, 4, 7
FLOAT, LONG = 4, 8


@dataclass
class Sample:
    model: nn.Module
    batch: Any
    loss_fn: Any
    targets: torch.Tensor
    names: list
    parameters: list
    """How many each layer has."""
    cut_elements: int
    """Floats across a cut between two layers."""
    input_bytes: int
    tied: tuple = ()


def _tokens():
    generator = torch.Generator().manual_seed(3)
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)


def _language(model, list_name, parameters, tied=()):
    tokens = _tokens()
    return Sample(
        model=model,
        batch={"input_ids": tokens},
        loss_fn=lambda output, targets: nn.functional.cross_entropy(
            output.logits.flatten(0, 1), targets.flatten()
        ),
        targets=tokens,
        names=["before", *(f"{list_name}.{i}" for i in range(LAYERS)), "behind"],
        parameters=[parameters[0], *[parameters[1]] * LAYERS, parameters[2]],
        cut_elements=ROWS * LENGTH * WIDTH,
        input_bytes=ROWS * LENGTH * LONG,
        tied=tied,
    )


def linear(inputs, outputs, bias=True):
    return inputs * outputs + outputs * bias


NORM = 2 * WIDTH


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    positions = 32
    config = GPT2Config(
        n_layer=LAYERS,
        n_embd=WIDTH,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=positions,
        bos_token_id=1,
        eos_token_id=2,
    )
    block = NORM + linear(WIDTH, 3 * WIDTH) + linear(WIDTH, WIDTH)
    block += NORM + linear(WIDTH, 4 * WIDTH) + linear(4 * WIDTH, WIDTH)
    before = (VOCABULARY + positions) * WIDTH
    return _language(
        GPT2LMHeadModel(config),
        "transformer.h",
        [before, block, NORM + VOCABULARY * WIDTH],
        tied=(("before", "behind"),),
    )


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    block = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * INNER + 2 * WIDTH
    ends = VOCABULARY * WIDTH
    return _language(LlamaForCausalLM(config), "model.layers", [ends, block, WIDTH + ends])


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = 4
    config = MixtralConfig(
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=experts,
        vocab_size=VOCABULARY,
    )
    block = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2 + 2 * WIDTH
    block += experts * 3 * WIDTH * INNER + experts * WIDTH
    ends = VOCABULARY * WIDTH
    return _language(MixtralForCausalLM(config), "model.layers", [ends, block, WIDTH + ends])


def bert():
    from transformers import BertConfig, BertForMaskedLM

    positions = 16
    config = BertConfig(
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=positions,
    )
    block = 4 * linear(WIDTH, WIDTH) + NORM + linear(WIDTH, INNER) + linear(INNER, WIDTH) + NORM
    before = (VOCABULARY + positions + 2) * WIDTH + NORM
    behind = linear(WIDTH, WIDTH) + NORM + linear(WIDTH, VOCABULARY)
    return _language(
        BertForMaskedLM(config),
        "bert.encoder.layer",
        [before, block, behind],
        tied=(("before", "behind"),),
    )


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=2,
        image_size=IMAGE,
        patch_size=PATCH,
        num_labels=LABELS,
    )
    patches = (IMAGE // PATCH) ** 2
    block = 4 * linear(WIDTH, WIDTH) + 2 * NORM + linear(WIDTH, INNER) + linear(INNER, WIDTH)
    before = linear(3 * PATCH**2, WIDTH) + (patches + 1) * WIDTH + WIDTH
    model = ViTForImageClassification(config)
    list_name = next(
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
    )
    return Sample(
        model=model,
        batch={"pixel_values": torch.randn(ROWS, 3, IMAGE, IMAGE)},
        loss_fn=lambda output, targets: nn.functional.cross_entropy(output.logits, targets),
        targets=torch.randint(LABELS, (ROWS,)),
        names=["before", *(f"{list_name}.{i}" for i in range(LAYERS)), "behind"],
        parameters=[before, *[block] * LAYERS, NORM + linear(WIDTH, LABELS)],
        cut_elements=ROWS * (patches + 1) * WIDTH,
        input_bytes=ROWS * 3 * IMAGE**2 * FLOAT,
    )


def sequential():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    return Sample(
        model=model,
        batch=torch.randn(ROWS, WIDTH),
        loss_fn=nn.functional.mse_loss,
        targets=torch.randn(ROWS, WIDTH),
        names=[str(i) for i in range(LAYERS)],
        parameters=[linear(WIDTH, WIDTH)] * LAYERS,
        cut_elements=ROWS * WIDTH,
        input_bytes=ROWS * WIDTH * FLOAT,
    )


class Unit(nn.Module):
    """Convolution, norm, activation in place: what people write by hand."""

    def __init__(self, channels):
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.activation(self.norm(self.convolution(x)))


class HandWrittenCnn(nn.Module):
    """A stem, units in a list, and a head."""

    channels = 8

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, self.channels, 3, padding=1)
        self.units = nn.ModuleList(Unit(self.channels) for _ in range(LAYERS))
        self.head = nn.Linear(self.channels, LABELS)

    def forward(self, images):
        x = self.stem(images)
        for unit in self.units:
            x = unit(x)
        return self.head(x.mean((2, 3)))


def cnn():
    channels = HandWrittenCnn.channels
    unit = channels * channels * 9 + 2 * channels
    return Sample(
        model=HandWrittenCnn(),
        batch=torch.randn(ROWS, 3, IMAGE, IMAGE),
        loss_fn=nn.functional.cross_entropy,
        targets=torch.randint(LABELS, (ROWS,)),
        names=["before", *(f"units.{i}" for i in range(LAYERS)), "behind"],
        parameters=[linear(27, channels), *[unit] * LAYERS, linear(channels, LABELS)],
        cut_elements=ROWS * channels * IMAGE**2,
        input_bytes=ROWS * 3 * IMAGE**2 * FLOAT,
    )


SAMPLES = {make.__name__: make for make in (gpt2, bert, llama, vit, mixtral, sequential, cnn)}
