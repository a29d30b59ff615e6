"""The blocks that transformers are made of, each with its norm and its residual sum.

There are two families. `self_attention`, `cross_attention`, `relative_attention` and `feed_forward`
are the blocks of 2017 to 2019, with layer norm and biases. `dropped` says whether they train with
dropout; if so, attention scores go through memory. `grouped_attention`, `gated_feed_forward` and
`expert_feed_forward` are the blocks of Llama and Mixtral, with RMS norm and FlashAttention, without
biases and dropout. The norm may come before or after the block: no figure depends on it.
"""

from pipeplan.zoo.operations import (
    Operation,
    attention,
    elementwise,
    linear,
    norm,
    residual,
)

__all__ = [
    "cross_attention",
    "expert_feed_forward",
    "feed_forward",
    "gated_feed_forward",
    "grouped_attention",
    "layer_norm",
    "relative_attention",
    "rms_norm",
    "self_attention",
]

Operations = tuple[Operation, ...]


def layer_norm(tokens: int, width: int) -> Operation:
    """Layer norm with scale and shift."""
    return norm(tokens * width, parameters=2 * width)


def rms_norm(tokens: int, width: int) -> Operation:
    """RMS norm: scale only."""
    return norm(tokens * width, parameters=width)


def self_attention(tokens: int, width: int, heads: int, *, dropped: bool = True) -> Operations:
    """Multi-head attention of the tokens among themselves."""
    return (
        layer_norm(tokens, width),
        linear(tokens, width, 3 * width),  # queries, keys and values share the input
        attention(
            queries=tokens,
            keys=tokens,
            heads=heads,
            head_width=width // heads,
            stored_scores=dropped,
        ),
        linear(tokens, width, width),
        residual(tokens * width, dropped=dropped),
    )


def cross_attention(tokens: int, memory_tokens: int, width: int, heads: int) -> Operations:
    """Multi-head attention of the tokens to the encoder's output, which every block keeps."""
    return (
        layer_norm(tokens, width),
        linear(tokens, width, width),
        linear(memory_tokens, width, 2 * width),
        attention(
            queries=tokens,
            keys=memory_tokens,
            heads=heads,
            head_width=width // heads,
            stored_scores=True,
        ),
        linear(tokens, width, width),
        residual(tokens * width, dropped=True),
    )


def relative_attention(tokens: int, width: int, heads: int) -> Operations:
    """Transformer-XL's attention: with projected relative positions, without linear biases.

    A sequence has `2 * tokens` relative positions. Every layer projects them again for each sample.
    Beside the matrices it has three biases of the scores and two segment embeddings as parameters.
    """
    positions = 2 * tokens
    return (
        layer_norm(tokens, width),
        linear(tokens, width, 3 * width, bias=False),
        linear(positions, width, width, bias=False),
        Operation(parameters=(3 + 2) * width),
        attention(
            queries=tokens,
            keys=tokens,
            heads=heads,
            head_width=width // heads,
            stored_scores=True,
            relative_positions=positions,
        ),
        linear(tokens, width, width, bias=False),
        residual(tokens * width, dropped=True),
    )


def feed_forward(tokens: int, width: int, inner: int, *, dropped: bool = True) -> Operations:
    """Up to `inner`, GELU or ReLU, and down again."""
    return (
        layer_norm(tokens, width),
        linear(tokens, width, inner),
        elementwise(tokens * inner, tokens * inner, kept=tokens * inner),
        linear(tokens, inner, width),
        residual(tokens * width, dropped=dropped),
    )


def grouped_attention(tokens: int, width: int, heads: int, key_value_heads: int) -> Operations:
    """Attention where groups of query heads share keys and values; rotary positions."""
    head_width = width // heads
    rotated = tokens * (heads + key_value_heads) * head_width
    return (
        rms_norm(tokens, width),
        linear(tokens, width, (heads + 2 * key_value_heads) * head_width, bias=False),
        elementwise(rotated, rotated),
        attention(
            queries=tokens,
            keys=tokens,
            heads=heads,
            head_width=head_width,
            key_value_heads=key_value_heads,
            stored_scores=False,
        ),
        linear(tokens, width, width, bias=False),
        residual(tokens * width, dropped=False),
    )


def gated_feed_forward(tokens: int, width: int, inner: int) -> Operations:
    """SwiGLU: two maps, gate and up, share the input; a third takes their product down."""
    return (
        rms_norm(tokens, width),
        *_swiglu(tokens, width, inner, experts=1),
        residual(tokens * width, dropped=False),
    )


def expert_feed_forward(
    tokens: int, width: int, inner: int, *, experts: int, active: int
) -> Operations:
    """A router sends every token through `active` of `experts` SwiGLUs and sums their outputs.

    FLOPs and activations count the active experts only, parameters all experts. All weights are
    read, because the tokens of a microbatch together use every expert.
    """
    routed = active * tokens
    return (
        rms_norm(tokens, width),
        linear(tokens, width, experts, bias=False),
        elementwise(tokens * width, routed * width),
        *_swiglu(routed, width, inner, experts=experts),
        elementwise(routed * width, tokens * width, kept=routed * width),
        residual(tokens * width, dropped=False),
    )


def _swiglu(tokens: int, width: int, inner: int, *, experts: int) -> Operations:
    return (
        _expert_linear(tokens, width, 2 * inner, experts=experts),
        elementwise(2 * tokens * inner, tokens * inner, kept=2 * tokens * inner),
        _expert_linear(tokens, inner, width, experts=experts),
    )


def _expert_linear(tokens: int, inputs: int, outputs: int, *, experts: int) -> Operation:
    """Every token through one of `experts` matrices of the same shape."""
    one = linear(tokens, inputs, outputs, bias=False)
    return Operation(
        parameters=experts * one.parameters,
        weight_elements=experts * one.weight_elements,
        flops=one.flops,
        moved_elements=one.moved_elements,
        kept_elements=one.kept_elements,
        weight_grad_share=one.weight_grad_share,
    )
