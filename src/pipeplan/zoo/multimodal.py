"""LLaVA-1.5-7B: a vision transformer in front of a language model.

References:
    LLaVA-1.5: Liu et al. 2024, arXiv:2310.03744; the decoder is Vicuna-7B, which has the shape of
    Llama 2 7B (Touvron et al. 2023, arXiv:2307.09288).
    The vision encoder: CLIP ViT-L/14 at 336 pixels, Radford et al. 2021, arXiv:2103.00020.

Differs: all parts are trained; the original freezes the encoder. The chain has all 24 encoder
layers; the original computes them all, but reads the output of the last but one. The norm behind
the encoder (2,048 parameters) is left out, because the original does not use it.
"""

from collections.abc import Mapping
from types import MappingProxyType

from pipeplan.zoo.architecture import LOSS_BYTES, Architecture, LayerShape, Recipe
from pipeplan.zoo.blocks import feed_forward, layer_norm, self_attention
from pipeplan.zoo.hardware import Precision
from pipeplan.zoo.operations import (
    TOKEN_ID_BYTES,
    Operation,
    convolution,
    elementwise,
    embedding,
    linear,
)
from pipeplan.zoo.transformers import llama_decoder, llama_head

__all__ = ["RECIPES", "llava_7b"]

_IMAGE_SIZE = 336
_PATCH_SIZE = 14
_PATCHES = (_IMAGE_SIZE // _PATCH_SIZE) ** 2  # 576: what one image takes of the sequence


def llava_7b(tokens: int) -> Architecture:
    """Vision encoder, projector, decoder; the decoder sees `tokens`, of which 576 are the image.

    The text is embedded behind the projector. All cuts before that layer also carry the text's ids.
    """
    vision_width, width, vocabulary = 1024, 4096, 32_000
    text_tokens = tokens - _PATCHES
    text_ids = text_tokens * TOKEN_ID_BYTES
    vision_tokens = _PATCHES + 1  # and the class token
    vision_states = vision_tokens * vision_width
    pixels = 3 * _IMAGE_SIZE**2
    encoder = self_attention(vision_tokens, vision_width, 16, dropped=False) + feed_forward(
        vision_tokens, vision_width, 4096, dropped=False
    )
    decoder = llama_decoder(tokens, width, heads=32, key_value_heads=32, inner=11_008)
    hidden = _PATCHES * width
    projector = (
        linear(_PATCHES, vision_width, width),
        elementwise(hidden, hidden, kept=hidden),
        linear(_PATCHES, width, width),
    )
    layers = [
        LayerShape(
            name="vision.embed",
            operations=_patch_embedding(pixels, vision_width),
            output_elements=vision_states,
            passed_bytes=text_ids,
        ),
        *(
            LayerShape(
                name=f"vision.{index}",
                operations=encoder,
                output_elements=vision_states,
                passed_bytes=text_ids,
            )
            for index in range(24)
        ),
        LayerShape(
            name="projector", operations=projector, output_elements=hidden, passed_bytes=text_ids
        ),
        LayerShape(
            name="embed",
            operations=(
                embedding(text_tokens, vocabulary, width),
                elementwise(tokens * width, tokens * width),  # image and text joined
            ),
            output_elements=tokens * width,
        ),
        *(
            LayerShape(name=f"decoder.{index}", operations=decoder, output_elements=tokens * width)
            for index in range(32)
        ),
        LayerShape(name="head", operations=llama_head(tokens, width), passed_bytes=LOSS_BYTES),
    ]
    return Architecture(layers=tuple(layers), input_elements=pixels, input_id_bytes=text_ids)


def _patch_embedding(pixels: int, width: int) -> tuple[Operation, ...]:
    """Patches to vectors, a class token in front, learned positions, and CLIP's first norm."""
    states = (_PATCHES + 1) * width
    return (
        convolution(
            input_elements=pixels,
            output_elements=_PATCHES * width,
            input_channels=3,
            output_channels=width,
            kernel=(_PATCH_SIZE, _PATCH_SIZE),
            bias=False,
        ),
        Operation(parameters=width),  # the class token
        embedding(_PATCHES + 1, _PATCHES + 1, width),
        elementwise(2 * states, states),
        layer_norm(_PATCHES + 1, width),
    )


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "llava-7b": Recipe(
            describe=llava_7b,
            source="Liu et al. 2024, arXiv:2310.03744",
            device="A100",
            precision=Precision.BF16,
            microbatch_size=1,
            sequence_length=2048,
            shortest_sequence=_PATCHES + 1,
        ),
    }
)
"""The models with more than one kind of input, by name."""
