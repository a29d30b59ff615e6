"""The colours of pictures and pages.

Text has a contrast of at least 4.5:1 to its ground. Forward is light, backward is dark, and a
weight gradient is pale, so that they differ in print without colour, too. The style sheet of the
page has the same numbers.
"""

import colorsys

__all__ = ["BANDWIDTH_COLOURS", "DARK", "LIGHT", "contrast", "stage_colour"]

LIGHT = {
    "page": "#ffffff",
    "text": "#1c2330",
    "quiet": "#5d6778",
    "lane": "#eef1f5",
    "line": "#d5dae3",
    "forward": "#5e93ef",
    "on-forward": "#0d1526",
    "backward": "#155741",
    "on-backward": "#ffffff",
    "weight": "#d6c3f0",
    "on-weight": "#0d1526",
    "mixed": "#3a7598",
    "there": "#9fc0fa",
    "back": "#3f8a6c",
    "reduce": "#e8a13a",
}
DARK = {
    "page": "#12161d",
    "text": "#e6eaf1",
    "quiet": "#9aa5b5",
    "lane": "#1f2630",
    "line": "#343c49",
    "forward": "#8ab2ff",
    "on-forward": "#0d1526",
    "backward": "#1e7555",
    "on-backward": "#ffffff",
    "weight": "#e6dcfa",
    "on-weight": "#0d1526",
    "mixed": "#5494aa",
    "there": "#5b82c9",
    "back": "#17543d",
    "reduce": "#f0b252",
}
BANDWIDTH_COLOURS = ("#c8763c", "#cfa14a", "#8fae6b", "#4fa394", "#2f7fb3")
"""From the slowest link of a cluster to its fastest."""
STAGE_HUES = (214, 158, 32, 282, 350, 190, 60, 110, 320, 240)
STAGE_SATURATION = 0.52
LEAST_CONTRAST = 4.6
"""Of a stage's colour to the white text on it."""


def stage_colour(stage: int) -> str:
    """A colour that tells a stage from its neighbours; white text on it can be read."""
    hue = (STAGE_HUES[stage % len(STAGE_HUES)] + 13 * (stage // len(STAGE_HUES))) % 360
    lightness = 0.5
    while contrast(_hex(hue, lightness), "#ffffff") < LEAST_CONTRAST:
        lightness -= 0.01
    return _hex(hue, lightness)


def contrast(first: str, second: str) -> float:
    """The contrast of two colours, from 1 (none) to 21, as WCAG 2 defines it."""
    bright, dark = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _hex(hue: float, lightness: float) -> str:
    parts = colorsys.hls_to_rgb(hue / 360, lightness, STAGE_SATURATION)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)
