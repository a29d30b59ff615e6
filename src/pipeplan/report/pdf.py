"""Our own SVG pictures as PDF: one page of vector graphics, the same bytes in every run.

It knows what our pictures are made of: `rect`, `circle`, `path` of straight lines, `text` and `g`.
Text is set in the fonts that every PDF reader has (Helvetica, Times, Courier), which are not
embedded. A unit of the picture is 1/96 inch, as in browsers.

Reference:
    ISO 32000-1:2008; widths of characters: Adobe's font metrics of the 14 standard fonts.
"""

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from xml.etree import ElementTree

from pipeplan.errors import InputError

__all__ = ["pdf_font", "svg_to_pdf"]

POINTS = 0.75
"""Points in a unit of the picture."""
CURVE = 0.5523
"""How far the control points of a quarter of a circle lie, in radii."""
FONTS = {
    "sans": ("Helvetica", "Helvetica-Bold"),
    "serif": ("Times-Roman", "Times-Bold"),
    "mono": ("Courier", "Courier-Bold"),
}
WORDS = {
    "mono": ("mono", "courier"),
    "sans": ("sans", "helvetica", "arial"),
    "serif": ("times", "serif"),
}
WIDTHS = {
    "sans": (
        "278 278 355 556 556 889 667 191 333 333 389 584 278 333 278 278 556 556 556 556 556 556"
        " 556 556 556 556 278 278 584 584 584 556 1015 667 667 722 722 667 611 778 722 278 500 667"
        " 556 833 722 778 667 778 722 667 611 722 667 944 667 667 611 278 278 278 469 556 333 556"
        " 556 500 556 556 278 556 556 222 222 500 222 833 556 556 556 556 333 500 278 556 500 722"
        " 500 500 500 334 260 334 584"
    ),
    "serif": (
        "250 333 408 500 500 833 778 180 333 333 500 564 250 333 250 278 500 500 500 500 500 500"
        " 500 500 500 500 278 278 564 564 564 444 921 722 667 667 722 611 556 722 722 333 389 722"
        " 611 889 722 722 556 722 667 556 611 722 722 944 722 722 611 333 278 333 469 500 333 444"
        " 500 444 500 444 333 500 500 278 278 500 278 778 500 500 500 500 333 389 278 500 500 722"
        " 500 500 444 480 200 480 541"
    ),
}
"""Of the characters from space to tilde, in thousandths of the font's size."""
OTHER_WIDTH = {"sans": 556, "serif": 500, "mono": 600}
NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
STEP = re.compile(rf"([MLHVhvz])|({NUMBER})")
ROTATION = re.compile(rf"rotate\(({NUMBER}) ({NUMBER}) ({NUMBER})\)")
DRAWN = {"rect", "circle", "path"}
INHERITED = ("fill", "font-size", "text-anchor", "font-weight")
SKIPPED = {"title", "style"}

Attributes = Mapping[str, str]


def pdf_font(family: str) -> str:
    """The standard font for a family's name: `sans`, `serif` or `mono`; others are refused."""
    first = family.split(",")[0].strip(" '\"").lower()
    if first.startswith(("ui-sans", "system-ui")):
        return "sans"
    for font, words in WORDS.items():
        if any(word in first for word in words):
            return font
    raise InputError(
        f"font: a PDF has no {family!r}; choose sans, serif or mono, or write .svg and convert it"
    )


def svg_to_pdf(picture: str, warn: Callable[[str], None] | None = None) -> bytes:
    """One of our pictures as a PDF of one page; `warn` is told of characters that fonts lack."""
    root = ElementTree.fromstring(picture)  # noqa: S314 - our own picture, made by `element`
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    font = pdf_font(root.attrib.get("font-family", "sans"))
    lines = [f"{POINTS} 0 0 {-POINTS} 0 {_number(height * POINTS)} cm"]
    lines += _children(root, {"fill": "#000000", **root.attrib}, font)
    texts = "".join(node.text or "" for node in root.iter() if _tag(node) == "text")
    if warn is not None and _latin(texts) != texts.encode("cp1252", "ignore"):
        warn("PDF's own fonts lack some characters, which are shown as ?; .svg has all")
    regular, bold = FONTS[font]
    content = zlib.compress("\n".join(lines).encode("latin-1"), 9)
    size = f"{_number(width * POINTS)} {_number(height * POINTS)}"
    kind = "/Type /Font /Subtype /Type1 /Encoding /WinAnsiEncoding /BaseFont"
    return _file(
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        (
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {size}] /Contents 4 0 R"
            " /Resources << /Font << /F1 5 0 R /F2 6 0 R >> >> >>"
        ).encode(),
        f"<< /Length {len(content)} /Filter /FlateDecode >>\nstream\n".encode()
        + content
        + b"\nendstream",
        f"<< {kind} /{regular} >>".encode(),
        f"<< {kind} /{bold} >>".encode(),
    )


def _file(*objects: bytes) -> bytes:
    """The objects with their numbers, and the table that says where each begins."""
    data = bytearray(b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n")
    starts = []
    for number, body in enumerate(objects, 1):
        starts.append(len(data))
        data += f"{number} 0 obj\n".encode() + body + b"\nendobj\n"
    table = len(data)
    data += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    data += "".join(f"{start:010d} 00000 n \n" for start in starts).encode()
    data += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\n".encode()
    return bytes(data + f"startxref\n{table}\n%%EOF\n".encode())


def _children(parent: ElementTree.Element, given: Attributes, font: str) -> Iterator[str]:
    """The drawing of all elements inside one; attributes of a group hold for what is in it."""
    inherited = {name: given[name] for name in INHERITED if name in given}
    for node in parent:
        tag, attributes = _tag(node), {**inherited, **node.attrib}
        if tag == "g":
            yield from _children(node, attributes, font)
        elif tag == "text":
            yield _text(node.text or "", attributes, font)
        elif tag in DRAWN:
            yield from _shape(tag, attributes)
        else:
            assert tag in SKIPPED, f"our pictures have no {tag}"


def _tag(node: ElementTree.Element) -> str:
    return node.tag.rpartition("}")[2]


def _shape(tag: str, attributes: Attributes) -> Iterator[str]:
    fill, stroke = attributes.get("fill", "none"), attributes.get("stroke", "none")
    path = {"rect": _rect, "circle": _circle, "path": _path}[tag](attributes)
    if fill != "none":
        yield f"{_colour(fill)} rg"
    if stroke != "none":
        dashes = attributes.get("stroke-dasharray", "")
        width = float(attributes.get("stroke-width", 1))
        yield f"{_colour(stroke)} RG {_number(width)} w [{dashes}] 0 d"
    paint = {(True, True): "B", (True, False): "f", (False, True): "S"}.get(
        (fill != "none", stroke != "none"), "n"
    )
    yield f"{path} {paint}"


def _rect(attributes: Attributes) -> str:
    x, y, width, height = (float(attributes.get(n, 0)) for n in ("x", "y", "width", "height"))
    return f"{_number(x)} {_number(y)} {_number(width)} {_number(height)} re"


def _circle(attributes: Attributes) -> str:
    x, y, r = (float(attributes[name]) for name in ("cx", "cy", "r"))
    parts = [f"{_number(x + r)} {_number(y)} m"]
    for quarter in range(4):
        c, s = (round(f(quarter * math.pi / 2)) for f in (math.cos, math.sin))
        turned = [(1, CURVE), (CURVE, 1), (0, 1)]
        places = [(x + r * (a * c - b * s), y + r * (a * s + b * c)) for a, b in turned]
        parts.append(" ".join(f"{_number(px)} {_number(py)}" for px, py in places) + " c")
    return " ".join(parts)


def _path(attributes: Attributes) -> str:
    """Straight lines: the steps M, L, H, V, h, v and z."""
    x = y = 0.0
    step, parts, numbers = "M", [], []
    for found in STEP.finditer(attributes["d"]):
        if found[1]:
            step = found[1]
            if step == "z":
                parts.append("h")
            continue
        numbers.append(float(found[2]))
        if step in "ML" and len(numbers) < 2:
            continue
        if step in "ML":
            x, y = numbers
        else:
            along = numbers[0]
            x = along if step == "H" else x + along if step == "h" else x
            y = along if step == "V" else y + along if step == "v" else y
        parts.append(f"{_number(x)} {_number(y)} {'m' if step == 'M' else 'l'}")
        numbers = []
    return " ".join(parts)


def _text(text: str, attributes: Attributes, font: str) -> str:
    size, x, y = (float(attributes[name]) for name in ("font-size", "x", "y"))
    is_bold = attributes.get("font-weight") == "600"
    part = {"middle": 0.5, "end": 1.0}.get(attributes.get("text-anchor", ""), 0.0)
    before = part * _text_width(text, font) * size / 1000
    turned = ROTATION.match(attributes.get("transform", ""))
    angle = math.radians(float(turned[1])) if turned else 0.0
    cos, sin = math.cos(angle), math.sin(angle)
    place = f"{_number(x - before * cos)} {_number(y - before * sin)}"
    matrix = f"{_number(cos)} {_number(sin)} {_number(sin)} {_number(-cos)} {place}"
    shown = re.sub(rb"([()\\])", rb"\\\1", _latin(text)).decode("latin-1")
    name = "F2" if is_bold else "F1"
    colour = _colour(attributes["fill"])
    return f"{colour} rg BT /{name} {_number(size)} Tf {matrix} Tm ({shown}) Tj ET"


def _latin(text: str) -> bytes:
    return text.encode("cp1252", "replace")


def _text_width(text: str, font: str) -> float:
    """In thousandths of the font's size."""
    widths = [int(width) for width in WIDTHS[font].split()] if font in WIDTHS else []
    other = OTHER_WIDTH[font]
    return sum(
        widths[ord(letter) - 32] if 32 <= ord(letter) < 32 + len(widths) else other
        for letter in text
    )


def _colour(colour: str) -> str:
    return " ".join(_number(int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5))


def _number(value: float) -> str:
    text = f"{value:.3f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text
