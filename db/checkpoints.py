"""Files that runs leave behind, to resume from and to download."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from db.database import now
from db.errors import NotFound
from db.queue import held
from db.tables import Checkpoint, Request


def publish(
    session: Session, run_id: int, attempt: int, event: dict[str, Any], keys: Sequence[str]
) -> None:
    """Record the files of one checkpoint event, which lie in the store under keys by now.

    Publishing again, after a resume or a replayed spool, replaces the rows. Raises Fenced.
    """
    run = held(session, run_id, attempt)
    for file, key in zip(event["files"], keys, strict=True):
        row = session.scalar(
            select(Checkpoint).where(
                Checkpoint.run_id == run_id,
                Checkpoint.step == event["step"],
                Checkpoint.kind == file["kind"],
            )
        )
        if row is None:
            row = Checkpoint(run_id=run_id, step=event["step"], kind=file["kind"])
            session.add(row)
        row.attempt, row.key, row.reason = attempt, key, event["reason"]
        row.size_bytes, row.sha256 = file["size_bytes"], file["sha256"]
    if event.get("request"):
        session.execute(
            update(Request)
            .where(Request.run_id == run_id, Request.id <= event["request"])
            .where(Request.obeyed_at.is_(None))
            .values(obeyed_at=now())
        )
    run.revision += 1


def of_run(session: Session, run_id: int) -> list[Checkpoint]:
    """List a run's files, newest step first."""
    query = select(Checkpoint).where(Checkpoint.run_id == run_id)
    return list(session.scalars(query.order_by(Checkpoint.step.desc(), Checkpoint.kind)))


def get(session: Session, run_id: int, checkpoint_id: int) -> Checkpoint:
    """Return one file of a run. Raises NotFound."""
    row = session.get(Checkpoint, checkpoint_id)
    if row is None or row.run_id != run_id:
        raise NotFound(f"Run {run_id} has no checkpoint {checkpoint_id}.")
    return row


def to_resume(session: Session, run_id: int) -> list[Checkpoint]:
    """List whole states from the newest back: the first that is sound is the one to resume."""
    return [row for row in of_run(session, run_id) if row.kind == "checkpoint"]
