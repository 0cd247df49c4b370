"""Colours of runs."""

import math
import re
from itertools import combinations

import pytest

from app.compare.run_colors import places
from app.html import chart_links
from app.http.assets import STATIC


def test_a_run_has_the_colour_of_its_id() -> None:
    """If two runs share a colour, the older run keeps it; from the eleventh run on lines are
    dashed.
    """
    assert places([21, 3, 11]) == {3: 3, 11: 1, 21: 2}
    many = places(range(0, 250, 10))
    assert [many[run_id] for run_id in (0, 90, 100, 240)] == [0, 9, 10, 24]


def test_pictures_have_the_colours_of_the_pages() -> None:
    """The server's images use the colours of base.css for both themes."""
    css = (STATIC / "base" / "base.css").read_text()
    found = re.findall(r"--run-\d: light-dark\((#\w+), (#\w+)\)", css)
    assert [*zip(chart_links.LIGHT, chart_links.DARK, strict=True)] == found


def _linear(color: str) -> list[float]:
    """Return the linear red, green and blue of a color in sRGB."""
    values = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def _oklab(color: str) -> tuple[float, float, float]:
    r, g, b = _linear(color)
    l_, m, s = (
        (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3),
        (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3),
        (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3),
    )
    return (
        0.2104542553 * l_ + 0.7936177850 * m - 0.0040720468 * s,
        1.9779984951 * l_ - 2.4285922050 * m + 0.4505937099 * s,
        0.0259040371 * l_ + 0.7827717662 * m - 0.8086757660 * s,
    )


@pytest.mark.parametrize(
    ("colors", "card"), [(chart_links.LIGHT, "#ffffff"), (chart_links.DARK, "#141821")]
)
def test_colors_are_distinct(colors: tuple[str, ...], card: str) -> None:
    """Any two run colours are 0.15 apart in OKLab, and each has a contrast of 3 to 1 on the card.

    None is so dark that a thin line of it looks black.
    """
    assert min(_oklab(color)[0] for color in colors) >= 0.4
    assert len(colors) == 10
    assert min(math.dist(_oklab(a), _oklab(b)) for a, b in combinations(colors, 2)) >= 0.15
    for color in colors:
        dark, light = sorted(
            0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(_linear, (color, card))
        )
        assert (light + 0.05) / (dark + 0.05) >= 3
