"""The colours of pictures and pages."""

__all__ = ["BANDWIDTH_COLOURS", "DARK", "LIGHT", "stage_colour"]

LIGHT = {
    "page": "#ffffff",
    "text": "#1c2330",
    "quiet": "#667085",
    "lane": "#f1f3f7",
    "line": "#d5dae3",
    "forward": "#3f74d9",
    "backward": "#2f9e77",
    "mixed": "#3789a8",
    "there": "#9dbbf2",
    "back": "#93d3ba",
    "reduce": "#e8a13a",
}
DARK = {
    "page": "#12161d",
    "text": "#e6eaf1",
    "quiet": "#98a2b3",
    "lane": "#1d232d",
    "line": "#343c49",
    "forward": "#5b8def",
    "backward": "#3fb68b",
    "mixed": "#4da1bd",
    "there": "#33528f",
    "back": "#27694f",
    "reduce": "#f0b252",
}
BANDWIDTH_COLOURS = ("#c8763c", "#cfa14a", "#8fae6b", "#4fa394", "#2f7fb3")
"""From the slowest link of a cluster to its fastest."""
STAGE_HUES = (214, 158, 32, 282, 350, 190, 60, 110, 320, 240)


def stage_colour(stage: int) -> str:
    """A colour that tells a stage from its neighbours, on light and on dark ground."""
    hue = STAGE_HUES[stage % len(STAGE_HUES)] + 13 * (stage // len(STAGE_HUES))
    return f"hsl({hue % 360} 52% 47%)"
