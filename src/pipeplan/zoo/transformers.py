"""The language models: encoders, decoders, and one encoder-decoder.

References:
    transformer-big: Vaswani et al. 2017, arXiv:1706.03762, table 3, "big"; 37,000 shared subwords.
    bert-large, bert-48: Devlin et al. 2019, arXiv:1810.04805; 48 layers as in DAPPLE (Fan et al.
    2021, arXiv:2007.01045). With both pre-training heads; words are predicted at all positions.
    xlnet-large: Yang et al. 2019, arXiv:1906.08237. One stream, as in fine-tuning: pre-training has
    a second one, the query stream, which is left out. No memory of earlier segments.
    gpt2-xl: Radford et al. 2019, "Language models are unsupervised multitask learners".
    llama-7b, llama-70b: Touvron et al. 2023, arXiv:2307.09288 (Llama 2).
    mixtral-8x7b: Jiang et al. 2024, arXiv:2401.04088.

If a model ties its embeddings, the table counts once, in the first layer that uses it. The head
then has no matrix of its own (`parameter_bytes` is at most its bias), but it still computes with
the table. Sequences are full: there is no padding, so no mask crosses a cut.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from pipeplan.zoo.architecture import LOSS_BYTES, Architecture, LayerShape, Recipe
from pipeplan.zoo.blocks import (
    cross_attention,
    expert_feed_forward,
    feed_forward,
    gated_feed_forward,
    grouped_attention,
    layer_norm,
    relative_attention,
    rms_norm,
    self_attention,
)
from pipeplan.zoo.hardware import Precision
from pipeplan.zoo.operations import (
    TOKEN_ID_BYTES,
    Operation,
    cross_entropy,
    dropout,
    elementwise,
    embedding,
    linear,
)

__all__ = [
    "RECIPES",
    "bert",
    "gpt2_xl",
    "llama",
    "llama_decoder",
    "llama_head",
    "mixtral_8x7b",
    "transformer_big",
    "xlnet_large",
]


def transformer_big(tokens: int) -> Architecture:
    """Six encoder and six decoder layers; source and target have `tokens` each.

    Cuts before the embedding of the target also carry the target's ids. Cuts behind it also carry
    the encoder's output, until the last decoder layer has used it.
    """
    vocabulary, width, heads, inner = 37_000, 1024, 16, 4096
    states, target_ids = tokens * width, tokens * TOKEN_ID_BYTES
    positions = elementwise(states, states)  # sinusoids, computed
    encoder = self_attention(tokens, width, heads) + feed_forward(tokens, width, inner)
    decoder = (
        self_attention(tokens, width, heads)
        + cross_attention(tokens, tokens, width, heads)
        + feed_forward(tokens, width, inner)
    )
    layers = [
        LayerShape(
            name="embed.source",
            operations=(embedding(tokens, vocabulary, width), positions, dropout(states)),
            output_elements=states,
            passed_bytes=target_ids,
        ),
        *_repeat("encoder", 6, encoder, output_elements=states, passed_bytes=target_ids),
        LayerShape(
            name="embed.target",
            operations=(
                embedding(tokens, vocabulary, width, tied=True),
                positions,
                dropout(states),
            ),
            output_elements=2 * states,
        ),
        *_repeat("decoder", 5, decoder, output_elements=2 * states),
        LayerShape(name="decoder.5", operations=decoder, output_elements=states),
        _head(
            linear(tokens, width, vocabulary, bias=False, tied=True),
            cross_entropy(tokens, vocabulary),
        ),
    ]
    return Architecture(layers=tuple(layers), input_id_bytes=2 * tokens * TOKEN_ID_BYTES)


def bert(tokens: int, *, num_layers: int) -> Architecture:
    """BERT-large with `num_layers` encoder layers."""
    vocabulary, width, heads, inner = 30_522, 1024, 16, 4096
    states = tokens * width
    embed = (
        embedding(tokens, vocabulary, width),
        embedding(tokens, _BERT_POSITIONS, width),
        embedding(tokens, 2, width),  # segments
        elementwise(3 * states, states),
        layer_norm(tokens, width),
        dropout(states),
    )
    next_sentence = (
        linear(1, width, width),
        elementwise(width, width, kept=width),
        linear(1, width, 2),
        cross_entropy(1, 2),
    )
    masked_words = (
        linear(tokens, width, width),
        elementwise(states, states, kept=states),
        layer_norm(tokens, width),
        linear(tokens, width, vocabulary, tied=True),
        cross_entropy(tokens, vocabulary),
    )
    encoder = self_attention(tokens, width, heads) + feed_forward(tokens, width, inner)
    return _chain(
        tokens, width, embed, ("encoder", num_layers, encoder), (*next_sentence, *masked_words)
    )


def xlnet_large(tokens: int) -> Architecture:
    """24 layers of attention with relative positions."""
    vocabulary, width, heads, inner = 32_000, 1024, 16, 4096
    layer = relative_attention(tokens, width, heads) + feed_forward(tokens, width, inner)
    mask_embedding = Operation(parameters=width)
    return _chain(
        tokens,
        width,
        (embedding(tokens, vocabulary, width), mask_embedding, dropout(tokens * width)),
        ("layer", 24, layer),
        (
            dropout(tokens * width),
            linear(tokens, width, vocabulary, tied=True),
            cross_entropy(tokens, vocabulary),
        ),
    )


def gpt2_xl(tokens: int) -> Architecture:
    """48 decoder layers of width 1600."""
    vocabulary, width, heads, inner = 50_257, 1600, 25, 6400
    states = tokens * width
    embed = (
        embedding(tokens, vocabulary, width),
        embedding(tokens, _GPT2_POSITIONS, width),
        elementwise(2 * states, states),
        dropout(states),
    )
    head = (
        layer_norm(tokens, width),
        linear(tokens, width, vocabulary, bias=False, tied=True),
        cross_entropy(tokens, vocabulary),
    )
    decoder = self_attention(tokens, width, heads) + feed_forward(tokens, width, inner)
    return _chain(tokens, width, embed, ("decoder", 48, decoder), head)


def llama(
    tokens: int, *, num_layers: int, width: int, heads: int, key_value_heads: int, inner: int
) -> Architecture:
    """Llama 2 of any size; the head is not tied."""
    return _chain(
        tokens,
        width,
        (embedding(tokens, _LLAMA_VOCABULARY, width),),
        ("decoder", num_layers, llama_decoder(tokens, width, heads, key_value_heads, inner)),
        llama_head(tokens, width),
    )


def llama_decoder(
    tokens: int, width: int, heads: int, key_value_heads: int, inner: int
) -> tuple[Operation, ...]:
    """One decoder layer of Llama 2."""
    return grouped_attention(tokens, width, heads, key_value_heads) + gated_feed_forward(
        tokens, width, inner
    )


def llama_head(tokens: int, width: int) -> tuple[Operation, ...]:
    """The last norm, the map to the vocabulary and the loss."""
    return (
        rms_norm(tokens, width),
        linear(tokens, width, _LLAMA_VOCABULARY, bias=False),
        cross_entropy(tokens, _LLAMA_VOCABULARY),
    )


def mixtral_8x7b(tokens: int) -> Architecture:
    """32 decoder layers with 8 experts each; every token uses 2 of them."""
    width, heads, key_value_heads, inner = 4096, 32, 8, 14_336
    decoder = grouped_attention(tokens, width, heads, key_value_heads) + expert_feed_forward(
        tokens, width, inner, experts=8, active=2
    )
    return _chain(
        tokens,
        width,
        (embedding(tokens, _LLAMA_VOCABULARY, width),),
        ("decoder", 32, decoder),
        llama_head(tokens, width),
    )


_BERT_POSITIONS = 512
_GPT2_POSITIONS = 1024
_LLAMA_VOCABULARY = 32_000  # Mixtral's too


def _chain(
    tokens: int,
    width: int,
    embed: tuple[Operation, ...],
    body: tuple[str, int, tuple[Operation, ...]],
    head: tuple[Operation, ...],
) -> Architecture:
    """Embeddings, equal layers (their name, number and operations), and a head."""
    states = tokens * width
    layers = (
        LayerShape(name="embed", operations=embed, output_elements=states),
        *_repeat(*body, output_elements=states),
        _head(*head),
    )
    return Architecture(layers=layers, input_id_bytes=tokens * TOKEN_ID_BYTES)


def _repeat(
    name: str,
    count: int,
    operations: tuple[Operation, ...],
    *,
    output_elements: int,
    passed_bytes: int = 0,
) -> Iterable[LayerShape]:
    for index in range(count):
        yield LayerShape(
            name=f"{name}.{index}",
            operations=operations,
            output_elements=output_elements,
            passed_bytes=passed_bytes,
        )


def _head(*operations: Operation) -> LayerShape:
    return LayerShape(name="head", operations=operations, passed_bytes=LOSS_BYTES)


_BERT_SOURCE = "Devlin et al. 2019, arXiv:1810.04805"
_LLAMA_SOURCE = "Touvron et al. 2023, arXiv:2307.09288"

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "transformer-big": Recipe(
            describe=transformer_big,
            source="Vaswani et al. 2017, arXiv:1706.03762",
            device="V100",
            precision=Precision.FP32,
            microbatch_size=32,
            sequence_length=128,
        ),
        "bert-large": Recipe(
            describe=lambda tokens: bert(tokens, num_layers=24),
            source=_BERT_SOURCE,
            device="V100",
            precision=Precision.FP32,
            microbatch_size=4,
            sequence_length=512,
            longest_sequence=_BERT_POSITIONS,
        ),
        "bert-48": Recipe(
            describe=lambda tokens: bert(tokens, num_layers=48),
            source="Fan et al. 2021 (DAPPLE), arXiv:2007.01045",
            device="V100",
            precision=Precision.FP32,
            microbatch_size=2,
            sequence_length=512,
            longest_sequence=_BERT_POSITIONS,
        ),
        "xlnet-large": Recipe(
            describe=xlnet_large,
            source="Yang et al. 2019, arXiv:1906.08237",
            device="V100",
            precision=Precision.FP32,
            microbatch_size=2,
            sequence_length=512,
        ),
        "gpt2-xl": Recipe(
            describe=gpt2_xl,
            source="Radford et al. 2019 (GPT-2)",
            device="V100",
            precision=Precision.FP16,
            microbatch_size=1,
            sequence_length=1024,
            longest_sequence=_GPT2_POSITIONS,
        ),
        "llama-7b": Recipe(
            describe=lambda tokens: llama(
                tokens, num_layers=32, width=4096, heads=32, key_value_heads=32, inner=11_008
            ),
            source=_LLAMA_SOURCE,
            device="A100",
            precision=Precision.BF16,
            microbatch_size=1,
            sequence_length=4096,
        ),
        "llama-70b": Recipe(
            describe=lambda tokens: llama(
                tokens, num_layers=80, width=8192, heads=64, key_value_heads=8, inner=28_672
            ),
            source=_LLAMA_SOURCE,
            device="A100",
            precision=Precision.BF16,
            microbatch_size=1,
            sequence_length=4096,
        ),
        "mixtral-8x7b": Recipe(
            describe=mixtral_8x7b,
            source="Jiang et al. 2024, arXiv:2401.04088",
            device="A100",
            precision=Precision.BF16,
            microbatch_size=1,
            sequence_length=4096,
        ),
    }
)
"""The language models by name."""
