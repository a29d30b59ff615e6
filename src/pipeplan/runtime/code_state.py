"""What a model's code remembers outside of its modules, saved and put back.

The variables are those of `code_variables`. Values are saved and put back as for modules.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from pipeplan.runtime.code_variables import MISSING, Variable, find_kept
from pipeplan.runtime.module_state import Contents, ModuleState

__all__ = ["CodeState", "KeptState"]


class CodeState:
    """Some variables at one moment."""

    def __init__(self, variables: Iterable[Variable]) -> None:
        self._saved: list[tuple[Variable, Any, Contents]] = []
        for variable in variables:
            value, contents = variable.get(), Contents()
            if value is not MISSING:
                contents.add([value])
                self._saved.append((variable, value, contents))

    @classmethod
    def of(cls, modules: Iterable[nn.Module], functions: Iterable[Any] = ()) -> "CodeState":
        """The variables of these modules' code, and of these functions."""
        return cls(find_kept(modules, functions))

    def changed(self) -> list[Variable]:
        """The variables that hold something else now; lists that have only grown are logs."""
        return [
            variable
            for variable, value, contents in self._saved
            if contents.have_changed_beyond_logs()
            or (variable.get() is not value and repr(variable.get()) != repr(value))
        ]

    def restrict(self, variables: Iterable[Variable]) -> None:
        """Forget all others."""
        kept = {id(variable) for variable in variables}
        self._saved = [saved for saved in self._saved if id(saved[0]) in kept]

    def put_back(self) -> None:
        """Give all these variables the values that they had."""
        for variable, value, contents in self._saved:
            if variable.get() is not value:
                variable.set(value)
            contents.put_back()


@dataclass(frozen=True, slots=True)
class KeptState:
    """What modules and their code remember at one moment."""

    of_modules: ModuleState
    of_code: CodeState

    @classmethod
    def now(
        cls,
        model: nn.Module,
        functions: Iterable[Any],
        only: tuple[list[nn.Module], list[Variable]] | None,
    ) -> "KeptState":
        """Of a model and its functions, or of these modules and variables `only`."""
        if only is not None:
            return cls(ModuleState(only[0]), CodeState(only[1]))
        modules = list(model.modules())
        return cls(ModuleState(modules), CodeState.of(modules, functions))

    def changed(self) -> tuple[list[nn.Module], list[Variable]]:
        """The modules and variables that have another state now."""
        return self.of_modules.changed(), self.of_code.changed()

    def restrict(self, modules: Iterable[nn.Module], variables: Iterable[Variable]) -> None:
        """Forget the state of all others."""
        self.of_modules.restrict(modules)
        self.of_code.restrict(variables)

    def put_back(self) -> None:
        """Let them remember that again."""
        self.of_modules.put_back()
        self.of_code.put_back()
