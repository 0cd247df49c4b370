"""The audit log: reading, and events of commands; app.auth.audit records requests."""

from collections.abc import Iterator, Mapping, Set

from sqlalchemy import select
from sqlalchemy.orm import Session

from db import clock
from db.paging import Page, page
from db.tables import AuditEvent, User

DETAIL_CHARACTERS = 300
#: Address of commands that are executed on the server's machine.
TERMINAL = "terminal"


def note_typed(session: Session, command: str, *words: str) -> None:
    """Record a command on the server's machine."""
    detail = " ".join(filter(None, words))[:DETAIL_CHARACTERS]
    session.add(AuditEvent(action=f"halfstep {command}", detail=detail, address=TERMINAL))


def note_recipes(session: Session, worker: str, before: Set[str], after: Set[str]) -> None:
    """Record recipe files that a worker newly offers, and those that it no longer offers.

    `halfstep recipe add` and `remove` have no database: the worker reports their effect.
    """
    changes = {"recipe offered": after - before, "recipe withdrawn": before - after}
    for action, references in changes.items():
        for reference in sorted(references):
            detail = f"by worker {worker}: {reference}"[:DETAIL_CHARACTERS]
            session.add(AuditEvent(action=action, detail=detail, address=TERMINAL))


def list_events(
    session: Session,
    *,
    run_id: int | None = None,
    user_id: int | None = None,
    since: float | None = None,
    after: str = "",
    limit: int,
) -> Page:
    """Return a page of audit events with their users' names, newest first.

    run_id: only events of this run.  user_id: only by this user.  since: only from this time on.
    """
    query = select(AuditEvent, User.name).outerjoin(User, User.id == AuditEvent.user_id)
    if run_id is not None:
        query = query.where(AuditEvent.run_id == run_id)
    if user_id is not None:
        query = query.where(AuditEvent.user_id == user_id)
    if since is not None:
        query = query.where(AuditEvent.time >= since)
    return page(session, query, (AuditEvent.id,), after=after, limit=limit, newest_first=True)


def all_of_them(session: Session) -> Iterator[tuple[AuditEvent, str | None]]:
    """Yield all audit events with their users' names, oldest first, read in batches."""
    query = (
        select(AuditEvent, User.name)
        .outerjoin(User, User.id == AuditEvent.user_id)
        .order_by(AuditEvent.id)
    )
    rows = session.execute(query.execution_options(yield_per=500))
    return ((action, name) for action, name in rows)


def was_recorded(session: Session, fields: Mapping[str, object], *, seconds: float) -> bool:
    """Return whether an event with these fields was recorded within the last seconds."""
    same = [getattr(AuditEvent, name) == value for name, value in fields.items()]
    recent = select(AuditEvent.id).where(AuditEvent.time > clock.current(session) - seconds, *same)
    return session.scalar(recent.limit(1)) is not None
