"""Which stages hold which tensors of a model."""

from collections.abc import Sequence

from torch import nn

from pipeplan.splitting.layout import BEFORE, Layout, LayoutKind, find_sides

__all__ = ["holders", "stages_with"]


def holders(model: nn.Module, layout: Layout, stages: Sequence[range]) -> dict[str, set[int]]:
    """For every parameter, by name, the stages that hold it.

    A tensor with two names (tied weights) appears under both; both list the stages of both.
    """
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    atoms_of_stage = [layout.atoms_in(layers) for layers in stages]
    found: dict[str, set[int]] = {}
    for names in names_of.values():
        stages_of = {
            stage
            for stage, atoms in enumerate(atoms_of_stage)
            for name in names
            if _is_held(model, layout, atoms, name)
        }
        found.update(dict.fromkeys(names, stages_of))
    return found


def stages_with(
    model: nn.Module, layout: Layout, stages: Sequence[range], tensor_name: str
) -> set[int]:
    """The stages that hold a tensor of this name: a parameter, a buffer or an attribute."""
    return {
        stage
        for stage, layers in enumerate(stages)
        if _is_held(model, layout, layout.atoms_in(layers), tensor_name)
    }


def _is_held(model: nn.Module, layout: Layout, atoms: range, parameter_name: str) -> bool:
    for atom in atoms:
        if parameter_name.startswith(f"{layout.atoms[atom]}."):
            return True
    if layout.kind is not LayoutKind.LAYER_LIST:
        return False
    if parameter_name.startswith(f"{layout.list_name}."):
        return False
    for name, side in find_sides(model, layout.list_name).items():
        if parameter_name.startswith(f"{name}."):
            return (0 if side == BEFORE else len(layout.atoms) - 1) in atoms
    return True  # a parameter of the model itself: all stages hold it
