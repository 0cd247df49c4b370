"""The trash: deleted runs, hidden from every list, that can be restored for some days.

Only ended runs can be deleted. `db.files.erasure` erases them after those days.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from db import clock
from db.clock import now
from db.errors import Conflict, NotFound
from db.paging import Page, page
from db.runs import runs
from db.tables import ENDED, IN_TRASH, NOT_DELETED, RECIPE, Run, Status, User

DAY_SECONDS = 86_400.0
#: Listed so that an index finds these few runs.
UNENDED = [status for status in Status if status not in ENDED]
_CONTENTS = (func.count(Run.id), func.coalesce(func.sum(Run.stored_bytes), 0))


@dataclass(frozen=True)
class Contents:
    """Number of runs in the trash, including those being erased, and size of their files."""

    runs: int
    stored_bytes: int


def delete(session: Session, run_id: int, user: User) -> Run:
    """Move an ended run to the trash. Idempotent.

    Raises Conflict if it has not ended, or if a run that has not ended starts from its checkpoints.
    """
    run = _lock(session, run_id)
    if run.deleted_at is not None:
        return run
    if run.status not in ENDED:
        text = f"Run {run_id} is {run.status}: only one that has ended can be deleted."
        raise Conflict(f"{text} Cancel it first.")
    if dependent := _dependent(session, run_id):
        text = (
            f"Run {run_id} cannot be deleted: run {dependent.id} ({dependent.status}) starts from"
        )
        raise Conflict(f"{text} its checkpoints. Cancel that one first, or wait for its end.")
    run.deleted_at = clock.current(session)
    runs.remark(session, run, f"deleted by {user.name}")
    return run


def restore(session: Session, run_id: int, user: User) -> Run:
    """Restore a run from the trash. Idempotent.

    Raises Conflict if it is being erased.
    """
    run = _lock(session, run_id)
    if run.deleted_at is None:
        return run
    if run.erasing:
        raise Conflict(f"Run {run_id} is being deleted permanently and can no longer be restored.")
    run.deleted_at = None
    runs.remark(session, run, f"restored by {user.name}")
    return run


def erase(session: Session, run_id: int, user: User) -> Run:
    """Mark a run in the trash for immediate erasure; it can no longer be restored.

    Raises Conflict if it is not in the trash.
    """
    run = _lock(session, run_id)
    if run.deleted_at is None:
        text = f"Run {run_id} is not in the trash: only a deleted run can be deleted permanently."
        raise Conflict(text)
    if not run.erasing:
        run.erasing = True
        runs.remark(session, run, f"deleted permanently by {user.name}")
    return run


def restorable(session: Session, run_id: int | None) -> Run | None:
    """Return a run if it is in the trash and can be restored, else None."""
    run = session.get(Run, run_id) if run_id is not None else None
    return run if run and run.deleted_at is not None and not run.erasing else None


def contents(session: Session) -> Contents:
    """Return the number of runs in the trash and the size of their files."""
    count, size = session.execute(select(*_CONTENTS).where(IN_TRASH)).one()
    return Contents(count, int(size))


def newest_and_contents(
    session: Session, numbers: Sequence[ColumnElement[Any]] = ()
) -> tuple[int, float, Contents, list[Any]]:
    """Return the newest run id, the database's time, the contents of the trash, and numbers.

    The id is that of the newest run outside the trash, or 0.  numbers: further expressions to
    select by the same query.
    """
    newest = select(func.coalesce(func.max(Run.id), 0)).where(NOT_DELETED).scalar_subquery()
    binned = (select(column).where(IN_TRASH).scalar_subquery() for column in _CONTENTS)
    row = session.execute(select(newest, now(), *binned, *numbers)).one()
    newest_id, moment, count, size, *others = row
    return newest_id, moment, Contents(count, int(size)), others


def list_runs(session: Session, *, after: str = "", limit: int) -> Page:
    """Return a page of the runs in the trash with their owners' names, newest first."""
    query = select(Run, User.name).join(User, User.id == Run.owner_id).where(IN_TRASH)
    return page(session, query, (Run.id,), after=after, limit=limit, newest_first=True)


def get_erasure_time(run: Run, days: float) -> float:
    """Return the time from which a run in the trash is erased."""
    return (run.deleted_at or 0.0) + days * DAY_SECONDS


def _lock(session: Session, run_id: int) -> Run:
    run = session.get(Run, run_id, with_for_update=True)
    if run is None:
        raise NotFound(f"There is no run {run_id}.")
    if run.erased_at is not None:
        raise NotFound(runs.GONE.format(run_id))
    return run


def _dependent(session: Session, run_id: int) -> Run | None:
    """Return a run not yet ended that starts from this run's checkpoint or weights."""
    weights = Run.config["weights"]["run"].as_integer() == run_id
    starts = (Run.parent_id == run_id) | ((Run.source == RECIPE) & weights)
    query = select(Run).where(Run.status.in_(UNENDED), starts)
    return session.scalar(query.order_by(Run.id).limit(1))
