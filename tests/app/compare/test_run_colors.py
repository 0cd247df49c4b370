"""Colours of runs."""

import re

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
    """Which base.css has for both themes."""
    css = (STATIC / "base" / "base.css").read_text()
    found = re.findall(r"--run-\d: light-dark\((#\w+), (#\w+)\)", css)
    assert [*zip(chart_links.LIGHT, chart_links.DARK, strict=True)] == found
