"""Freezes runs, and reads everything that depends on their steps."""

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, Self

import numpy as np
import obstore
from numpy.typing import NDArray
from obstore.store import LocalStore, ObjectStore
from sqlalchemy import func, or_, select, update
from sqlalchemy.orm import Session

from app.runs import diagnosis_evidence, key_figures
from db.alerts import alert_facts
from db.database import Database
from db.files import step_files
from db.files.step_files import NAMES, StepFiles
from db.health import causes, input_bound, losses, scaling_health
from db.queue import queue
from db.runs import history
from db.tables import FLAGGED, FrozenSteps, Run, Status, Step
from db.telemetry import export, freeze, pyramid, series, windows


@contextmanager
def reading_files(database: Database, store: ObjectStore) -> Iterator[Database]:
    """Yield a second connection to a database, which reads files of this store."""
    url = database.engine.url.render_as_string(hide_password=False)
    other = Database(url, StepFiles(lambda: store))
    yield other
    other.dispose()


def end(database: Database, run: Run) -> None:
    """End the current attempt of a run."""
    with database.writing() as session:
        queue.end(session, run.id, run.attempt, Status.FINISHED)


def begin_again(database: Database, run: Run) -> Run:
    """Begin another attempt, as the uploader of a watched run does."""
    with database.writing() as session:
        session.execute(
            update(Run)
            .where(Run.id == run.id)
            .values(status=Status.RUNNING, attempt=Run.attempt + 1, resumed_step=None)
        )
    with database.reading() as session:
        return session.get_one(Run, run.id)


def lose(store: ObjectStore, key: str) -> None:
    """Delete a file of a store that has others: one without files is an outage."""
    obstore.put(store, "steps/0/of-another-run.parquet", b"")
    obstore.delete(store, key)


def freeze_run(database: Database, store: ObjectStore, run: Run, folder: Path) -> FrozenSteps:
    """Freeze a run and return the row of its file."""
    freeze.freeze(database, store, run.id, folder=folder, stopping=Event())
    with database.reading() as session:
        return session.scalars(select(FrozenSteps).where(FrozenSteps.run_id == run.id)).one()


def rows_of(database: Database, run: Run, *, are_flagged: bool = False) -> int:
    """Count the rows of a run's steps. are_flagged: only those that a freeze always keeps."""
    with database.reading() as session:
        rows = select(func.count()).where(Step.run_id == run.id)
        count = session.scalar(rows.where(or_(*FLAGGED.values())) if are_flagged else rows)
        return count or 0


def _losses(session: Session, run: Run) -> list[Any]:
    first = causes._first_nonfinite_loss(session, run)
    return [
        causes._first_nonfinite_step(session, run, first),
        first and losses.growth_before(session, run, first),
        losses.lost_losses(session, run),
        losses.risen(session, run),
    ]


def everything(database: Database, run_id: int, zooms: list[tuple[int, int]]) -> dict[str, Any]:
    """Return what each reader of steps returns, with exact numbers."""
    with database.reading() as session:
        run = session.get_one(Run, run_id)
        readers: dict[str, Callable[[], Any]] = {
            "raw": lambda: series.raw_steps(session, run_id, most=10**6),
            "few": lambda: series.raw_steps(session, run_id, first=3, last=90, most=20),
            "flagged": lambda: history.flagged_steps(session, run_id, limit=10**6),
            "cursor": lambda: history.cursor_now(session, run),
            "skips": lambda: series.first_skip_of_latest(session, run_id, most=5),
            "health": lambda: scaling_health.health_of_runs(session, [run]),
            "data_waits": lambda: input_bound.data_waits(session, [run_id]),
            "facts": lambda: [
                sorted(read(session, [run]).items()) for read in alert_facts._READERS.values()
            ],
            "losses": lambda: _losses(session, run),
            "evidence": lambda: diagnosis_evidence.diagnosis_evidence(session, run),
            "figures": lambda: key_figures.key_figures(session, run),
            "scaler": lambda: key_figures.scaler_card(session, run),
            "skips counted": lambda: pyramid.count_skips(session.connection(), run_id),
            "changes": lambda: _changes(session, run_id),
            "resumed": lambda: causes._resumed(session, run),
        }
        found = {name: repr(read()) for name, read in readers.items()}
        for first, last in [*zooms, (None, None)]:
            for most in (32, 500):
                limits: dict[str, Any] = {"first": first, "last": last, "most": most}
                window = windows.windows_of(session, [run_id], **limits)
                found[json.dumps(limits)] = repr(window)
                named = windows.window(session, run_id, **limits, names={"grad_norm_clipped"})
                found[f"named {json.dumps(limits)}"] = repr(named)
    for write in (export.as_csv, export.as_parquet):
        found[write.__name__] = repr(b"".join(write(database, run_id, "steps")))
    return found


def _changes(session: Any, run_id: int) -> Any:
    changes = series.changes(session, run_id, series.Cursor(), most=50)
    return changes and (changes.steps, changes.cursor)


class Gate:
    """A store whose first request waits until it may pass."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.is_reached, self.is_open = Event(), Event()

    def open_store(self) -> ObjectStore:
        """Return the store, for StepFiles."""
        self.is_reached.set()
        assert self.is_open.wait(60)
        return self._store


def change_meanwhile(database: Database, run_id: int) -> None:
    """Change a run from another connection; fails if a transaction has locked it."""
    with database.writing() as session:
        run = session.get_one(Run, run_id, with_for_update={"nowait": True})
        run.name = "changed meanwhile"


class StopsLate(Event):
    """Is set after some pauses."""

    def __init__(self, pauses: int) -> None:
        super().__init__()
        self._pauses = pauses

    def wait(self, timeout: float | None = None) -> bool:
        self._pauses -= 1
        return self._pauses < 0


class Freezer:
    """Freezes runs in processes that are killed at some point, into a folder."""

    def __init__(self, url: str, folder: Path) -> None:
        self.store = LocalStore(folder)
        # Forks for each run, from a process that has loaded everything and has no threads.
        command = [sys.executable, "-m", "tests.db.telemetry.killed_freeze", url, str(folder)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.communicate()

    def freeze(self, run_id: int, point: int | None) -> int:
        """Freeze a run; return the number of points, or -9 if killed at the given one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{run_id} {point or 0}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def file_of_steps() -> bytes:
    """Return a file with one step."""
    sink = io.BytesIO()
    columns: dict[str, NDArray[Any]] = {name: np.zeros(1, np.int64) for name in NAMES}
    columns |= {name: np.ones(1) for name in (*step_files.SHORT, "lr", "data_us")}
    columns[step_files.SUMMARIES] = pyramid.packed_lowest(columns)
    step_files.write(sink, lambda: [columns])
    return sink.getvalue()
