"""What a model's code remembers outside of its modules, saved and put back.

The variables are those of `code_variables`. Values are saved and put back as for modules.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from pipeplan.runtime.code_variables import MISSING, Variable, find_variables
from pipeplan.runtime.module_state import Contents

__all__ = ["CodeState"]


class CodeState:
    """The variables of some modules' code at one moment."""

    def __init__(self, modules: Iterable[nn.Module], functions: Iterable[Any] = ()) -> None:
        read = [(variable, variable.get()) for variable in find_variables(modules, functions)]
        self._saved: list[tuple[Variable, Any]] = [
            (variable, value) for variable, value in read if value is not MISSING
        ]
        self._contents = Contents()
        self._contents.add([value for _, value in self._saved])

    def is_changed(self) -> bool:
        """Whether a variable has another value now; lists that have only grown are logs."""
        return self._contents.have_changed_beyond_logs() or any(
            variable.get() is not value and repr(variable.get()) != repr(value)
            for variable, value in self._saved
        )

    def put_back(self) -> None:
        """Give all these variables the values that they had."""
        for variable, value in self._saved:
            if variable.get() is not value:
                variable.set(value)
        self._contents.put_back()
