"""Runs the code around a chain's layers for each microbatch, without the layers.

Layers that are named one by one are called one after another, so a stage never runs the forward
that the model has itself. What that does between its layers would be lost. The comparison before
the first step sees what it does with a few rows; with more rows, other inputs, or later, it may do
more. So the first stage rehearses it: all layers return tokens, and compute nothing::

    a(x) -> token a      token a * 2                 refused: something between the layers is lost
                         if mask.any(): ...          real inputs decide as they would
                         if len(token a) > 3: ...    as many rows as the inputs have
                         if token a.max() > 3: ...   refused: a token has no values
                         print(token a.mean())       right: nothing comes of it (`tokens`)
    b(token a) -> token b                            right: it gets what the layer before returned

Tokens have the shapes that were seen before the first step, for as many rows as there are. If the
inputs have other shapes than then, nobody knows, and code that asks is refused.

A forward that `nn.Sequential` has itself does nothing between its layers, and is not rehearsed.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeplan.documents.text import printable
from pipeplan.errors import RuntimeMismatchError
from pipeplan.splitting.layout import Layout, LayoutKind
from pipeplan.splitting.nesting import put_tensors, take_tensors, tensors_in
from pipeplan.splitting.tokens import SHAPE, Token, Tokens
from pipeplan.splitting.torch_private import call_hooks, calling, count_changes

__all__ = ["Outline", "Outlines", "Rehearsal", "does_its_own", "outline", "shapes_of"]


@dataclass(frozen=True, slots=True)
class Outline:
    """What a layer returns, without values."""

    kinds: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    template: Any
    """The value with numbers in the place of tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlines:
    """What all layers return for some inputs."""

    of_layers: Mapping[bool, Sequence[Outline]]
    """In training and in evaluation."""
    inputs: tuple[tuple[int, ...], ...]
    """The shapes of the inputs."""

    def shape_of(
        self, shape: tuple[int, ...], inputs: tuple[tuple[int, ...], ...]
    ) -> tuple[int, ...] | None:
        """What becomes of a shape for inputs of other shapes; None if nobody knows."""
        if inputs == self.inputs:
            return shape
        if [each[1:] for each in inputs] != [each[1:] for each in self.inputs]:
            return None
        rows, before = {each[:1] for each in inputs}, {each[:1] for each in self.inputs}
        is_known = len(rows) == 1 and before == {shape[:1]}
        return (*rows.pop(), *shape[1:]) if is_known else None


GIVEN = "a tensor or an input"
REMEDY = (
    "layers named one by one are a chain, each called with what the one before returns, so that is"
    " lost, now or in a later step: put it into a layer"
)


def does_its_own(model: nn.Module, layout: Layout) -> bool:
    """Whether code that is not torch's own calls the layers of a chain."""
    if layout.kind is LayoutKind.LAYER_LIST:
        return False
    callers = [model.get_submodule(path) for path in layout.containers]
    forwards = {getattr(each.forward, "__func__", each.forward) for each in callers}
    has_hooks = any(table for each in callers for table in call_hooks(each))
    return has_hooks or forwards != {nn.Sequential.forward}


def outline(value: Any) -> Outline:
    """What is needed to make tokens of a value."""
    tensors, template = take_tensors(value, "model")
    kinds, shapes = (tensor.dtype for tensor in tensors), (tuple(t.shape) for t in tensors)
    return Outline(tuple(kinds), tuple(shapes), template)


def shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """The shapes of a model's inputs."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in([list(args), dict(kwargs)]))


class Rehearsal:
    """The forward of a model whose layers are a chain."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        standing: Callable[[str], Iterable[nn.Module]],
        outlines: Outlines,
    ) -> None:
        """`standing` gives all modules of a name: layers, and their stand-ins in some stages."""
        self._model, self._layout, self._outlines = model, layout, outlines
        self._is_off = False
        self._inputs: dict[int, tuple[int, torch.Tensor]] = {}
        """By id: how often each was changed in place."""
        self._given: set[int] = set()
        """The ids of all that the model was given, texts and arrays of numpy, too."""
        self._shapes: tuple[tuple[int, ...], ...] = ()
        self._tokens = Tokens(self._refuse)
        self.has_told = False
        """Whether it has said that code shows what is unknown."""
        self._passing: list[torch.Tensor] = []
        """The tokens that the layer before returned."""
        self._last, self._before = -1, "the model's input"
        self._plain: dict[tuple[bool, int], str] = {}
        """Arguments that are no tensors, by mode and layer: they were right in the first step."""
        atoms_of: dict[int, list[int]] = {}
        modules: dict[int, nn.Module] = {}
        for atom, name in enumerate(layout.atoms):
            for module in standing(name):
                modules[id(module)] = module
                atoms_of.setdefault(id(module), []).append(atom)
        self._calls: list[tuple[nn.Module, Callable[..., Any] | None]] = [
            (model.get_submodule(name), None) for name in layout.containers
        ]
        self._calls += [(module, self._stand_in(atoms_of[key])) for key, module in modules.items()]

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the forward with these inputs of a microbatch.

        Raises:
            RuntimeMismatchError: it does something between its layers.
        """
        if self._is_off:
            return
        self._inputs = {id(t): (count_changes(t), t) for t in tensors_in([args, dict(kwargs)])}
        self._given, self._shapes = _ids_in([*args, *kwargs.values()]), shapes_of(args, kwargs)
        self._passing, self._last, self._before = [], -1, "the model's input"
        try:
            with _lent(self._calls):
                output = self._model(*args, **kwargs)
            self._end(output)
            del output
            self._look_behind()
        except RuntimeMismatchError:
            raise
        except Exception as error:
            # The layers themselves raise if the inputs are wrong.
            self._is_off = True
            sys.stderr.write(
                "pipeplan: what the model's forward does between its layers cannot be looked at"
                f" without the layers, and is known of the first step only: {_line(error)}\n"
            )
        finally:
            self._inputs, self._passing = {}, []

    def _stand_in(self, atoms: Sequence[int]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            atom = next((atom for atom in atoms if atom > self._last), atoms[0])
            name = f"layer {printable(self._layout.atoms[atom])!r}"
            if atom != self._last + 1:
                missing = self._layout.atoms[min(self._last + 1, len(self._layout.atoms) - 1)]
                problem = (
                    f"calls {name} more than once, or out of order"
                    if atom <= self._last
                    else f"leaves out the layer {printable(missing)!r}"
                )
                raise RuntimeMismatchError(
                    f"model: its forward {problem}, for these inputs or since some step; a stage"
                    " calls each of its layers once, in the order of the plan"
                )
            self._look([*args, *kwargs.values()], name, may_be_input=True)
            self._look_at_plain(atom, name, (args, kwargs))
            self._last, self._before = atom, name
            known = self._outlines.of_layers[self._model.training][atom]
            self._passing = [
                self._tokens.make(kind, self._outlines.shape_of(shape, self._shapes))
                for kind, shape in zip(known.kinds, known.shapes, strict=True)
            ]
            return put_tensors(known.template, self._passing)

        return call

    def _refuse(self, name: str) -> RuntimeMismatchError:
        """What becomes of code that works on a token, by a function of this name."""
        did = "asks for the {} of" if name in SHAPE else "works by {} on"
        return RuntimeMismatchError(
            f"model: its forward {did.format(printable(repr(name)))} what {self._before} returns;"
            f" {REMEDY}"
        )

    def _look(self, values: Sequence[Any], text: str, *, may_be_input: bool) -> None:
        """Refuse tensors that did not come from the layer before, or from outside."""
        known = {id(token) for token in self._passing}
        for tensor in tensors_in(values):
            may_be = may_be_input or self._last < 0
            changes = self._inputs.get(id(tensor), (-1, None))[0] if may_be else -1
            is_given = not isinstance(tensor, Token) and changes == count_changes(tensor)
            if isinstance(tensor, Token) and tensor.made_by is not None:
                raise self._refuse(tensor.made_by)
            if id(tensor) not in known and not is_given:
                raise RuntimeMismatchError(
                    "model: its forward works by something else on what passes from"
                    f" {self._before} to {text}; {REMEDY}"
                )

    def _look_at_plain(self, atom: int, name: str, arguments: Any) -> None:
        """Refuse numbers, texts and the like that are others than in the first microbatch."""
        args, kwargs = arguments
        shown = repr([[self._shown(each) for each in args], self._shown({**kwargs})])
        before = self._plain.setdefault((self._model.training, atom), shown)
        if before != shown and " at 0x" not in shown:
            raise RuntimeMismatchError(
                f"model: its forward calls {name} with other arguments than in the first step"
                f" ({shown}, before {before}); {REMEDY}"
            )

    def _shown(self, value: Any) -> Any:
        """The value without tensors, and without what the model itself was given."""
        if isinstance(value, torch.Tensor) or id(value) in self._given:
            return GIVEN
        if isinstance(value, Mapping):
            return {key: self._shown(entry) for key, entry in value.items()}
        if isinstance(value, tuple | list):
            return [self._shown(entry) for entry in value]
        return value

    def _end(self, output: Any) -> None:
        if self._last + 1 < len(self._layout.atoms):
            missing = printable(self._layout.atoms[self._last + 1])
            raise RuntimeMismatchError(
                f"model: its forward leaves out the layer {missing!r}, for these inputs or since"
                " some step; a stage calls each of its layers once, in the order of the plan"
            )
        self._look([output], "the model's output", may_be_input=False)

    def _look_behind(self) -> None:
        """Refuse what was computed between layers and is kept; say that it is not shown."""
        if self._tokens.are_kept():
            raise RuntimeMismatchError(
                "model: its forward keeps something that it computes of what passes between its"
                f" layers; {REMEDY}"
            )
        if self._tokens.was_shown and not self.has_told:
            self.has_told = True
            sys.stderr.write(
                "pipeplan: the model's forward shows what passes between its layers; layers named"
                ' one by one are called without it, so it shows "(unknown)": show it in a layer\n'
            )


def _ids_in(values: Iterable[Any]) -> set[int]:
    """Those of nested values and of all their entries."""
    found: set[int] = set()
    for value in values:
        found.add(id(value))
        if isinstance(value, Mapping):
            found |= _ids_in(value.values())
        elif isinstance(value, tuple | list):
            found |= _ids_in(value)
    return found


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return printable(f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": "))


@contextmanager
def _lent(calls: Sequence[tuple[nn.Module, Callable[..., Any] | None]]) -> Iterator[None]:
    """Inside, calls of these modules are calls of these functions; None stands for their own."""
    kept = [calling(module, call) for module, call in calls]
    try:
        yield
    finally:
        for (module, _), before in zip(calls, kept, strict=True):
            calling(module, before)
