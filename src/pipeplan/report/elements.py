"""HTML and SVG elements whose text and attributes are escaped by construction.

`element` escapes everything that is not `Markup` already, and only this module and Jinja templates
make `Markup`. So a name from an input stays text wherever it is put.
"""

from collections.abc import Iterable

from markupsafe import Markup, escape

__all__ = ["Markup", "element", "join"]


def element(tag: str, *children: str, **attributes: str | float) -> Markup:
    """One element; `class_` and `font_size` are written `class` and `font-size`."""
    written = Markup("").join(
        Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), _value(value))
        for name, value in attributes.items()
    )
    if not children:
        return Markup("<{}{}/>").format(tag, written)
    return Markup("<{}{}>{}</{}>").format(tag, written, join(children), tag)


def join(parts: Iterable[str]) -> Markup:
    """The parts one after the other; those that are not `Markup` are escaped."""
    return Markup("").join(parts)


def _value(value: str | float) -> str:
    """Numbers with one digit behind the point, which is a tenth of a pixel."""
    if isinstance(value, str):
        return escape(value)
    text = f"{value:.1f}"
    return text.removesuffix(".0")
