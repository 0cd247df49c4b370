"""Keyset pagination of long lists."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, func, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session

from db.errors import Invalid
from db.tables import LARGEST_COUNT


@dataclass(frozen=True)
class Page:
    """A page of a list."""

    rows: Sequence[Any]  # of the query; the first column is the table that orders the list
    total: int  # rows on all pages
    next: str | None  # cursor of the next page, None on the last


def page(
    session: Session,
    query: Select[*tuple[Any, ...]],
    key: Sequence[InstrumentedAttribute[int]],
    *,
    after: str = "",
    limit: int,
    newest_first: bool = False,
) -> Page:
    """Return the rows of a query after a cursor, in the order of an integer key.

    Rows that are added or deleted in the meantime move no other row to another page. Raises
    Invalid for a cursor that is not the `next` of a page.
    """
    total = session.scalar(select(func.count()).select_from(query.order_by(None).subquery()))
    columns = tuple_(*key)
    if after:
        seen = tuple_(*_parse(after, len(key)))
        query = query.where(columns < seen if newest_first else columns > seen)
    order = [column.desc() if newest_first else column for column in key]
    rows = session.execute(query.order_by(*order).limit(limit + 1)).all()
    last = rows[limit - 1][0] if len(rows) > limit else None
    cursor = "-".join(str(getattr(last, column.key)) for column in key) if last else None
    return Page(rows[:limit], total or 0, cursor)


def page_of_list(rows: Sequence[object], *, after: str = "", limit: int) -> Page:
    """Return a page of a short list in memory; the cursor is an index."""
    [first] = _parse(after, 1) if after else [0]
    end = first + limit
    return Page(rows[first:end], len(rows), str(end) if end < len(rows) else None)


def _parse(cursor: str, length: int) -> list[int]:
    parts = cursor.split("-")
    if all(part.isdecimal() and len(part) < 20 for part in parts) and len(parts) == length:
        numbers = [int(part) for part in parts]
        if max(numbers) <= LARGEST_COUNT:
            return numbers
    raise Invalid({"after": f"{cursor[:100]!r} is not valid; allowed: the next of a page"})
