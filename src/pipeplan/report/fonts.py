"""The fonts of pictures by short names."""

__all__ = ["SANS", "font_family"]

SANS = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
FAMILIES = {
    "sans": SANS,
    "serif": "'Times New Roman', Times, serif",
    "mono": "'Courier New', Courier, monospace",
}


def font_family(font: str) -> str:
    """What an SVG calls it: a family of fonts for `sans`, `serif` and `mono`, else the font."""
    return FAMILIES.get(font, f"'{font}', sans-serif")
