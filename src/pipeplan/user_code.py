"""Functions of a user's module by name, and one line for what goes wrong inside them."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from pipeplan.documents.text import nearest
from pipeplan.errors import InputError

__all__ = ["describe_error", "find_function", "require_form"]

LONGEST_TEXT = 300
"""Of a longer message, the beginning is quoted."""


def require_form(path: str, what: str = "") -> tuple[str, str]:
    """The module and the name in `module:name`."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        where = f"{what}: " if what else ""
        raise InputError(f"{where}{path!r}: is not of the form MODULE:FUNCTION")
    return module_name, name


def find_function(path: str, what: str = "") -> Callable[..., Any]:
    """The function that `module:name` names; the module may be in the current folder.

    `what` is what messages call it, such as `--batch`.
    """
    module_name, name = require_form(path, what)
    where = f"{what}: {path!r}" if what else repr(path)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        is_path = module_name.endswith(".py")
        dotted = module_name.removesuffix(".py").replace("/", ".")
        hint = f"; write {dotted}:{name}" if is_path else ""
        raise InputError(f"{where}: there is no module {module_name!r} here{hint}") from None
    for part in name.split("."):
        known = [known for known in dir(found) if not known.startswith("_")]
        found = getattr(found, part, None)
        if not callable(found):
            hint = nearest(part, known)
            raise InputError(
                f"{where}: the module {module_name!r} has no function {name!r}"
                + (hint if hint.startswith("; did") else "")
            )
    function: Callable[..., Any] = found
    return function


def describe_error(error: BaseException) -> str:
    """An exception in one line: its kind, its message, and where it was raised.

    The place is the innermost line outside of installed packages, which is the user's own.
    """
    text = " ".join(str(error).split())
    text = text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 3]}..."
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    place = f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def _is_users(file_name: str) -> bool:
    packages = os.path.dirname(os.path.abspath(__file__))
    is_installed = "site-packages" in file_name or "dist-packages" in file_name
    standard = os.path.dirname(os.path.abspath(os.__file__))
    inside = os.path.abspath(file_name).startswith((packages + os.sep, standard + os.sep))
    return not (is_installed or inside or file_name.startswith("<"))
