"""The costs of single operations for one sample, from their shapes.

Four rules hold for all operations.

FLOPs
    Only the multiply-adds of convolutions, linear maps and attention count, as 2 FLOPs each, as in
    the published totals. All other operations cost only their memory traffic.
Moved elements
    Each input is read once and each output written once. Weights are read once per microbatch.
Kept elements
    The elements that the backward needs. A linear map, a convolution and a norm keep their input,
    attention keeps queries, keys and values, dropout its mask (one byte per element). A tensor that
    two operations share is kept once. For a transformer layer the sum is that of Korthikanti et al.
    2022, arXiv:2205.05198.
Backward
    Takes `BACKWARD_PER_FORWARD` times as long as the forward. If there is a weight matrix, one half
    is the gradient of the input, the other half that of the weights.
"""

from dataclasses import dataclass

__all__ = [
    "BACKWARD_PER_FORWARD",
    "TOKEN_ID_BYTES",
    "Operation",
    "attention",
    "convolution",
    "cross_entropy",
    "dropout",
    "elementwise",
    "embedding",
    "linear",
    "norm",
    "pool",
    "residual",
]

BACKWARD_PER_FORWARD = 2.0
"""The time of a backward divided by that of its forward, for every operation."""

TOKEN_ID_BYTES = 8
"""Token ids travel as 64-bit integers."""

_FLOPS_PER_MULTIPLY_ADD = 2
_POOL_INDEX_BYTES = 8
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The costs of one operation for one sample."""

    parameters: int = 0
    """Its own parameters; a tied weight belongs to the first operation that uses it."""
    weight_elements: int = 0
    """Weights read for one microbatch of any size, tied ones included."""
    flops: int = 0
    moved_elements: int = 0
    kept_elements: int = 0
    """Kept for the backward, in the model's precision."""
    kept_bytes: int = 0
    """Kept for the backward in another precision: masks, indices, fp32 statistics."""
    weight_grad_share: float = 0.0
    """The part of the backward that only computes weight gradients."""


def convolution(
    *,
    input_elements: int,
    output_elements: int,
    input_channels: int,
    output_channels: int,
    kernel: tuple[int, int],
    bias: bool,
    keeps_input: bool = True,
) -> Operation:
    """A dense two-dimensional convolution."""
    fan_in = input_channels * kernel[0] * kernel[1]
    weights = fan_in * output_channels + (output_channels if bias else 0)
    return Operation(
        parameters=weights,
        weight_elements=weights,
        flops=_FLOPS_PER_MULTIPLY_ADD * output_elements * fan_in,
        moved_elements=input_elements + output_elements,
        kept_elements=input_elements if keeps_input else 0,
        weight_grad_share=0.5,
    )


def linear(
    tokens: int, inputs: int, outputs: int, *, bias: bool = True, tied: bool = False
) -> Operation:
    """A linear map of every token; with `tied`, it uses a matrix of another operation."""
    matrix, vector = inputs * outputs, outputs if bias else 0
    return Operation(
        parameters=vector + (0 if tied else matrix),
        weight_elements=matrix + vector,
        flops=_FLOPS_PER_MULTIPLY_ADD * tokens * matrix,
        moved_elements=tokens * (inputs + outputs),
        kept_elements=tokens * inputs,
        weight_grad_share=0.5,
    )


def embedding(tokens: int, rows: int, width: int, *, tied: bool = False) -> Operation:
    """A look-up in a table of `rows`; its backward only computes the table's gradient."""
    return Operation(
        parameters=0 if tied else rows * width,
        moved_elements=2 * tokens * width,
        kept_bytes=tokens * TOKEN_ID_BYTES,
        weight_grad_share=1.0,
    )


def norm(elements: int, *, parameters: int) -> Operation:
    """A layer, RMS or batch norm."""
    # Its weights are small, so their gradients get no part of the backward.
    return Operation(
        parameters=parameters,
        weight_elements=parameters,
        moved_elements=2 * elements,
        kept_elements=elements,
    )


def elementwise(inputs: int, outputs: int, *, kept: int = 0) -> Operation:
    """An activation, a sum, a product, a copy: reads `inputs` elements and writes `outputs`."""
    return Operation(moved_elements=inputs + outputs, kept_elements=kept)


def dropout(elements: int) -> Operation:
    """Dropout on its own."""
    return Operation(moved_elements=2 * elements, kept_bytes=elements)


def residual(elements: int, *, dropped: bool) -> Operation:
    """The sum of a branch and its bypass; if `dropped`, dropout happens in the same pass."""
    return Operation(moved_elements=3 * elements, kept_bytes=elements if dropped else 0)


def pool(
    input_elements: int, output_elements: int, *, maximum: bool, keeps_input: bool = True
) -> Operation:
    """Pooling; maximum pooling keeps its input and the index of each output."""
    return Operation(
        moved_elements=input_elements + output_elements,
        kept_elements=input_elements if maximum and keeps_input else 0,
        kept_bytes=output_elements * _POOL_INDEX_BYTES if maximum else 0,
    )


def attention(
    *,
    queries: int,
    keys: int,
    heads: int,
    head_width: int,
    key_value_heads: int | None = None,
    stored_scores: bool,
    relative_positions: int = 0,
) -> Operation:
    """The products of queries with keys and of scores with values, for all heads.

    With `stored_scores` the score matrix goes through memory: scores, softmax and dropout are each
    written and read once, and the backward needs softmax, dropout mask and dropped scores. Without
    it, the matrix stays on the chip (FlashAttention), and the backward needs one fp32 number per
    query and head. By convention the full square counts, even if a causal mask hides half of it.

    `relative_positions` adds the position scores of Transformer-XL: a second copy of the queries,
    with another bias, times this number of projected positions.
    """
    query_elements = queries * heads * head_width
    key_value_elements = 2 * keys * (key_value_heads or heads) * head_width
    position_elements = relative_positions * heads * head_width
    position_queries = query_elements if relative_positions else 0
    scores = heads * queries * keys
    position_scores = heads * queries * relative_positions
    operands = query_elements + key_value_elements + position_elements + position_queries
    return Operation(
        flops=_FLOPS_PER_MULTIPLY_ADD * head_width * (2 * scores + position_scores),
        moved_elements=operands
        + query_elements  # the output has the queries' shape
        + (6 * scores + 2 * position_scores if stored_scores else 0),
        kept_elements=operands + (2 * scores if stored_scores else 0),
        kept_bytes=scores if stored_scores else heads * queries * _FP32_BYTES,
    )


def cross_entropy(positions: int, classes: int) -> Operation:
    """The loss over `classes`; the logits are kept in fp32."""
    logits = positions * classes
    return Operation(moved_elements=2 * logits, kept_bytes=logits * _FP32_BYTES)
