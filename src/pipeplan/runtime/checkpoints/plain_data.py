"""Nested data as JSON and tensors, and back: nothing else is saved, so nothing is executed.

Dicts with text keys, lists, texts, numbers, booleans and None are JSON as they are. Other kinds
become an object with one key::

    {"$tensor": "name of a tensor"}     {"$tuple": [...]}     {"$dict": [[key, value], ...]}
    {"$float": "nan"}                   {"$counter": [[key, count], ...]}
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from pipeplan.documents.text import excerpt
from pipeplan.errors import CheckpointError

__all__ = ["decode", "encode"]

MAX_DEPTH = 50
MAX_INT_BITS = 4096
MARK = "$"
FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

KeepTensor = Callable[[str, torch.Tensor], str]
"""Keeps a tensor that stands at a place, and returns the name to find it by."""


def encode(value: Any, where: str, keep: KeepTensor, depth: int = 0) -> Any:
    """The value as JSON; its tensors go to `keep`.

    Raises:
        CheckpointError: something in it is neither plain data nor a tensor; the place is named.
    """
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{where}: is nested deeper than {MAX_DEPTH} levels")
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        if value.bit_length() > MAX_INT_BITS:
            raise CheckpointError(f"{where}: is an integer of {value.bit_length():,} bits")
        return value
    if isinstance(value, float):  # those of numpy are floats, too
        number = float(value)
        return number if math.isfinite(number) else {"$float": str(number)}
    if isinstance(value, torch.Tensor):
        return {"$tensor": keep(where, value)}
    if type(value) in (list, tuple):
        entries = [encode(entry, f"{where}[{i}]", keep, depth + 1) for i, entry in enumerate(value)]
        return entries if type(value) is list else {"$tuple": entries}
    if type(value) in (dict, OrderedDict, Counter):
        return _encode_mapping(value, where, keep, depth)
    kind = type(value)
    raise CheckpointError(
        f"{where}: is a {kind.__module__}.{kind.__qualname__}; only plain data (numbers, texts,"
        " lists, tuples, dicts) and tensors are saved"
    )


def _encode_mapping(value: dict[Any, Any], where: str, keep: KeepTensor, depth: int) -> Any:
    is_counter = type(value) is Counter
    if not is_counter and all(type(k) is str and not k.startswith(MARK) for k in value):
        return {k: encode(v, f"{where}[{k!r}]", keep, depth + 1) for k, v in value.items()}
    pairs = []
    for key, entry in value.items():
        if isinstance(key, torch.Tensor):
            raise CheckpointError(f"{where}: has a tensor as a key")
        pairs.append(
            [
                encode(key, f"a key of {where}", keep, depth + 1),
                encode(entry, f"{where}[{excerpt(key)}]", keep, depth + 1),
            ]
        )
    return {"$counter" if is_counter else "$dict": pairs}


def decode(tree: Any, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """The value that was encoded; `tensor_of` finds a tensor by its name.

    Raises:
        ValueError: the JSON is not such a value.
    """
    if isinstance(tree, list):
        return [decode(entry, tensor_of) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    marks = [key for key in tree if key.startswith(MARK)]
    if not marks:
        return {key: decode(entry, tensor_of) for key, entry in tree.items()}
    try:
        ((mark, content),) = tree.items()
        if mark == "$tensor":
            return tensor_of(content)
        if mark == "$float":
            return FLOATS[content]
        if mark == "$tuple" and isinstance(content, list):
            return tuple(decode(entry, tensor_of) for entry in content)
        pairs = {decode(key, tensor_of): decode(entry, tensor_of) for key, entry in content}
        return {"$dict": dict, "$counter": Counter}[mark](pairs)
    except (KeyError, TypeError):
        raise ValueError(f"{excerpt(tree)} is no value of a checkpoint") from None
