"""What live streams send: changes of a run, and changed rows of the list of runs."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy.orm import Session

from app.live import Look, News
from app.rendering import fragment
from app.rows import CheckpointFile, Event, LogLine, MetricPoint
from app.summary import summarise
from db import artifacts, findings, history, runs, series, waiting, windows
from db.database import Database
from db.settings import Settings
from db.tables import LARGEST_ID, Artifact, ScalerEvent
from db.waiting import Queue

#: Rows of the table of skipped steps; the API has all of them.
SKIPS_SHOWN = 200
#: Rows that one list page can follow: those that it showed, and new ones that came in since.
ROWS_FOLLOWED = 200
PLACES_SECONDS = 3.0


@dataclass(frozen=True)
class SkippedStep:
    """A skip; replay and retry are events as the spool has them."""

    skip: ScalerEvent
    replay: dict[str, Any] | None
    retry: dict[str, Any] | None

    @property
    def culprits(self) -> list[dict[str, Any]]:
        """The parameters that overflowed, counted if not by the step, then by its exact replay."""
        replayed = self.replay.get("culprits", []) if self.replay and self.replay["exact"] else []
        counted = [each for each in replayed if each["optimizer"] == self.skip.optimizer]
        has_counts = any("inf" in each for each in self.skip.culprits)
        return self.skip.culprits if has_counts or not counted else counted


def of_run(database: Database, settings: Settings, run_id: int) -> Look:
    """Return what looks for news of one run."""

    def look(cursor: str) -> News | None:
        with database.reading() as session:
            changes = series.changes(session, run_id, series.Cursor.parse(cursor))
            if changes is None:
                return None
            run, owner = runs.get_owned(session, run_id)
            summary = summarise(session, run, owner, settings)
            statuses = runs.statuses(session, run_id)
            is_told = changes.events or changes.diagnoses or summary.is_over
            skipped = skipped_steps(session, run_id) if is_told else None
            found = findings.of_run(session, run) if is_told else None
            files = artifacts.of_run(session, run_id)
            forks = runs.forks(session, run_id)
            resumptions = history.resumptions(session, run_id)
            metrics = windows.measured(session, run_id) if changes.metrics else None
        fragments = {
            "facts": fragment("_facts.html", run=summary),
            "problem": fragment("_problem.html", run=summary, statuses=statuses),
            "history": fragment("_history.html", statuses=statuses),
            "checkpoints": fragment(
                "_checkpoints.html", run=summary, files=changes.checkpoints, forks=forks
            ),
            "artifacts": fragment("_artifacts.html", run=summary, artifacts=by_step(files)),
        }
        if skipped is not None:
            fragments["skips"] = fragment("_skips.html", run=summary, skipped=skipped)
        if found is not None:
            fragments["findings"] = fragment("_findings.html", findings=found)
        if metrics is not None:
            fragments["metrics"] = fragment("_metrics.html", metrics=metrics)
        message = {
            "run": summary.model_dump(mode="json"),
            "steps": changes.steps if changes.steps["step"] else None,
            "events": _dumped(Event, changes.events),
            "resumptions": resumptions,
            "metrics": _dumped(MetricPoint, changes.metrics),
            "log": _dumped(LogLine, changes.log_lines),
            "checkpoints": _dumped(CheckpointFile, changes.checkpoints),
            "has_histograms": any(row.kind == "histogram" for row in changes.diagnoses),
            "fragments": fragments,
        }
        return News(json.dumps(message, separators=(",", ":")), str(changes.cursor))

    return look


def skipped_steps(session: Session, run_id: int) -> list[SkippedStep]:
    """Return the latest skips, newest first, each with what its replay and its retry found."""
    replays, retries = (
        {row.step: row.content for row in artifacts.diagnoses(session, run_id, kind)}
        for kind in ("replay", "retry")
    )
    return [
        SkippedStep(skip, replays.get(skip.step), retries.get(skip.step))
        for skip in series.skips(session, run_id, most=SKIPS_SHOWN)
    ]


def by_step(files: list[Artifact]) -> dict[int, list[Artifact]]:
    """Return the files of each step, newest step first."""
    found: dict[int, list[Artifact]] = {}
    for file in files:
        found.setdefault(file.step, []).append(file)
    return found


def _dumped(model: Any, rows: list[Any]) -> list[dict[str, Any]]:
    return [model.model_validate(row).model_dump(mode="json") for row in rows]


def of_list(
    database: Database, settings: Settings, clock: Callable[[], float] = time.monotonic
) -> Look:
    """Return what looks for changed rows of the list.

    A cursor is the newest run's id and the marks of those runs that its page shows and that had
    not ended. However long the queue is, a look costs what a page shows; the places in the queue,
    which one claim changes for all, are read anew every few seconds.
    """
    places: dict[int, int] = {}
    read_at = -math.inf

    def look(cursor: str) -> News | None:
        nonlocal places, read_at
        seen_newest, seen = _parse(cursor)
        with database.reading() as session:
            if clock() - read_at >= PLACES_SECONDS:
                places, read_at = waiting.places(session), clock()
            newest = runs.newest_id(session)
            new = set(range(max(seen_newest, newest - 50) + 1, newest + 1))
            marks = waiting.live_marks(session, seen.keys() | new, places)
            now = list_cursor(newest, marks)
            if now == cursor:
                return None
            changed = {run_id for run_id, mark in marks.items() if seen.get(run_id) != mark}
            changed |= (seen.keys() - marks.keys()) | new
            queue = Queue.read(session)
            rows = {
                run.id: fragment(
                    "_row.html",
                    run=summarise(session, run, owner, settings, queue),
                    sparkline=series.sparkline(session, run),
                )
                for run, owner in runs.owned(session, changed)
            }
        return News(json.dumps({"newest": newest, "rows": rows}), now)

    return look


def list_cursor(newest: int, marks: dict[int, str]) -> str:
    """Return the cursor of somebody who sees the list as it is."""
    followed = islice(marks.items(), ROWS_FOLLOWED)
    return ".".join((str(newest), *(f"{run_id}-{mark}" for run_id, mark in followed)))


def _parse(cursor: str) -> tuple[int, dict[int, str]]:
    newest, *marks = cursor.split(".")[: ROWS_FOLLOWED + 1]
    pairs = (mark.partition("-") for mark in marks)
    seen = {_number(run_id): mark for run_id, _, mark in pairs if _number(run_id)}
    return _number(newest), seen


def _number(text: str) -> int:
    """Read an id out of a cursor; 0 if it is none."""
    number = int(text) if text.isdecimal() and len(text) < 19 else 0
    return number if number <= LARGEST_ID else 0
