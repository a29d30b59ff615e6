"""Colours: text can be read on its ground, and forward differs from backward without colour."""

import re
from importlib.resources import files

import pytest

from pipeplan.report.colours import DARK, LIGHT, contrast, stage_colour

LEAST = 4.5
TOLD_APART = 2.0
"""The least contrast of two neighbouring fills in grey."""
TEXT_ON = (
    *(("text", ground) for ground in ("page", "card", "lane", "host")),
    *(("quiet", ground) for ground in ("page", "card", "lane", "host")),
    *(("accent", ground) for ground in ("page", "card")),
    *(("bad", ground) for ground in ("card", "lane")),
    ("on-forward", "forward"),
    ("on-backward", "backward"),
    ("on-reduce", "reduce"),
    ("on-links", "links"),
    ("on-unused", "unused"),
    ("card", "text"),  # the tip
)
NEIGHBOURS = (
    ("forward", "backward"),
    ("there", "back"),
    ("backward", "reduce"),
    ("parameters", "gradients"),
    ("gradients", "optimizer"),
    ("optimizer", "activations"),
)


def sheets() -> dict[str, dict[str, str]]:
    """The variables of the page's style sheet, for light and for dark ground."""
    text = (files("pipeplan.report") / "assets" / "page.css").read_text()
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    )
    return {"light": light, "dark": dark}


def test_black_and_white_have_the_largest_contrast():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#777777") == 1
    assert contrast("#ffffff", "#767676") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_text_can_be_read(ground):
    sheet = sheets()[ground]
    low = {pair: contrast(sheet[pair[0]], sheet[pair[1]]) for pair in TEXT_ON}
    assert {pair: value for pair, value in low.items() if value < LEAST} == {}


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_neighbours_differ_in_grey(ground):
    sheet = sheets()[ground]
    low = {pair: contrast(sheet[pair[0]], sheet[pair[1]]) for pair in NEIGHBOURS}
    assert {pair: value for pair, value in low.items() if value < TOLD_APART} == {}


@pytest.mark.parametrize(("ground", "colours"), [("light", LIGHT), ("dark", DARK)])
def test_pictures_have_the_colours_of_the_page(ground, colours):
    sheet = sheets()[ground]
    for name in ("forward", "backward", "there", "back", "reduce", "lane", "on-forward"):
        assert colours[name] == sheet[name], name
    for text, under in (("quiet", "page"), ("quiet", "lane"), ("text", "page")):
        assert contrast(colours[text], colours[under]) >= LEAST
    assert contrast(colours["on-backward"], colours["backward"]) >= LEAST


def test_white_text_can_be_read_on_every_stage():
    assert min(contrast(stage_colour(n), "#ffffff") for n in range(200)) >= LEAST
    assert len({stage_colour(n) for n in range(10)}) == 10
