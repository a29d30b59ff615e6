"""Which layers of a model are its embedding, its blocks and its head, by their names.

Recognised are the names of the zoo (`embed`, `decoder.3`, `head`), of Hugging Face models
(`model.embed_tokens`, `model.layers.3`, `transformer.h.3`, `lm_head`) and of torch's profiler
(`GPT2Block_3`). Anything else needs a map.
"""

import re
from collections.abc import Mapping
from enum import StrEnum

from pipeplan.documents.text import excerpt
from pipeplan.errors import InputError
from pipeplan.interop.exported import CannotExport
from pipeplan.profile import ModelProfile

__all__ = ["Role", "layer_roles"]


class Role(StrEnum):
    """What a layer is to a transformer."""

    EMBEDDING = "embedding"
    BLOCK = "decoder"
    HEAD = "loss"


BLOCK = re.compile(
    r"(?P<stack>(?:.*[._])?(?:\w*(?:layers?|blocks?|encoder|decoder)|h))[._](?P<number>[0-9]+)"
)
EMBEDDING = re.compile(r"(?:.*[._])?(?:\w*embed\w*|wte|wpe|drop(?:out)?|rotary\w*)(?:[._][0-9]+)?")
HEAD = re.compile(
    r"(?:.*[._])?(?:\w*head|\w*norm|ln_f|output|loss|logits|classifier|pooler|cls|score|linear)"
    r"(?:[._][0-9]+)?"
)
LONGEST_NAME = 200
"""Longer names are not recognised."""
REMEDY = "give --map with 'embedding', 'decoder' or 'loss' for each such layer"


def layer_roles(
    model: ModelProfile, layer_map: Mapping[str, str | tuple[str, ...]]
) -> tuple[Role, ...]:
    """The role of each layer; refused unless it is embeddings, then blocks, then heads."""
    known = {layer.name for layer in model.layers}
    for name in layer_map:
        if name not in known:
            raise InputError(f"map: {excerpt(name)} is no layer of the model")
    names = [layer.name for layer in model.layers]
    stacks = [_stack_of(name) for name in names]
    given = [_given(layer_map.get(name)) for name in names]
    _require_one_stack([s for s, role in zip(stacks, given, strict=True) if s and role is None])
    is_block = [
        role is Role.BLOCK if role is not None else stack is not None
        for role, stack in zip(given, stacks, strict=True)
    ]
    if not any(is_block):
        raise CannotExport(f"no layer looks like a block of a transformer; {REMEDY}")
    first, last = is_block.index(True), len(names) - 1 - is_block[::-1].index(True)
    roles = []
    for index, name in enumerate(names):
        expected = Role.EMBEDDING if index < first else Role.HEAD if index > last else Role.BLOCK
        if given[index] is not None:
            actual = given[index]
        elif expected is Role.BLOCK:
            actual = Role.BLOCK if is_block[index] else None
        else:
            pattern = EMBEDDING if expected is Role.EMBEDDING else HEAD
            fits = len(name) <= LONGEST_NAME and pattern.fullmatch(name.lower())
            actual = expected if fits else None
        if actual is not expected:
            raise CannotExport(
                f"layer {excerpt(name)} is {actual or 'unknown'}, where the {expected} is expected;"
                f" {REMEDY}"
            )
        roles.append(expected)
    return tuple(roles)


def _given(entry: str | tuple[str, ...] | None) -> Role | None:
    return Role(entry) if isinstance(entry, str) else None


def _stack_of(name: str) -> str | None:
    """The name of the list that a block belongs to, or None for other layers."""
    match = BLOCK.fullmatch(name.lower()) if len(name) <= LONGEST_NAME else None
    return match["stack"] if match else None


def _require_one_stack(stacks: list[str]) -> None:
    found = list(dict.fromkeys(stacks))
    if len(found) > 1:
        raise CannotExport(
            f"the model has two stacks of blocks, {excerpt(found[0])} and {excerpt(found[1])},"
            " and one is expected"
        )
