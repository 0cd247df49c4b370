"""What cannot be read of a run, and the mark that lists, comparisons and clients show of it.

`find` decides whether a run is damaged. Its steps, metrics and files are too many to read for a
list, so `check` keeps the answer in `runs.damage`.
"""

from collections.abc import Collection
from typing import NamedTuple

from obstore.store import ObjectStore
from sqlalchemy import select
from sqlalchemy.orm import Session

from db import clock
from db.database import Database
from db.files import storage
from db.files.storage import DamagedFile
from db.tables import Run, StepConversion
from db.telemetry import damage, damage_search
from db.telemetry.damage import Damage
from halfstep.number_formats import count


class RunDamage(NamedTuple):
    """Steps, metrics and files of a run that cannot be read."""

    run_id: int
    steps: list[Damage]  # and metrics
    files: list[DamagedFile]

    @property
    def text(self) -> str:
        """All of it in words; empty if the run is whole."""
        files = storage.describe_damaged_files(self.run_id, self.files)
        return " ".join(filter(None, [damage.describe(self.steps), files]))

    @property
    def mark(self) -> str:
        """The text without names of files, which not all who see the run may see."""
        lost = f"{count(len(self.files))} file{'s' if len(self.files) > 1 else ''}"
        text = f"Missing or damaged in run {self.run_id}: {lost}." if self.files else ""
        return " ".join(filter(None, [damage.describe(self.steps), text]))


def find(
    session: Session, store: ObjectStore, run_id: int, *, reads_files: bool = True
) -> RunDamage:
    """Return what cannot be read of a run; reads all its steps and metrics.

    reads_files: compares files in the data folder with their SHA-256, up to a limit.
    """
    steps = damage_search.find_in_run(session.connection(), run_id)
    files = storage.find_damaged_files(session, store, run_id, reads=reads_files)
    return RunDamage(run_id, steps, files)


def check(
    database: Database, store: ObjectStore, run_id: int, *, reads_files: bool = False
) -> str | None:
    """Mark a run as damaged or whole, and as checked; return its mark if that is new.

    reads_files: as of `find`; files of a marked run are always read.
    """
    with database.reading() as session:
        run = session.get(Run, run_id)
        is_waiting = session.get(StepConversion, run_id) is not None  # its page says so
        if run is None or run.erased_at is not None or is_waiting:
            return None
        earlier = run.damage
        mark = find(session, store, run_id, reads_files=reads_files or bool(earlier)).mark
    is_new = mark != earlier
    if is_new:
        with database.reading() as session:  # a file may have been deleted after its row was read
            if find(session, store, run_id).mark != mark:
                damage.suspect(run_id)
                return None
    with database.writing() as session:
        run = session.get_one(Run, run_id, with_for_update=True)
        run.damage, run.damage_checked_at = mark, clock.current(session)
        run.revision += is_new
    return mark if is_new else None


def list_due(session: Session, interval: float, limit: int) -> list[int]:
    """Return runs that were not checked for some seconds, the longest unchecked first."""
    is_waiting = select(StepConversion.run_id).where(StepConversion.run_id == Run.id).exists()
    is_due = Run.damage_checked_at < clock.current(session) - interval
    query = select(Run.id).where(is_due, Run.erased_at.is_(None), ~is_waiting)
    return list(session.scalars(query.order_by(Run.damage_checked_at, Run.id.desc()).limit(limit)))


def check_all(database: Database, store: ObjectStore, run_ids: Collection[int]) -> None:
    """Mark these runs, and those that are marked already, as damaged or whole."""
    with database.reading() as session:
        marked = session.scalars(select(Run.id).where(Run.damage != "")).all()
    for run_id in sorted({*marked, *run_ids}):
        check(database, store, run_id, reads_files=True)
