"""Imports of what needs PyTorch, with a line that names the missing extra."""

from importlib import import_module
from types import ModuleType

__all__ = ["import_with_torch"]


def import_with_torch(module: str, package: str) -> ModuleType:
    """The module; without PyTorch, the error says what to install.

    Raises:
        ModuleNotFoundError: PyTorch or something else is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        message = f"{package} needs PyTorch; pip install 'pipeplan[torch]'"
        raise ModuleNotFoundError(message, name="torch") from None
