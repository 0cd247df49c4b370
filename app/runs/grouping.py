"""The list of runs, grouped: what is told of each group, and the filter that leads to its runs."""

from collections.abc import Sequence

from sqlalchemy.orm import Session

from app.http.parameters import TYPED_CHARACTERS
from app.runs.columns import Column
from app.runs.filters import quoted
from db.runs import autocomplete
from db.runs.grouping import GROUPED_BY, SWEEP
from db.runs.run_filters import NUMBERS, SETTINGS


def figures(shown: Sequence[Column]) -> list[Column]:
    """Return the columns that hold numbers, of which a group has a mean."""
    is_number = [each.is_own or (each.sort in NUMBERS and each.name != "created") for each in shown]
    return [column for column, is_one in zip(shown, is_number, strict=True) if is_one]


def notes(session: Session, by: str) -> list[str]:
    """Say that there is nothing to group by of this name."""
    if by in GROUPED_BY or not autocomplete.unknown(session, [by]):
        return []
    return [f"no setting is called {by}; runs are grouped by settings and {', '.join(GROUPED_BY)}"]


def narrowed(filter_text: str, by: str, path: str, value: float | str | None) -> str | None:
    """Return the filter of a group's runs, None if it would be too long to be one.

    path: of the setting, if it has but one.
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
