"""Parameters at the start and at the end of training.

At the start they are filled and made equal on all ranks that hold them. At the end they are
gathered on rank 0.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.gathering import READING_STATE, gather
from pipeplan.runtime.gradient_parts import Reduction

__all__ = [
    "LOSS_NAME",
    "add_loss_holders",
    "all_parameters",
    "find_loss_module",
    "find_reductions",
    "first_names",
    "gather_state",
    "make_groups",
    "materialise",
    "require_initialised",
    "require_own_parameters",
    "share_initial_values",
    "share_statistics",
]


LOSS_NAME = "loss_fn"
"""The name of a loss module with parameters, beside the model's modules."""


def find_loss_module(model: nn.Module, loss_fn: Any) -> nn.Module | None:
    """The loss, if it is a module with tensors of its own; None otherwise.

    Raises:
        RuntimeMismatchError: it holds a module of the model.
    """
    if not isinstance(loss_fn, nn.Module) or not [*loss_fn.parameters(), *loss_fn.buffers()]:
        return None
    known = {id(module) for module in model.modules()}
    if id(loss_fn) in known:
        return None  # it is a part of the model, and has a name there
    for name, module in loss_fn.named_modules():
        if id(module) in known:
            raise RuntimeMismatchError(
                f"loss_fn: its module {name!r} is a part of the model, which the last stage may not"
                " hold; let the model return what the loss needs"
            )
    if hasattr(model, LOSS_NAME):
        raise RuntimeMismatchError(
            f"loss_fn: has parameters, and the model has something else called {LOSS_NAME!r};"
            " rename that"
        )
    return loss_fn


def first_names(model: nn.Module, loss_module: nn.Module | None = None) -> dict[str, str]:
    """For every name of a parameter, the first name of the same tensor."""
    first_of: dict[int, str] = {}
    return {
        name: first_of.setdefault(id(parameter), name)
        for name, parameter in all_parameters(model, loss_module)
    }


def add_loss_holders(
    held_by: dict[str, set[int]], model: nn.Module, loss_module: nn.Module | None, last: int
) -> None:
    """Add the last stage to the stages that hold the loss module's parameters."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in all_parameters(model, loss_module):
        names_of.setdefault(id(parameter), []).append(name)
    for name, parameter in loss_module.named_parameters() if loss_module is not None else ():
        names = names_of[id(parameter)]
        stages = set().union({last}, *(held_by.get(other, set()) for other in names))
        held_by.update(dict.fromkeys([*names, f"{LOSS_NAME}.{name}"], stages))


def all_parameters(
    model: nn.Module, loss_module: nn.Module | None
) -> list[tuple[str, nn.Parameter]]:
    """Every parameter by every name that it has; those of the loss module come last."""
    found = list(model.named_parameters(remove_duplicate=False))
    if loss_module is not None:
        found += loss_module.named_parameters(LOSS_NAME, remove_duplicate=False)
    return found


def require_own_parameters(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
) -> None:
    """Refuse an optimizer of parameters that it was not given."""
    own = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise RuntimeMismatchError(
                    "optimizer_fn: its optimizer holds a parameter of shape"
                    f" {tuple(parameter.shape)} that it was not given; use its argument alone, and"
                    " make parameters of the loss a part of the model or of a loss module"
                )


def require_initialised(model: nn.Module) -> None:
    """Refuse parameters that get their shape in the first forward."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise RuntimeMismatchError(
                f"model: its parameter {name!r} has no shape yet; run one batch through the model"
                " before you give it to the pipeline"
            )


def make_groups(
    held_by: Mapping[str, set[int]], stage_ranks: Sequence[Sequence[int]]
) -> dict[frozenset[int], Any]:
    """A group of ranks for each set of stages that hold a parameter; all ranks have to call it.

    It is None for stages on a single rank. Each stage has one, too. Stages on the same ranks share
    theirs.
    """
    sets: list[tuple[int, ...]] = [(stage,) for stage in range(len(stage_ranks))]
    sets += sorted({tuple(sorted(stages)) for stages in held_by.values() if len(stages) > 1})
    made: dict[tuple[int, ...], Any] = {}
    found = {}
    for stages in sets:
        ranks = tuple(sorted({rank for stage in stages for rank in stage_ranks[stage]}))
        if ranks not in made:
            made[ranks] = dist.new_group(ranks) if len(ranks) > 1 else None
        found[frozenset(stages)] = made[ranks]
    return found


def find_reductions(
    named: Mapping[str, nn.Parameter],
    held_by: Mapping[str, set[int]],
    first_name_of: Mapping[str, str],
    groups: Mapping[frozenset[int], Any],
    own_stages: Collection[int],
    ends: Sequence[int],
    num_buckets: Sequence[int],
) -> list[Reduction]:
    """The groups of ranks over which the gradients of one rank's parameters are summed.

    `ends` has for each stage of the plan the position of the block with which its gradients are
    done, `num_buckets` in how many parts they are summed. Reductions are in the order in which
    their last stages are done, on whatever rank. So ranks that have several in common have these in
    one order, though they may end their own stages in another one.
    """
    members: dict[frozenset[int], dict[str, nn.Parameter]] = {}
    for name, parameter in named.items():
        members.setdefault(frozenset(held_by[name]), {})[name] = parameter
    found: list[tuple[tuple[int, bool, list[int]], Reduction]] = []
    for stages, named_here in members.items():
        if groups[stages] is None:
            continue
        own = stages.intersection(own_stages)
        parameters = list(named_here.values())
        if len(stages) > 1:
            # Stages may know a shared tensor by different names. Its first name orders all alike.
            shared = {first_name_of[name]: parameter for name, parameter in named_here.items()}
            parameters = [shared[first_name] for first_name in sorted(shared)]
        most = max(num_buckets[stage] for stage in stages)
        reduction = Reduction(
            parameters=parameters,
            group=groups[stages],
            stages=own,
            num_parts=most,
        )
        end = max(ends[stage] for stage in stages)
        found.append(((end, len(stages) > 1, sorted(stages)), reduction))
    return [reduction for _, reduction in sorted(found, key=lambda each: each[0])]


def materialise(
    model: nn.Module, device: torch.device, init_fn: Callable[[nn.Module], None] | None
) -> None:
    """Put a stage's modules on their device; `init_fn` fills what was on the meta device."""
    made: dict[int, Any] = {}  # so that a tensor with two names stays one tensor
    for module in model.modules():
        held = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in held:
            if not tensor.is_meta:
                continue
            if id(tensor) not in made:
                empty: Any = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                made[id(tensor)] = (empty, tensor)  # keep the old one, so that its id stays taken
            setattr(module, name, made[id(tensor)][0])
    if made and init_fn is None:
        raise RuntimeMismatchError(
            "model: is on the meta device and has no values; give init_fn, which fills them"
        )
    model.to(device)
    if made and init_fn is not None:
        init_fn(model)


def share_initial_values(
    model: nn.Module, group: Any, ranks: Sequence[int], reductions: Sequence[Reduction]
) -> None:
    """Give all ranks that hold a tensor the values of the first of them."""
    with torch.no_grad():
        if len(ranks) > 1:
            for tensor in [*model.parameters(), *model.buffers()]:
                _broadcast(tensor, ranks[0], group)
        for reduction in reductions:
            first = min(dist.get_process_group_ranks(reduction.group))
            for parameter in reduction.parameters:
                _broadcast(parameter, first, reduction.group)


def share_statistics(model: nn.Module, group: Any, ranks: Sequence[int]) -> None:
    """Give all replicas the running means of the first, which count as the model's."""
    if len(ranks) > 1:
        with torch.no_grad():
            for buffer in model.buffers():
                _broadcast(buffer, ranks[0], group)


def _broadcast(tensor: torch.Tensor, source: int, group: Any) -> None:
    values = tensor.detach().contiguous()
    dist.broadcast(values, source, group=group)
    tensor.detach().copy_(values)


def gather_state(state: dict[str, Any], device: torch.device) -> dict[str, Any] | None:
    """The tensors of all ranks on rank 0, sent one by one; None elsewhere.

    What modules add that is no tensor (`get_extra_state`) goes with their names.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    others = {name: value for name, value in state.items() if not torch.is_tensor(value)}
    state = {name: value for name, value in state.items() if torch.is_tensor(value)}
    kinds = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()]
    all_kinds = gather((kinds, others), READING_STATE)
    if rank:
        for tensor in state.values():
            dist.send(tensor.detach().contiguous(), 0)
        return None
    whole: dict[str, Any] = {name: t.detach().cpu().clone() for name, t in state.items()}
    whole |= others
    for source in range(1, num_ranks):
        kinds, others = all_kinds[source]
        whole |= others
        for name, shape, dtype in kinds:
            received = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(received, source)
            whole[name] = received.cpu()
    return whole
