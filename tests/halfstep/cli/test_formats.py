"""Values as text."""

import pytest

from halfstep.cli import formats
from tests.halfstep.cli.formats_made import RUN


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (0.147601, "0.1476"),
        (2.25e-7, "2.25e-7"),
        (123_456.0, "123,456"),
        (3.45e8, "3.45e8"),
        ("Infinity", "∞"),
        ("-Infinity", "−∞"),
        ("NaN", "NaN"),
    ],
)
def test_a_number_has_four_digits(value: float | str | None, text: str) -> None:
    """The API has numbers that JSON lacks as words."""
    assert formats.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(65536.0, "2^16"), (1.0, "2^0"), (0.25, "2^-2"), (1000.0, "1000"), (0.0, "0"), (None, "–")],
)
def test_a_scale_is_a_power_of_two_where_it_is_one(value: float | None, text: str) -> None:
    """As the filter of the list takes it."""
    assert formats.scale(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (9.96, "10.0s"), (59.0, "59s"), (61.0, "1m 1s"), (20160, "5h 36m"),
     (90000, "1d 1h"), (None, "–")],
)  # fmt: skip
def test_a_duration_has_two_units(seconds: float | None, text: str) -> None:
    """The largest two."""
    assert formats.duration(seconds) == text


def test_the_status_line_has_the_key_figures() -> None:
    """Loss, scale, skipped steps, health and ETA; unknown ones are left out."""
    line = formats.run_line(RUN)
    assert line == (
        "run 7  running  baseline  step 352,889/3,000,000  loss 0.01812  scale 2^19  "
        "skipped 1,234  healthy  ETA 5h 36m"
    )
    unknown = {"health": None, "loss": None, "scale": None, "seconds_left": None}
    line = formats.run_line(RUN | unknown | {"status": "queued", "waiting": "no worker is up"})
    assert line.endswith("skipped 1,234  (no worker is up)")
    assert "loss" not in line


@pytest.mark.parametrize(("is_scaled", "text"), [(True, "2^0"), (False, "–")])
def test_a_run_without_a_scaler_has_no_scale(is_scaled: bool, text: str) -> None:
    """Its steps are recorded with a scale of 1, which is not shown."""
    run = RUN | {"scale": 1.0, "is_scaled": is_scaled}
    assert formats.run_scale(run) == text
    assert ("scale 2^0" in formats.run_line(run)) == is_scaled


def test_a_failed_run_has_the_reason_of_its_failure() -> None:
    """Not that of a later action; in a list, which has no history, the last line of the error."""
    failed = RUN | {"status": "failed", "error": "Traceback:\n\nValueError: bye\n"}
    history = [
        {"status": "failed", "attempt": 1, "reason": "exit code 2"},
        {"status": "running", "attempt": 2, "reason": None},
        {"status": "failed", "attempt": 2, "reason": "exit code 3: bye"},
        {"status": "failed", "attempt": 2, "reason": "restored by ada"},
    ]
    assert formats.reason(failed | {"statuses": history}) == "exit code 3: bye"
    assert formats.reason(failed) == "ValueError: bye"
    assert formats.reason(RUN) == ""


def test_text_cannot_control_the_terminal() -> None:
    """Escape sequences in a name are printed visibly."""
    assert formats.plain("a\x1b[2Jb\nc") == "a\ufffd[2Jb c"
