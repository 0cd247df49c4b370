"""Numbers as people read them."""

from typing import Any

import pytest

from app.html import formats


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (0.123456, "0.1235"),
        (1234567.0, "1.23e6"),
        (12345.6, "12,346"),
        (1e-5, "1e-5"),
        (float("inf"), "∞"),
        (float("-inf"), "−∞"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    """Four digits, and words for numbers that are not finite."""
    assert formats.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.0**19, "2<sup>19</sup>"),
        (2.0**-10, "2<sup>−10</sup>"),
        (1.0, "1"),
        (3000.0, "3000"),
        (0.0, "0"),
        (None, "–"),
    ],
)
def test_scales_are_powers_of_two(value: float | None, text: str) -> None:
    """The scaler halves and doubles, so its number is best read as a power."""
    assert formats.scale(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (-0.1, "0.0 s"),
        (3.21, "3.2 s"),
        (59.7, "1 min 0 s"),
        (3700.0, "1 h 1 min"),
        (90_000.0, "1 d 1 h"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    """The two largest units."""
    assert formats.duration(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (112_640, "113 kB"),
        (999_999, "1000 kB"),
        (10**6, "1 MB"),
        (2_512_345_678, "2.51 GB"),
        (10**15, "1,000 TB"),
        (123 * 10**15, "123,000 TB"),
    ],
)
def test_sizes(size_bytes: int, text: str) -> None:
    """In the unit that fits; tests/app/static/formats.test.js has the same cases."""
    assert formats.size(size_bytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "null"), (True, "true"), ([], "[]"), ([1, "a"], '[1, "a"]')),
        *((16777216.0, "16777216"), (0.1, "0.1"), ("adamw", "adamw"), ({"a": None}, '{"a": null}')),
    ],
)
def test_values_of_a_configuration(value: Any, text: str) -> None:
    """They are JSON; whole floats have no point."""
    assert formats.value(value) == text


def test_measurements_are_reported() -> None:
    """A NaN is one, and memory has its unit."""
    assert [formats.measured(value) for value in (None, float("nan"), 1.5)] == ["NaN", "NaN", "1.5"]
    assert formats.metric(3.52e8, "run/peak_memory_bytes") == "336 MiB"
    assert formats.metric(3.52e8, "run/seconds") == "3.52e8"
    assert formats.memory(80 * 2**30) == "80 GiB"


def test_sparkline_leaves_gaps() -> None:
    """A loss that is not finite interrupts the line."""
    drawn = formats.sparkline([1.0, None, "Infinity", 2.0, 3.0])
    assert drawn.count("M") == 2
    assert formats.sparkline([None, 1.0]) == ""


def test_a_setting_keeps_its_name_where_a_sentence_begins_with_it() -> None:
    """Names are not capitalised."""
    assert formats.sentence("weights.path is /a.pt") == "weights.path is /a.pt"
    assert formats.sentence("it raised") == "It raised"
