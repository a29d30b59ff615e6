"""HTML from Jinja templates that escape every value unless it is `Markup` already."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

__all__ = ["as_script", "own_file", "render", "script_json"]


def render(template: str, **values: Any) -> str:
    """A template of this package with its values; a missing value is our own mistake."""
    return _environment().get_template(template).render(values)


def own_file(name: str) -> Markup:
    """A style sheet or a script of this package, to stand in a page as it is."""
    return Markup((files("pipeplan.report") / "assets" / name).read_text(encoding="utf-8"))  # noqa: S704


def script_json(document: Any) -> Markup:
    """JSON that cannot end the script element in which it stands."""
    return as_script(json.dumps(document, separators=(",", ":"), allow_nan=False))


def as_script(text: str) -> Markup:
    """Text of JSON, in which `<`, `>` and `&` stand only within strings, without these."""
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(safe)  # noqa: S704


@cache
def _environment() -> Environment:
    templates = files("pipeplan.report") / "templates"
    environment = Environment(
        loader=FunctionLoader(lambda name: (templates / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["script_json"] = script_json
    return environment
