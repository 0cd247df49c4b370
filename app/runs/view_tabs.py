"""Tabs over the list of runs: all runs, one's own, and the saved views, with their counts."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

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


def tabs(session: Session, user: User, saved: Sequence[SavedView]) -> list[Tab]:
    """Return the tabs; one's own runs have one where others have runs, too."""
    texts = [MINE, *(view.filter for view in saved[:MOST_COUNTED])]
    read = {text: terms for text in texts if (terms := _terms(text, user)) is not None}
    newest = runs.newest_id(session)
    known = {**read, "": ()} if newest <= MOST_RUNS else {"": ()}
    counted = dict(zip(known, runs.counts(session, list(known.values())), strict=True))
    found = [Tab("All runs", list_address(), counted[""])]
    if counted.get(MINE) != counted[""]:
        found.append(Tab("Mine", list_address(filter=MINE), counted.get(MINE), MINE))
    for view in saved:
        address = list_address(
            filter=view.filter, sort=view.sort, columns=view.columns, group=view.group
        )
        found.append(Tab(view.name, address, counted.get(view.filter), view.filter))
    return found


def _terms(text: str, user: User) -> Filter | None:
    """Return a saved filter; None if an earlier version saved what is no filter any more."""
    try:
        return filters.read(text, me=user.name)
    except filters.BadFilter:
        return None
