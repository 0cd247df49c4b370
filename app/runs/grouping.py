"""Columns of the grouped list of runs, and the filter of each group."""

from collections.abc import Sequence

from sqlalchemy.orm import Session

from app.http.parameters import TYPED_CHARACTERS
from app.runs.columns import Column
from app.runs.filters import quoted
from db.runs import autocomplete
from db.runs.grouping import GROUPED_BY, SWEEP
from db.runs.run_filters import NUMBERS, SETTINGS


def figures(shown: Sequence[Column]) -> list[Column]:
    """Return the columns that hold numbers: a group shows their means."""
    return [
        column
        for column in shown
        if column.is_own or (column.sort in NUMBERS and column.name != "created")
    ]


def notes(session: Session, by: str) -> list[str]:
    """Return a note if runs cannot be grouped by this name."""
    if by in GROUPED_BY or not autocomplete.unknown(session, [by]):
        return []
    return [f"there is no setting {by}; runs are grouped by settings and {', '.join(GROUPED_BY)}"]


def narrowed(filter_text: str, by: str, path: str, value: float | str | None) -> str | None:
    """Return the filter of a group's runs, None if it would be too long to be one.

    path: path of the setting, if there is only one.
    """
    setting = path if "." in path else SETTINGS + path  # a column or a metric may have its name
    if value is None:
        word = f"-has:{quoted(by if by in GROUPED_BY else setting)}"
    elif by == SWEEP:
        word = f"sweep:{value:g}"
    elif by in GROUPED_BY:
        word = f"{by}:{quoted(str(value))}"
    else:
        number = f"{value:.17g}" if isinstance(value, float) else quoted(value)
        word = f"{quoted(setting)}={number}"
    text = f"{filter_text} {word}".strip()
    return text if len(text) <= TYPED_CHARACTERS else None
