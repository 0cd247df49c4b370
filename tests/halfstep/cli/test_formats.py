"""Formatting of values as text."""

import pytest

from halfstep.cli import formats
from halfstep.cli.commands import run_data, sweep
from tests.halfstep.cli.formats_made import RUN


def test_the_status_line_has_the_key_figures() -> None:
    """The status line has loss, scale, skipped steps, health and ETA, if known."""
    line = formats.run_line(RUN)
    assert line == (
        "run 7  running  baseline  step 352,889/3,000,000  loss 0.01812  scale 2^19  "
        "skipped 1,234  healthy  ETA 5 h 36 min"
    )
    unknown = {"health": None, "loss": None, "scale": None, "seconds_left": None}
    line = formats.run_line(RUN | unknown | {"status": "queued", "waiting": "no worker is up"})
    assert line.endswith("skipped 1,234  (no worker is up)")
    assert "loss" not in line
    assert "skipped" not in formats.run_line(RUN | {"own_steps": 0, "skipped": 0})


@pytest.mark.parametrize(("own_steps", "text"), [(0, "–"), (12, "0")])
def test_the_number_of_skips_is_unknown_without_steps(own_steps: int, text: str) -> None:
    """The number of skips is unknown without steps, and 0 if all steps were applied."""
    assert formats.format_skipped(RUN | {"own_steps": own_steps, "skipped": 0}) == text


@pytest.mark.parametrize(("is_scaled", "text"), [(True, "1"), (False, "–")])
def test_a_run_without_a_scaler_has_no_scale(is_scaled: bool, text: str) -> None:
    """A run without a scaler, whose steps are recorded with a scale of 1, shows no scale."""
    run = RUN | {"scale": 1.0, "is_scaled": is_scaled}
    assert formats.run_scale(run) == text
    assert ("scale 1 " in formats.run_line(run)) == is_scaled


def test_a_failed_run_has_the_reason_of_its_failure() -> None:
    """A failed run shows its failure's reason, not a later action's; a list shows the last line
    of the error.
    """
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


def test_a_damaged_run_says_so_in_each_table() -> None:
    """Each table marks a damaged run; a run of an earlier server has no mark."""
    assert formats.state(RUN | {"damage": "Run 7 is damaged."}) == "running, damaged"
    assert formats.state(RUN) == "running"


def test_text_cannot_control_the_terminal() -> None:
    """Terminal escape sequences in a name are printed visibly."""
    assert formats.plain("a\x1b[2Jb\nc") == "a\ufffd[2Jb c"


def test_a_trial_has_the_label_of_its_state() -> None:
    """A trial's state has the label of lists and pages; a newer server's state is shown as is."""
    trial = {"run_id": 7, "status": "unreachable", "value": 0.5, "params": {}}
    assert sweep._trial_row(trial, [], None, is_loss=False)[:2] == ("7", "no contact")
    assert formats.label("resting") == "resting"


def test_compared_bytes_have_a_unit() -> None:
    """Compared bytes have the unit of the page, other numbers none; a missing metric is a dash."""
    row = {"run/peak_memory_bytes": 2.951e8, "val/loss": 2.951e8}
    cells = [run_data._cell(row, name) for name in (*row, "none")]
    assert cells == ["281 MiB", "2.951e8", "–"]
