"""What pipeplan uses of torch without a public, documented way; nothing private stands elsewhere.

Each name has a test of its own in `tests/runtime/test_torch_private.py`. If a new torch changes
one, that test fails and says which.
"""

import ctypes
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.autograd import graph
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "CONNECTION_WORDS",
    "TESTED_VERSIONS",
    "FakeCopyMode",
    "FakeTensorMode",
    "QuickDispatchMode",
    "TorchDispatchMode",
    "call_hooks",
    "calling",
    "count_changes",
    "count_flops",
    "count_hooks",
    "count_step_hooks",
    "default_store",
    "gradient_hooks",
    "is_about_values",
    "is_fake",
    "make_wrapper",
    "makes_views",
    "run_backward",
    "saves_tensors",
    "storage_key",
    "watch_steps",
    "without_fake_log",
    "without_torch_log",
]

TESTED_VERSIONS = ("2.13.0",)
"""The versions of torch that these names were tested with."""

CONNECTION_WORDS = ("gloo", "connection", "nccl", "socket", "broken pipe")
"""Words in the text of a RuntimeError or OSError that come from a broken connection.

gloo and NCCL have no exception class for it.
"""


def default_store() -> Any:
    """The store by which the ranks of the default process group have found each other."""
    world: Any = dist.group.WORLD
    return world.get_group_store()  # public by its name, but not documented


def count_changes(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; autograd counts it."""
    return tensor._version


def gradient_hooks(tensor: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """The hooks of a leaf: those that change a gradient, and those behind its accumulation."""
    before = getattr(tensor, "_backward_hooks", None) or {}
    behind = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    return list(before.values()), list(behind.values())


class QuickDispatchMode(TorchDispatchMode):
    """A mode that takes half the time for each operation.

    Torch wraps `__torch_dispatch__` so that its compiler looks at nothing inside. Here nothing is
    compiled inside of the mode, and compiled layers run as they are, as in other modes.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Any:
        """Begin with it."""
        self._stance = torch.compiler.set_stance("force_eager")
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Let torch compile again."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stance.__exit__(None, None, None)


def count_hooks(tensor: torch.Tensor) -> int:
    """How many such hooks a leaf has; this is asked in every step."""
    before, behind = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return (len(before) if before else 0) + (len(behind) if behind else 0)


def count_step_hooks(optimizer: torch.optim.Optimizer) -> int:
    """How many hooks an optimizer calls before it steps."""
    return len(getattr(optimizer, "_optimizer_step_pre_hooks", ()))


def watch_steps(optimizer: torch.optim.Optimizer, hook: Any) -> None:
    """Call a hook in front of each step.

    Optimizers that wrap another one may leave out torch's own set-up. They have no hooks.
    """
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        optimizer.register_step_pre_hook(hook)


def call_hooks(module: nn.Module) -> tuple[Any, ...]:
    """The tables of a module's hooks that its call runs, forward and backward; they stay its."""
    return (
        *(module._forward_hooks, module._forward_pre_hooks),
        *(module._backward_hooks, module._backward_pre_hooks),
    )


def calling(module: nn.Module, function: Any) -> Any:
    """Let calls of a module be calls of a function, past its hooks; returns what was so before.

    With None, a module runs its own forward and hooks. `nn.Module.compile` uses the same place.
    """
    before = vars(module).pop("_compiled_call_impl", None)
    if function is not None:
        vars(module)["_compiled_call_impl"] = function
    return before


def run_backward(roots: list[Any], gradients: list[torch.Tensor]) -> None:
    """As `torch.autograd.backward`: add up the gradients of all leaves.

    Its look at shapes takes longer than the backward of a small layer. Where plain tensors get
    gradients of the same shapes and types, there is nothing to find out. The engine looks, too.
    """
    are_plain = all(
        type(root) is type(gradient) is torch.Tensor
        and root.shape == gradient.shape
        and root.dtype is gradient.dtype
        and root.device == gradient.device
        for root, gradient in zip(roots, gradients, strict=True)
    )
    if not are_plain or torch._C._are_functorch_transforms_active():
        torch.autograd.backward(roots, gradients)
        return
    graph._engine_run_backward(
        *(tuple(roots), tuple(gradients), False, False, ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def make_wrapper(kind: type[torch.Tensor], like: torch.Tensor, device: torch.device) -> Any:
    """A tensor of a class with a dispatch of its own: the shape of `like`, and no memory."""
    return torch.Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=like.dtype, device=device
    )


def storage_key(tensor: torch.Tensor) -> int:
    """The memory of a tensor, by number; fake tensors have one without an address."""
    return int(tensor.untyped_storage()._cdata)


def is_about_values(error: BaseException) -> bool:
    """Whether an operation on fake tensors has failed since they have no values."""
    return isinstance(
        error,
        fake_tensor.DataDependentOutputException | fake_tensor.DynamicOutputShapeException,
    )


@contextmanager
def without_fake_log() -> Iterator[None]:
    """Inside, torch does not log stack traces of operations that fail on fake tensors."""
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values, since torch only computes its shape."""
    return isinstance(tensor, FakeTensor)


_SAVES: dict[type, bool] = {}
"""Whether nodes of a type save tensors."""


def saves_tensors(node: Any) -> bool:
    """Whether a node of autograd's graph is of a kind that saves tensors in the forward."""
    found = _SAVES.get(type(node))
    if found is None:
        found = any(name.startswith("_raw_saved_") for name in dir(type(node)))
        _SAVES[type(node)] = found
    return found


def count_flops(func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> float | None:
    """The FLOPs of an operation of torch by torch's own formulas; None if it has none."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(func._overloadpacket)
    return None if formula is None else float(formula(*args, **kwargs, out_val=output))


def makes_views(func: Any) -> bool:
    """Whether an operation of torch only makes views of its arguments."""
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in func._schema.returns
    )


FATAL_LEVEL = 3
"""torch's C++ code logs only what ends the process."""
_QUIET = threading.Lock()
_LEVELS: list[int] = []
"""The level before, once for each thread that wants no log."""


@contextmanager
def without_torch_log() -> Iterator[None]:
    """Inside, torch's C++ code logs neither warnings nor errors, on any thread.

    A store that is gone would fill the screen with stack traces, though it raises an error, too.
    """
    level = _log_level()
    with _QUIET:
        _LEVELS.append(_LEVELS[0] if _LEVELS else level.value)
        level.value = max(FATAL_LEVEL, _LEVELS[0])
    try:
        yield
    finally:
        with _QUIET:
            before = _LEVELS.pop()
            if not _LEVELS:
                level.value = before


@cache
def _log_level() -> ctypes.c_int:
    """What TORCH_CPP_LOG_LEVEL sets; if torch has no such number, one without effect."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return ctypes.c_int(FATAL_LEVEL)
