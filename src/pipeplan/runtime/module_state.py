"""What modules remember between two forwards: buffers and attributes, saved and put back.

Recomputation runs a forward twice. The second run has to begin with what the first one began with,
and must not count again: running means, the vectors of a spectral norm, counters, moving averages.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeplan.runtime.memories import Memory, is_iterator, mark_of, memory_of

__all__ = ["OF_EVERY_MODULE", "Contents", "ModuleState"]

MOST_DEPTH = 4
"""How deep containers are looked into."""
MOST_OBJECTS = 10_000
"""How many containers are saved."""
NO_STATE = ("torch", "numpy", "transformers", "builtins", "types", "functools")
"""Packages whose objects are not looked into."""

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that torch itself keeps in each module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """The state of one module."""

    module: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    contents: "Contents"
    """What lists, dicts and other objects among the attributes hold."""
    values: list[tuple[torch.Tensor, torch.Tensor]]
    """Tensors that may change in place, each with a copy."""

    def is_changed(self) -> bool:
        """Whether the module now has another state."""
        now = _attributes(self.module)
        if now.keys() != self.attributes.keys() or any(
            now[name] is not value and not _are_equal(now[name], value)
            for name, value in self.attributes.items()
        ):
            return True
        if _ids(_buffers(self.module)) != _ids(self.buffers):
            return True
        if self.contents.is_changed():
            return True
        return any(not _have_equal_values(tensor, copy) for tensor, copy in self.values)

    def changed_numbers(self) -> list[str]:
        """The names of buffers and of numbers among the attributes that have other values now."""
        copy_of = {id(tensor): copy for tensor, copy in self.values}
        found = [
            name
            for name, buffer in _buffers(self.module).items()
            if id(buffer) not in copy_of or not _have_equal_values(buffer, copy_of[id(buffer)])
        ]
        return found + [
            name
            for name, value in _attributes(self.module).items()
            if isinstance(value, int | float) and not _are_equal(value, self._before(name))
        ]

    def _before(self, name: str) -> Any:
        """What an attribute was; that of the class, if the module had none of its own."""
        return self.attributes.get(name, getattr(type(self.module), name, None))

    def put_back(self) -> None:
        """Give the module this state."""
        attributes = vars(self.module)
        for name in _attributes(self.module).keys() - self.attributes.keys():
            del attributes[name]
        attributes.update(self.attributes)
        for name in _buffers(self.module).keys() - self.buffers.keys():
            delattr(self.module, name)
        for name, tensor in self.buffers.items():
            if _buffers(self.module).get(name) is not tensor:
                setattr(self.module, name, tensor)
        self.contents.put_back()
        for tensor, copy in self.values:
            if not _have_equal_values(tensor, copy):
                tensor.data.copy_(copy)


class Contents:
    """What containers and plain objects hold, one inside of another, at one moment."""

    def __init__(self) -> None:
        self._containers: list[tuple[Any, Any]] = []
        """Lists, dicts, sets, deques and attributes of objects, each with a copy."""
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._seen: set[int] = set()
        self._of_objects: list[tuple[Any, Any]] = []
        """Those of the containers that are attributes of objects."""
        self._memories: list[Memory] = []
        """Other things that can be changed in place and put back."""
        self._iterators: list[tuple[Any, Any]] = []
        """What cannot be put back, each with a mark that tells whether it has moved."""

    def add(self, values: Iterable[Any], depth: int = 0) -> None:
        """Save what these values hold."""
        for value in values:
            if id(value) in self._seen or depth > MOST_DEPTH or len(self._seen) > MOST_OBJECTS:
                continue
            container = _container(value)
            if container is not None:
                self._seen.add(id(value))
                self._containers.append((container, container.copy()))
                if container is not value:
                    self._of_objects.append(self._containers[-1])
                inside = container.values() if isinstance(container, dict) else container
                self.add(list(inside), depth + 1)
            elif isinstance(value, torch.Tensor) and value.is_leaf and not value.is_meta:
                self._seen.add(id(value))
                if depth and not isinstance(value, nn.Parameter):
                    self._values.append((value, value.detach().clone()))
            else:
                self._add_other(value, depth)

    def _add_other(self, value: Any, depth: int) -> None:
        memory = memory_of(value)
        if memory is not None:
            self._seen.add(id(value))
            self._memories.append(memory)
            self.add(memory.inside(), depth + 1)
        elif is_iterator(value):
            self._seen.add(id(value))
            self._iterators.append((value, mark_of(value)))

    def is_changed(self) -> bool:
        """Whether something holds other values now."""
        return (
            any(not _hold_the_same(*pair) for pair in self._containers)
            or any(not _have_equal_values(*pair) for pair in self._values)
            or any(memory.is_changed() for memory in self._memories)
        )

    def have_objects_changed(self) -> bool:
        """Whether an object has other attributes now, or something else that cannot be sent."""
        return any(not _hold_the_same(*pair) for pair in self._of_objects) or any(
            memory.is_changed() for memory in self._memories if not memory.can_be_sent
        )

    def moved(self) -> list[str]:
        """The classes of iterators that have moved on; nothing can put them back."""
        return [type(value).__name__ for value, mark in self._iterators if mark_of(value) != mark]

    def have_changed_beyond_logs(self) -> bool:
        """Whether something holds other values now; lists that have only grown are logs."""
        return (
            any(
                not _hold_the_same(container, copy) and not _has_grown(container, copy)
                for container, copy in self._containers
            )
            or any(not _have_equal_values(*pair) for pair in self._values)
            or any(memory.is_changed() for memory in self._memories)
        )

    def put_back(self) -> None:
        """Let all hold what they held."""
        for container, copy in self._containers:
            if not _hold_the_same(container, copy):
                container.clear()
                is_dict = isinstance(container, dict | set)
                container.update(copy) if is_dict else container.extend(copy)
        for tensor, copy in self._values:
            if not _have_equal_values(tensor, copy):
                tensor.data.copy_(copy)
        for memory in self._memories:
            if memory.is_changed():
                memory.put_back()


def _container(value: Any) -> Any:
    """The value if it is a container, its attributes if it is a plain object; else None."""
    if type(value) in (list, dict, set, deque, OrderedDict, defaultdict, Counter):
        return value
    kind = type(value)
    if kind.__module__.partition(".")[0] in NO_STATE or isinstance(value, nn.Module | type):
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if type(attributes) is dict and not callable(value) else None


class ModuleState:
    """The state of some modules at one moment."""

    def __init__(self, modules: Iterable[nn.Module], *, parameters: bool = False) -> None:
        self._saved = [_save(module, parameters=parameters) for module in modules]

    def changed(self) -> list[nn.Module]:
        """The modules that have another state now."""
        return [saved.module for saved in self._saved if saved.is_changed()]

    def changed_numbers(self, roots: Mapping[str, nn.Module]) -> list[str]:
        """By their names: buffers and numbers that have other values now.

        `roots` are the modules that hold all others, each with what its names begin with.
        """
        prefix_of = {
            id(module): f"{name}." * bool(name)
            for prefix, root in roots.items()
            for name, module in root.named_modules(prefix=prefix)
        }
        return [
            f"{prefix_of.get(id(saved.module), '')}{name}"
            for saved in self._saved
            for name in saved.changed_numbers()
        ]

    def have_objects_changed(self) -> bool:
        """Whether objects that modules hold have other attributes now."""
        return any(saved.contents.have_objects_changed() for saved in self._saved)

    def moved(self, model: nn.Module) -> list[str]:
        """Iterators that have moved on and cannot be put back, by the modules that hold them."""
        name_of = {id(module): name for name, module in model.named_modules()}
        return [
            f"module {name_of.get(id(saved.module), '')!r}: holds a {kind}"
            for saved in self._saved
            for kind in saved.contents.moved()
        ]

    def restrict(self, modules: Iterable[nn.Module]) -> None:
        """Forget the state of all other modules."""
        kept = {id(module) for module in modules}
        self._saved = [saved for saved in self._saved if id(saved.module) in kept]

    def put_back(self) -> None:
        """Give all these modules the state that they had."""
        for saved in self._saved:
            saved.put_back()


def _save(module: nn.Module, *, parameters: bool) -> _Saved:
    attributes, buffers = _attributes(module), _buffers(module)
    contents = Contents()
    contents.add(attributes.values())
    # Backwards that sum gradients by themselves keep them there (`weight.main_grad`).
    contents.add(vars(tensor) for tensor in (*module.parameters(recurse=False), *buffers.values()))
    tensors = [
        *buffers.values(),
        *(value for value in attributes.values() if isinstance(value, torch.Tensor)),
    ]
    if parameters:
        tensors += module.parameters(recurse=False)
    return _Saved(
        module=module,
        attributes=attributes,
        buffers=buffers,
        contents=contents,
        values=[
            (tensor, tensor.detach().clone())
            for tensor in tensors
            if tensor.is_leaf and not tensor.is_meta
        ],
    )


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}


def _buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


def _ids(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: id(tensor) for name, tensor in tensors.items()}


def _are_equal(first: Any, second: Any) -> bool:
    """Whether two plain values are equal; anything else counts as different."""
    plain = (bool, int, float, str, bytes)
    return type(first) is type(second) and isinstance(first, plain) and first == second


def _hold_the_same(container: Any, copy: Any) -> bool:
    if len(container) != len(copy):
        return False
    if isinstance(container, dict):
        return all(
            name in copy and (value is copy[name] or _are_equal(value, copy[name]))
            for name, value in container.items()
        )
    if isinstance(container, set):
        return bool(container == copy)
    pairs = zip(container, copy, strict=True)
    return all(first is second or _are_equal(first, second) for first, second in pairs)


def _has_grown(container: Any, copy: Any) -> bool:
    is_list = isinstance(container, list | deque)
    return is_list and _hold_the_same(list(container)[: len(copy)], list(copy))


def _have_equal_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are the same bit by bit; NaN equals NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(first, second) or torch.allclose(
        first.detach(), second, rtol=0.0, atol=0.0, equal_nan=True
    )
