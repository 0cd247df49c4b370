"""Requests that carry a key, so that one which is sent again does nothing twice."""

from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.tables import Run, Sweep, User

Row = TypeVar("Row", Run, Sweep)


def made_by(session: Session, table: type[Row], owner: User, key: str | None) -> Row | None:
    """Return what a request of this key has made before; of two at once the second waits."""
    if key is None:
        return None
    session.execute(select(User.id).where(User.id == owner.id).with_for_update(key_share=True))
    mine = (table.owner_id == owner.id, table.idempotency_key == key)
    return session.scalar(select(table).where(*mine))
