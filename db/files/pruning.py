"""Pruning of files by retention rules: preview and deletion, run by run.

Only of ended runs that no other run started from and that are not tagged `pinned`. Rows are deleted
first: an interruption leaves files without a row, which `halfstep storage check --mend` deletes.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from obstore.store import ObjectStore
from sqlalchemy import ColumnElement, and_, delete, exists, false, func, not_, or_, select
from sqlalchemy.orm import Session, aliased

from db import clock
from db.clock import now
from db.database import Database
from db.errors import StepsNotConverted
from db.files import artifacts, checkpoints
from db.files.object_store import delete_files
from db.runs import run_metadata, runs
from db.runs.trash import DAY_SECONDS
from db.tables import ENDED, NOT_DELETED, Artifact, CheckpointFile, LogLine, Run, SystemSample

#: Nothing of a run with this tag is deleted.
PINNED = "pinned"


@dataclass(frozen=True)
class Rules:
    """Ages in days after which files are deleted; None: never."""

    checkpoint_days: float | None = None
    log_days: float | None = None


@dataclass(frozen=True)
class Pruning:
    """Files and rows of one run that are deleted."""

    run_id: int
    name: str
    steps: list[int]  # all checkpoint files of these steps
    stored_bytes: int
    log_lines: int
    samples: int

    def __bool__(self) -> bool:
        return bool(self.steps or self.log_lines or self.samples)

    @property
    def in_words(self) -> str:
        """Summary for the run's history."""
        kinds = (
            (len(self.steps), "step's checkpoints", "steps' checkpoints"),
            (self.log_lines, "log line", "log lines"),
            (self.samples, "sample of the machine", "samples of the machine"),
        )
        return ", ".join(f"{n:,} {one if n == 1 else many}" for n, one, many in kinds if n)


def plan(session: Session, rules: Rules) -> Iterator[Pruning]:
    """Yield the files that the rules would delete, by run."""
    for run_id in candidates(session, rules):
        if pruning := of_run(session, runs.get(session, run_id), rules):
            yield pruning


def candidates(
    session: Session, rules: Rules, projects: Collection[str] | None = None
) -> list[int]:
    """List the runs with files older than the rules, largest first. projects: only of these."""
    fork = aliased(Run)
    query = select(Run.id).where(Run.status.in_(ENDED), NOT_DELETED, or_(false(), *_has_old(rules)))
    is_used = exists().where(fork.parent_id == Run.id, checkpoints.uses_parent(fork))
    query = query.where(not_(is_used))
    if projects is not None:
        query = query.where(Run.project.in_(projects))
    return list(session.scalars(query.order_by(Run.stored_bytes.desc(), Run.id)))


def of_run(session: Session, run: Run, rules: Rules) -> Pruning:
    """Return the files and rows of an ended run to delete by the rules."""
    if PINNED in run_metadata.tags_of(run) or checkpoints.find_steps_started_from(session, run.id):
        return Pruning(run.id, run.name, [], 0, 0, 0)
    rows = _old_checkpoints(session, run, rules)
    has_old_log = _has_old_log(session, run, rules)
    log_files = artifacts.log_files(session, run.id) if has_old_log else []
    lines, samples = (
        (session.scalar(select(func.count()).where(table.run_id == run.id)) or 0)
        if has_old_log
        else 0
        for table in (LogLine, SystemSample)
    )
    return Pruning(
        run_id=run.id,
        name=run.name,
        steps=sorted({row.step for row in rows}),
        stored_bytes=sum(row.stored_bytes for row in [*rows, *log_files]),
        log_lines=lines,
        samples=samples,
    )


def prune(database: Database, store: ObjectStore, run_id: int, rules: Rules) -> Pruning:
    """Apply the rules to a run and record it in the run's history; return the deletions."""
    with database.writing() as session:
        run = runs.get(session, run_id, lock=True)
        pruning = of_run(session, run, rules)
        if not pruning:
            return pruning
        rows: list[CheckpointFile | Artifact] = [*_old_checkpoints(session, run, rules)]
        if _has_old_log(session, run, rules):
            rows += artifacts.log_files(session, run_id)
        keys = {row.key for row in rows if row.is_stored}
        for row in rows:
            session.delete(row)
        for table in (LogLine, SystemSample) if pruning.log_lines or pruning.samples else ():
            session.execute(delete(table).where(table.run_id == run_id))
        run.stored_bytes -= pruning.stored_bytes
        runs.remark(session, run, f"deleted because of their age: {pruning.in_words}")
        run.files_revision = run.revision
        keys -= _named(session, run_id)
    delete_files(store, sorted(keys))
    return pruning


def _has_old(rules: Rules) -> Iterator[ColumnElement[bool]]:
    """Yield a condition for each rule that an ended run has something to delete."""
    if rules.checkpoint_days is not None:
        later = aliased(CheckpointFile)
        is_old = CheckpointFile.created_at < now() - rules.checkpoint_days * DAY_SECONDS
        is_last = ~exists().where(later.run_id == Run.id, later.step > CheckpointFile.step)
        yield exists().where(CheckpointFile.run_id == Run.id, is_old, ~is_last)
    if rules.log_days is not None:
        is_old = Run.ended_at < now() - rules.log_days * DAY_SECONDS
        of_run = (exists().where(table.run_id == Run.id) for table in (LogLine, SystemSample))
        yield and_(is_old, or_(*of_run))


def _has_old_log(session: Session, run: Run, rules: Rules) -> bool:
    return rules.log_days is not None and _is_older(session, run.ended_at, rules.log_days)


def _is_older(session: Session, moment: float | None, days: float) -> bool:
    return moment is not None and moment < clock.current(session) - days * DAY_SECONDS


def _old_checkpoints(session: Session, run: Run, rules: Rules) -> list[CheckpointFile]:
    """List the old checkpoint files, except those of the last and of the best step.

    None while the run is converted after an upgrade: the best is unknown.
    """
    if rules.checkpoint_days is None:
        return []
    rows = checkpoints.of_run(session, run.id)
    steps = sorted({row.step for row in rows})
    policy = run.settings.get("checkpoints") or {}
    try:
        retained = {*steps[-1:], *checkpoints.best(session, run.id, steps, policy)}
    except StepsNotConverted:
        return []
    latest = clock.current(session) - rules.checkpoint_days * DAY_SECONDS
    return [row for row in rows if row.step not in retained and row.created_at < latest]


def _named(session: Session, run_id: int) -> set[str]:
    """Return the keys that rows still name: two files of the same content share a key."""
    session.flush()
    return {
        key
        for table in (CheckpointFile, Artifact)
        for key in session.scalars(select(table.key).where(table.run_id == run_id))
    }
