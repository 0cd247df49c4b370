"""Tabs of the list of runs: all runs, own runs and saved views, with counts."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement

from app.runs import filters
from app.runs.columns import list_address
from db.runs import runs
from db.runs.run_filters import Filter
from db.tables import SavedView, User

#: Views with a count: each costs a query.
MOST_COUNTED = 12
#: A filter that matches more runs shows no count: counting them takes too long.
MOST_RUNS = 20_000
MINE = "owner:me"


@dataclass(frozen=True)
class Tab:
    """A tab of the list."""

    name: str
    address: str
    count: int | None  # number of its runs; None if not counted
    filter: str = ""  # shown as its title


def count_expressions(
    user: User, saved: Sequence[SavedView]
) -> dict[str, ColumnElement[int | None]]:
    """Return the SQL expressions of the counts by filter; "" for all runs."""
    texts = [MINE, *(view.filter for view in saved[:MOST_COUNTED])]
    read = {text: terms for text in texts if (terms := _terms(text, user)) is not None}
    numbers = {text: runs.count_matching(terms, most=MOST_RUNS) for text, terms in read.items()}
    return numbers | {"": runs.count_matching(())}


def tabs(saved: Sequence[SavedView], counts: dict[str, int | None]) -> list[Tab]:
    """Return the tabs; "Mine" is left out if all runs are the user's, or none.

    counts: values of the expressions of `count_expressions`, by filter.
    """
    rows = [Tab("All runs", list_address(), counts[""])]
    if counts.get(MINE) not in (0, counts[""]):
        rows.append(Tab("Mine", list_address(filter=MINE), counts.get(MINE), MINE))
    for view in saved:
        address = list_address(
            filter=view.filter, sort=view.sort, columns=view.columns, group=view.group
        )
        rows.append(Tab(view.name, address, counts.get(view.filter), view.filter))
    return rows


def _terms(text: str, user: User) -> Filter | None:
    """Parse a saved filter; None if it is no longer valid."""
    try:
        return filters.read(text, me=user.name)
    except filters.BadFilter:
        return None
