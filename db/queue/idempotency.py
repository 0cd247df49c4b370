"""Idempotency keys: a request that is sent again has no second effect."""

import hashlib
import json
from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.access import permissions
from db.errors import Invalid
from db.tables import Run, Sweep, User

Row = TypeVar("Row", Run, Sweep)


def hash_of_request(request: object) -> str:
    """Return the SHA-256 of a request's values, independent of key order."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def made_by(
    session: Session, table: type[Row], owner: User, key: str | None, request_hash: str
) -> Row | None:
    """Return the row that the same request created before; a concurrent request waits.

    Raises Invalid if the key was used for another request, or if its row is not visible to the
    session.
    """
    if key is None:
        return None
    session.execute(select(User.id).where(User.id == owner.id).with_for_update(key_share=True))
    mine = (table.owner_id == owner.id, table.idempotency_key == key)
    with permissions.lift_limit(session):
        row = session.scalar(select(table).where(*mine))
    if row is None:
        return None
    is_seen = session.scalar(select(table.id).where(*mine)) is not None
    if not is_seen or row.request_hash not in (None, request_hash):
        text = f"{key[:100]!r} was already used for another request"
        raise Invalid({"idempotency_key": f"{text}; allowed: the same request, or another key"})
    return row
