"""Tabs over the list of runs: all runs, one's own, and the saved views, with their counts."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement

from app.runs import filters
from app.runs.columns import list_address
from db.runs import runs
from db.runs.run_filters import Filter
from db.tables import SavedView, User

#: Views that are counted: each costs a query.
MOST_COUNTED = 12
#: Of more runs a count may take long, and only all are counted.
MOST_RUNS = 20_000
MINE = "owner:me"


@dataclass(frozen=True)
class Tab:
    """A tab. count: of its runs, if they are counted.  filter: its title."""

    name: str
    address: str
    count: int | None
    filter: str = ""


def counted(user: User, saved: Sequence[SavedView]) -> dict[str, ColumnElement[int | None]]:
    """Return what to select for the counts, by filter; "" for all runs."""
    texts = [MINE, *(view.filter for view in saved[:MOST_COUNTED])]
    read = {text: terms for text in texts if (terms := _terms(text, user)) is not None}
    numbers = {text: runs.counted(terms, most=MOST_RUNS) for text, terms in read.items()}
    return numbers | {"": runs.counted(())}


def tabs(saved: Sequence[SavedView], counts: dict[str, int | None]) -> list[Tab]:
    """Return the tabs; one's own runs have one where others have runs, too.

    counts: what `counted` selected, by filter.
    """
    found = [Tab("All runs", list_address(), counts[""])]
    if counts.get(MINE) != counts[""]:
        found.append(Tab("Mine", list_address(filter=MINE), counts.get(MINE), MINE))
    for view in saved:
        address = list_address(
            filter=view.filter, sort=view.sort, columns=view.columns, group=view.group
        )
        found.append(Tab(view.name, address, counts.get(view.filter), view.filter))
    return found


def _terms(text: str, user: User) -> Filter | None:
    """Return a saved filter; None if an earlier version saved what is no filter any more."""
    try:
        return filters.read(text, me=user.name)
    except filters.BadFilter:
        return None
