"""Artifacts of runs, files of the log, and diagnoses."""

from collections.abc import Collection

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.errors import NotFound
from db.paging import Page, page
from db.queue.queue import lock_active_attempt
from db.runs import runs
from db.tables import Artifact, Diagnosis
from halfstep.telemetry import events

#: Name prefix of the files of a run's output; artifacts of recipes cannot have it.
LOG = "log/"
IS_LOG = Artifact.name.startswith(LOG)


def log_artifact(part: events.LogPart) -> events.Artifact:
    """Return a part of the log as an artifact; its name begins with LOG."""
    return events.Artifact(
        step=0,
        name=LOG + part.path.rpartition("/")[2],
        path=part.path,
        size_bytes=part.size_bytes,
        sha256=part.sha256,
    )


def publish(session: Session, run_id: int, attempt: int, event: events.Artifact, key: str) -> None:
    """Record an artifact that is stored under a key. Raises StaleAttempt.

    The key is empty while the file exists only on the training machine.
    """
    run = lock_active_attempt(session, run_id, attempt)
    identity = {"run_id": run_id, "step": event.step, "name": event.name}
    row = session.scalar(select(Artifact).filter_by(**identity))
    if row is None:
        row = Artifact(**identity)
        session.add(row)
    is_same, before = row.sha256 == event.sha256, row.stored_bytes
    row.key, row.path = key or (row.key if is_same else ""), event.path
    row.size_bytes, row.sha256 = event.size_bytes, event.sha256
    run.stored_bytes += row.stored_bytes - before
    run.revision += 1
    run.files_revision = row.revision = run.revision


def attach(
    session: Session, run_id: int, name: str, *, key: str, size_bytes: int, sha256: str
) -> Artifact:
    """Record a stored file that a user added to a run, at step 0. Idempotent by its name."""
    run = runs.get(session, run_id, lock=True)
    row = session.scalar(select(Artifact).filter_by(run_id=run_id, step=0, name=name))
    if row is not None:
        return row
    run.revision += 1
    run.files_revision = run.revision
    run.stored_bytes += size_bytes
    row = Artifact(run_id=run_id, step=0, name=name, key=key, size_bytes=size_bytes, sha256=sha256)
    row.revision = run.revision
    session.add(row)
    session.flush()
    return row


def newest(session: Session, run_id: int, *, most: int) -> list[Artifact]:
    """List a run's last artifacts, newest step first."""
    query = select(Artifact).where(Artifact.run_id == run_id, ~IS_LOG)
    query = query.order_by(Artifact.step.desc(), Artifact.name).limit(most)
    return list(session.scalars(query))


def log_files(session: Session, run_id: int) -> list[Artifact]:
    """List the files of a run's log in order of output."""
    query = select(Artifact).where(Artifact.run_id == run_id, IS_LOG)
    return list(session.scalars(query.order_by(Artifact.name)))


def log_bytes(session: Session, run_id: int) -> int:
    """Return the size of a run's log files in bytes."""
    query = select(func.sum(Artifact.size_bytes)).where(Artifact.run_id == run_id, IS_LOG)
    return int(session.scalar(query) or 0)


def count(session: Session, run_id: int) -> int:
    """Return how many artifacts a run has."""
    query = select(func.count()).select_from(Artifact).where(Artifact.run_id == run_id, ~IS_LOG)
    return session.scalars(query).one()


def page_of_run(session: Session, run_id: int, *, after: str = "", limit: int) -> Page:
    """Return a page of a run's artifacts, newest step first."""
    query = select(Artifact).where(Artifact.run_id == run_id, ~IS_LOG)
    key = (Artifact.step, Artifact.id)
    return page(session, query, key, after=after, limit=limit, newest_first=True)


def get(session: Session, run_id: int, artifact_id: int) -> Artifact:
    """Return one artifact of a run. Raises NotFound."""
    row = session.get(Artifact, artifact_id)
    if row is None or row.run_id != run_id:
        raise NotFound(f"Run {run_id} has no artifact {artifact_id}.")
    return row


def diagnoses(
    session: Session, run_id: int, *kinds: str, steps: Collection[int] | None = None
) -> list[Diagnosis]:
    """List a run's diagnoses of some kinds, in order of step: all, or those of some steps.

    kinds: such as histogram, replay, retry, shapes, schedule, spike or failed_diagnosis.
    """
    query = select(Diagnosis).where(Diagnosis.run_id == run_id, Diagnosis.kind.in_(kinds))
    if steps is not None:
        query = query.where(Diagnosis.step.in_(steps))
    return list(session.scalars(query.order_by(Diagnosis.step)))


def replays(session: Session, run_id: int, *, after: str = "", limit: int) -> Page:
    """Return a page of the replays of skipped steps, in order of step."""
    query = select(Diagnosis).where(Diagnosis.run_id == run_id, Diagnosis.kind == "replay")
    return page(session, query, (Diagnosis.step, Diagnosis.id), after=after, limit=limit)
