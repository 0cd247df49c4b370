"""Formatting of numbers for people."""

import re
from pathlib import Path

import pytest

import app
from app.html import formats
from tests.marks import looped


@pytest.mark.parametrize(
    ("value", "text"), [(2.0**19, "2<sup>19</sup>"), (2.0**-10, "2<sup>−10</sup>"), (None, "–")]
)
def test_a_scale_has_its_exponent_raised(value: float | None, text: str) -> None:
    """A loss scale is shown as a power with the digits of number_formats."""
    assert formats.scale(value) == text


def test_metrics_have_their_unit() -> None:
    """A metric whose name means memory is shown in bytes, and NaN stays NaN."""
    assert formats.metric(3.52e8, "run/peak_memory_bytes") == "336 MiB"
    assert formats.metric(3.52e8, "run/seconds") == "3.52e8"
    assert [formats.metric(value, "a") for value in (None, float("nan"))] == ["–", "NaN"]


@looped(
    "name, stays, gives_way",
    [
        ("first-run fp16 without scaler seed 1", "scaler seed 1", "first-run fp16 without "),
        ("gpt2-small-fp16-lr3e-seed1-again", "seed1-again", "gpt2-small-fp16-lr3e-"),
        ("digits", "digits", ""),
        ("averyveryverylongname", "ngname", "averyveryverylo"),
        ("learning_rate=0.001, steps=9", "=0.001, =9", "learning_ratesteps"),
        ("run, steps=9, lr=0.001, seed=12", "=12", "run, steps=9, lr=0.001, seed"),
        ("", "", ""),
    ],
)
def test_a_name_keeps_its_end_and_the_values_of_settings(
    name: str, stays: str, gives_way: str
) -> None:
    """A shortened run name keeps its end and the values of settings, where names mostly differ."""
    parts = formats.name_parts(name)
    assert "".join(part for part, _ in parts) == name
    assert "".join(part for part, is_cut in parts if not is_cut) == stays
    assert "".join(part for part, is_cut in parts if is_cut) == gives_way


def test_sparkline_leaves_gaps() -> None:
    """A non-finite loss leaves a gap in the sparkline."""
    drawn = formats.sparkline([1.0, None, "Infinity", 2.0, 3.0])
    assert drawn.count("M") == 2
    assert formats.sparkline([None, 1.0]) == ""


def test_a_setting_keeps_its_name_where_a_sentence_begins_with_it() -> None:
    """A sentence that begins with a setting's name does not capitalise it."""
    assert formats.sentence("weights.path is /a.pt") == "weights.path is /a.pt"
    assert formats.sentence("it raised") == "It raised"


def test_templates_show_states_by_their_labels() -> None:
    """A status is never written out or capitalized, so that all pages have one word for a state."""
    written = r"status\s*\|\s*(capitalize|title)|\{\{\s*(run|each|row|sweep)\.status\s*\}\}[^\"]"
    templates = Path(next(iter(app.__path__)), "templates").rglob("*.html")
    found = [path.name for path in templates if re.search(written, path.read_text())]
    assert found == []


def test_code_between_backticks_is_marked_and_escaped() -> None:
    """A source line between backticks is marked and escaped; a single backtick stays a backtick."""
    assert formats.with_code("In `a < b` (t.py:3)") == "In <code>a &lt; b</code> (t.py:3)"
    assert formats.with_code("a ` <b>") == "a ` &lt;b&gt;"
    assert formats.with_code("from 2^19 to `2^4` <b>, 2^-3") == (
        "from 2<sup>19</sup> to <code>2^4</code> &lt;b&gt;, 2<sup>−3</sup>"
    )
