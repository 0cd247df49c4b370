"""What was written down of who changed what; app.deeds writes it."""

from collections.abc import Iterator

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.paging import Page, page
from db.tables import Deed, User


def listed(session: Session, *, run_id: int | None = None, after: str = "", limit: int) -> Page:
    """Return a page of deeds with the name of who did each, newest first. run_id: done to it."""
    query = select(Deed, User.name).join(User, User.id == Deed.user_id)
    if run_id is not None:
        query = query.where(Deed.run_id == run_id)
    return page(session, query, (Deed.id,), after=after, limit=limit, newest_first=True)


def all_of_them(session: Session) -> Iterator[tuple[Deed, str]]:
    """Return every deed with the name of who did it, oldest first, some at a time."""
    query = select(Deed, User.name).join(User, User.id == Deed.user_id).order_by(Deed.id)
    rows = session.execute(query.execution_options(yield_per=500))
    return ((deed, name) for deed, name in rows)
