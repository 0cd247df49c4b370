"""Lists that may be long, a page at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, func, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session

from db.errors import Invalid
from db.tables import LARGEST_COUNT


@dataclass(frozen=True)
class Page:
    """Some rows of a list. total: of all its pages; next: where the next begins, None on the last.

    Each row is as its query has it, the first column the table whose key orders the list.
    """

    rows: Sequence[Any]
    total: int
    next: str | None


def page(
    session: Session,
    query: Select[*tuple[Any, ...]],
    key: Sequence[InstrumentedAttribute[int]],
    *,
    after: str = "",
    limit: int,
    newest_first: bool = False,
) -> Page:
    """Return the rows of a query that come after a cursor, in the order of a key of whole numbers.

    What comes in or goes meanwhile moves no row to another page. Raises Invalid for a cursor that
    no page named.
    """
    total = session.scalar(select(func.count()).select_from(query.order_by(None).subquery()))
    columns = tuple_(*key)
    if after:
        seen = tuple_(*_parsed(after, len(key)))
        query = query.where(columns < seen if newest_first else columns > seen)
    order = [column.desc() if newest_first else column for column in key]
    rows = session.execute(query.order_by(*order).limit(limit + 1)).all()
    last = rows[limit - 1][0] if len(rows) > limit else None
    cursor = "-".join(str(getattr(last, column.key)) for column in key) if last else None
    return Page(rows[:limit], total or 0, cursor)


def page_of_list(rows: Sequence[Any], *, after: str = "", limit: int) -> Page:
    """Return a page of a list that is short enough to be had whole; a cursor is a place in it."""
    [first] = _parsed(after, 1) if after else [0]
    end = first + limit
    return Page(rows[first:end], len(rows), str(end) if end < len(rows) else None)


def _parsed(cursor: str, length: int) -> list[int]:
    parts = cursor.split("-")
    if all(part.isdecimal() and len(part) < 20 for part in parts) and len(parts) == length:
        numbers = [int(part) for part in parts]
        if max(numbers) <= LARGEST_COUNT:
            return numbers
    raise Invalid({"after": f"{cursor[:100]!r} is not allowed; allowed: what a page's next is"})
