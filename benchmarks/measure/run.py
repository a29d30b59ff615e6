"""How far to trust a profile: the sum of measured layers against the whole model, on this machine.

python benchmarks/measure/run.py           seven small models, measured; a Llama of 7B, estimated
python benchmarks/measure/run.py layers    the first part only
python benchmarks/measure/run.py estimate  the second part only
"""

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipeplan.measure import ModelMeasurement, measure_model

ROWS, LENGTH, VOCABULARY, WIDTH, INNER, LAYERS, HEADS = 4, 128, 1000, 256, 1024, 4, 4
IMAGE = 64
SEED = 0


def language_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def label_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(getattr(output, "logits", output), targets)


def hugging_face(kind: str) -> nn.Module:
    import transformers

    common = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    if kind == "GPT-2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_embd=WIDTH,
                n_layer=LAYERS,
                n_head=HEADS,
                vocab_size=VOCABULARY,
                bos_token_id=1,
                eos_token_id=2,
            )
        )
    if kind == "ViT":
        config = transformers.ViTConfig(
            **common, intermediate_size=INNER, image_size=IMAGE, patch_size=8
        )
        return transformers.ViTForImageClassification(config)
    makers = {
        "BERT": (transformers.BertForMaskedLM, transformers.BertConfig, {}),
        "Llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
        "Mixtral": (
            transformers.MixtralForCausalLM,
            transformers.MixtralConfig,
            {"num_local_experts": 4, "num_key_value_heads": HEADS},
        ),
    }
    model, config, more = makers[kind]
    return model(config(**common, **more, vocab_size=VOCABULARY, intermediate_size=INNER))


class Unit(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.norm(self.convolution(x)))


class Cnn(nn.Module):
    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.units = nn.ModuleList(Unit(channels) for _ in range(LAYERS))
        self.head = nn.Linear(channels, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for unit in self.units:
            x = unit(x)
        return self.head(x.mean((2, 3)))


def samples() -> dict[str, Callable[[], ModelMeasurement]]:
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH))
    images, labels = torch.randn(ROWS, 3, IMAGE, IMAGE), torch.randint(2, (ROWS,))

    def language(kind: str) -> Callable[[], ModelMeasurement]:
        return lambda: measure_model(
            hugging_face(kind), {"input_ids": tokens}, loss_fn=language_loss, targets=tokens
        )

    plain = nn.Sequential(*(nn.Linear(4 * WIDTH, 4 * WIDTH) for _ in range(2 * LAYERS)))
    data = torch.randn(64, 4 * WIDTH)
    return {
        **{kind: language(kind) for kind in ("GPT-2", "BERT", "Llama", "Mixtral")},
        "ViT": lambda: measure_model(
            hugging_face("ViT"), {"pixel_values": images}, loss_fn=label_loss, targets=labels
        ),
        "Sequential": lambda: measure_model(
            plain, data, loss_fn=nn.functional.mse_loss, targets=data
        ),
        "CNN": lambda: measure_model(Cnn(), images, loss_fn=label_loss, targets=labels),
    }


def measure_layers() -> None:
    print("| model | layers | runs | sum of layers | whole | difference |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, measure in samples().items():
        found = measure()
        print(
            f"| {name} | {found.profile.num_layers} | {found.num_runs} | {found.layers_ms:.1f} ms"
            f" | {found.whole_ms:.1f} ms | {100 * found.difference:+.1f} % |",
            flush=True,
        )


def estimate_llama() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, inner, vocabulary, length = 32, 4096, 11008, 32000, 2048
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=vocabulary,
    )
    start_s = time.perf_counter()
    torch.set_default_dtype(torch.bfloat16)
    found = measure_model(
        lambda: LlamaForCausalLM(config),
        lambda: {"input_ids": torch.zeros(1, length, dtype=torch.long)},
        loss_fn=language_loss,
        targets=lambda: torch.zeros(1, length, dtype=torch.long),
        estimate="a100",
    )
    took_s = time.perf_counter() - start_s
    products = layers * (4 * width**2 + 3 * width * inner) + vocabulary * width
    formula = 2 * length * products + layers * 4 * length**2 * width
    flops = sum(found.forward_flops)
    both = flops + sum(found.backward_flops)
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(
        f"Llama 7B, one row of {length}: {took_s:.1f} s, {peak_gb:.2f} GB at most; forward"
        f" {flops / 1e12:.2f} TFLOPs, formula {formula / 1e12:.2f}"
        f" ({100 * (flops / formula - 1):+.2f} %); with the backward {both / 1e12:.2f}, three times"
        f" the formula {3 * formula / 1e12:.2f} ({100 * (both / formula / 3 - 1):+.2f} %)"
    )


def main() -> None:
    wanted = sys.argv[1:] or ["layers", "estimate"]
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    if "layers" in wanted:
        measure_layers()
    if "estimate" in wanted:
        estimate_llama()


if __name__ == "__main__":
    main()
