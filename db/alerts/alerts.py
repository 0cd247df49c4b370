"""Alerts of a user and the number of unread ones."""

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from db.clock import now
from db.paging import Page, page
from db.tables import Alert, User

#: Maximum count that is shown.
MOST_COUNTED = 100


def list_alerts(session: Session, user: User, *, after: str = "", limit: int) -> Page:
    """Return a page of a user's alerts, newest first."""
    query = select(Alert).where(Alert.user_id == user.id)
    return page(session, query, (Alert.id,), after=after, limit=limit, newest_first=True)


def unread(session: Session, user: User) -> int:
    """Count a user's unread alerts, up to a hundred."""
    query = select(Alert.id).where(Alert.user_id == user.id, Alert.read_at.is_(None))
    some = query.order_by(Alert.id.desc()).limit(MOST_COUNTED).subquery()
    return session.scalar(select(func.count()).select_from(some)) or 0


def newer(session: Session, user: User, than: int, *, most: int) -> list[Alert]:
    """Return a user's newest unread alerts after a given one, oldest first."""
    query = select(Alert).where(Alert.user_id == user.id, Alert.read_at.is_(None))
    query = query.where(Alert.id > than).order_by(Alert.id.desc()).limit(most)
    return list(session.scalars(query))[::-1]


def read(session: Session, user: User, up_to: int) -> None:
    """Mark a user's alerts up to the given one as read."""
    mine = (Alert.user_id == user.id, Alert.read_at.is_(None), Alert.id <= up_to)
    session.execute(update(Alert).where(*mine).values(read_at=now()))
