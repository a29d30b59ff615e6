"""The examples in the docstrings of the public interface do what they show."""

import doctest
import importlib
import inspect

import pytest

import pipeplan

ROOMS = sorted(
    {
        value.__module__
        for name in pipeplan.__all__
        if (inspect.isclass(value := getattr(pipeplan, name)) or inspect.isfunction(value))
    }
    | {"pipeplan", "pipeplan.zoo"}
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.FAIL_FAST


@pytest.mark.parametrize("room", ROOMS)
def test_examples_of_docstrings(room, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(importlib.import_module(room), optionflags=FLAGS, raise_on_error=False)
    assert found.failed == 0


@pytest.mark.parametrize(
    "name",
    [name for name in pipeplan.__all__ if inspect.isfunction(getattr(pipeplan, name))],
)
def test_functions_tell_their_arguments(name):
    """Every public function names each argument that its docstring has to explain."""
    function = getattr(pipeplan, name)
    text = inspect.getdoc(function)
    assert text
    if "Args:" in text:
        for argument in inspect.signature(function).parameters:
            assert f"    {argument}: " in text, f"{name}: {argument}"
