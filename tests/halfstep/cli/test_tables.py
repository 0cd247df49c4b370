"""Tables of runs, their columns and values."""

from functools import partial
from typing import Any

import pytest
from rich.console import Console

from halfstep.cli import tables
from tests.halfstep.cli.formats_made import RUN

ROW: dict[str, Any] = RUN | {"steps_per_second": 131.1, "owner": "ada"}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make stdout a terminal without colours that is as wide as COLUMNS."""
    made = partial(Console, force_terminal=True, color_system=None, highlight=False)
    monkeypatch.setattr(tables, "console", made)
    monkeypatch.setenv("TERM", "xterm")
    return monkeypatch


def print_table(capsys: pytest.CaptureFixture[str], *runs: dict[str, Any]) -> list[str]:
    tables.print_tables(tables.run_table(runs, "Steps/s", "Owner", "Reason"))
    return capsys.readouterr().out.splitlines()


def test_without_a_terminal_nothing_is_cut_or_coloured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the width nor the colours of the environment have an effect without a terminal."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    name = "x" * 300
    head, row = print_table(capsys, ROW | {"name": name})
    assert head.split() == [*tables.RUN_COLUMNS, "Steps/s", "Owner"]
    values = ["7", name, "running", "352,889/3,000,000", "0.01812", "2^19", "1,234", "healthy"]
    assert row.split() == [*values, "5", "h", "36", "min", "131.1", "ada"]
    assert "\x1b" not in head + row
    assert not head.endswith(" ")


def test_a_column_without_values_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A column without values is left out, such as the reason if no run is queued or failed."""
    assert "Reason" not in print_table(capsys, ROW)[0]
    assert "Reason" in print_table(capsys, ROW | {"status": "queued", "waiting": "no worker"})[0]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_table_of_running_runs_fits_a_terminal_of_80_columns(
    terminal: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    """On an 80-column terminal every column of a table is shown, and long names wrap."""
    terminal.setenv("COLUMNS", str(width))
    lines = print_table(capsys, ROW | {"name": "a-name-of-30-characters-or-so"})
    assert max(map(len, lines)) <= width
    assert set(lines[0].split()) >= set(tables.RUN_COLUMNS)
    assert {"healthy", "36", "352,889/3,000,000"} <= set(lines[1].split())


def test_a_name_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets in a run's name are printed as text, not as rich's markup."""
    assert "[red]it[/red]" in print_table(capsys, ROW | {"name": "[red]it[/red]"})[1]


def test_wide_comparisons_are_several_tables(terminal: pytest.MonkeyPatch) -> None:
    """A comparison is split into tables with as many runs as fit, at least one."""
    terminal.setenv("COLUMNS", "40")
    first, runs = ["Field", "x" * 20], [["1 a", "y" * 7], ["2 b", "y" * 7], ["3 c", "y" * 70]]
    assert [*tables.parts(first, runs)] == [slice(0, 2), slice(2, 3)]
