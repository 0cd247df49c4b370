"""Messages of live streams: changes of a run, and changed rows of the list of runs."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any
from zlib import crc32

import msgspec
from msgspec import UNSET, UnsetType
from sqlalchemy.orm import Session

from app.files.file_keys import file_keys, key_name
from app.html.rendering import fragment
from app.live.json_rows import CheckpointFileRow, Event, LogLine, MetricPoint
from app.live.live import Poll, Update, Watching
from app.live.messages import ListMessage, RunEnd, RunMessage, TableRows, encode
from app.live.run_states import RunStates
from app.runs import columns as list_columns
from app.runs import list_facts
from app.runs.columns import Column
from app.runs.key_figures import key_figures, scaler_card
from app.runs.list_facts import ListFacts
from app.runs.static_charts import static_charts
from app.runs.stepless_figures import stepless_figures
from app.runs.summary import RunSummary, summarise, summarise_all
from app.telemetry.environment import environment_of
from app.telemetry.metric_names import FIRST, Choice
from app.telemetry.suggested_actions import AdvisedFinding, advise
from db.access import permissions
from db.access.permissions import Grants
from db.database import Database
from db.errors import NotFound
from db.files import artifacts, checkpoints
from db.health.spikes import spikes
from db.names import natural_key
from db.queue import pending_reasons, run_control
from db.queue.pending_reasons import Queue
from db.runs import history, runs
from db.runs.runs import State
from db.settings import Settings
from db.tables import ENDED, LARGEST_ID, Run, ScalerEvent, Status
from db.telemetry import histograms, series, windows
from db.telemetry.telemetry import SPIKE
from halfstep.diagnosis.defect import Defect
from halfstep.diagnosis.statements import text_of
from halfstep.number_formats import count
from halfstep.telemetry.plain_json import JsonObject
from halfstep.telemetry.scaling_health import CALIBRATING_FOR

#: Rows of the table of skipped steps; the API has all of them.
SKIPS_SHOWN = 200
#: The latest files of a run that its page shows; the API returns all.
ARTIFACTS_SHOWN = 2000
#: Rows that one list page can follow: those that it showed, and new ones that came in since.
ROWS_FOLLOWED = 200
PLACES_SECONDS = 3.0
#: Precedes the mark of the header's facts in a cursor.
FACTS = "~"
#: Optional parts of a message: a page requests only what it draws.
PARTS = ("steps", "events", "metrics", "log", "checkpoints", "fragments")
#: Further fragments of a page that has not loaded plotly yet, only on request.
FIRST_CHARTS = "first_charts"


@dataclass(frozen=True)
class SkippedStep:
    """A skipped step."""

    skip: ScalerEvent
    replay: dict[str, Any] | None  # event of the spool
    retry: dict[str, object] | None  # event of the spool
    is_replaying: bool = False  # a replay is requested and not made yet
    calibrated_scale: float | None = None  # of a skip of the calibration: the scale that it found

    @property
    def key(self) -> str:
        """Key of the row."""
        return f"{self.skip.step}-{self.skip.optimizer}"

    @property
    def is_kept(self) -> bool:
        """Whether the step stays in the table, however many are skipped after it."""
        return self.is_replaying or self.replay is not None

    @property
    def replay_text(self) -> str:
        """The replay's measurement as text; "" for that of an earlier version."""
        defect = self.replay and self.replay.get("defect")
        return text_of(msgspec.convert(defect, Defect)) if defect else ""

    @property
    def overflows_by_scale(self) -> bool:
        """Whether a smaller loss scale would have removed the overflow, and no precision need."""
        defect = self.replay and self.replay.get("defect")
        return bool(defect and "smaller_scale" in defect.get("helps", ()))

    @property
    def culprits(self) -> list[dict[str, object]]:
        """The parameters that overflowed, with counts of the step or of its exact replay."""
        replayed = self.replay.get("culprits", []) if self.replay and self.replay["exact"] else []
        counted = [row for row in replayed if row["optimizer"] == self.skip.optimizer]
        has_counts = any("inf" in row for row in self.skip.culprits)
        return self.skip.culprits if has_counts or not counted else counted


def of_run(
    database: Database,
    settings: Settings,
    run_id: int,
    clock: Callable[[], float] = time.monotonic,
    parts: Collection[str] = PARTS,
    grants: Grants | None = None,
    chosen: Choice = FIRST,
) -> Poll:
    """Return the function that reads changes of one run.

    parts: those to send.  grants: of the viewer; None: everything.  chosen: the metrics to send.

    A message has the changed rows; whole tables only where rows were withdrawn. The pending reason
    of a queued run is read every few seconds.
    """
    mark, marked_at = 0, -math.inf
    findings: list[AdvisedFinding] | None = None  # as of the latest event

    def poll(cursor: str) -> Update | None:
        nonlocal mark, marked_at, findings
        since = series.Cursor.parse(cursor)
        with database.reading() as session:
            if grants is not None:
                permissions.limit(session, grants)
            try:
                run = runs.get(session, run_id)
            except NotFound:
                if not runs.states(session, [run_id]):
                    raise
                # Moved to another project: app.http.active_requests ends the stream.
                return None
            if run.status != Status.QUEUED:
                mark, marked_at = waiting_mark(session, run, settings), -math.inf
            elif clock() - marked_at >= PLACES_SECONDS:
                mark, marked_at = waiting_mark(session, run, settings), clock()
            names = chosen.named if chosen.limit == 0 else None
            changes = series.changes(session, run_id, since, waiting=mark, metrics=names)
            if changes is None:
                return _the_end(cursor) if run.status in ENDED else None
            has_new = bool(changes.events or changes.diagnoses or changes.is_over)
            if "fragments" in parts and (has_new or findings is None):
                findings = advise(session, changes.run)
            message = _message(
                session, settings, changes, parts, chosen, findings or [], has_new_findings=has_new
            )
        return Update(encode(message), str(changes.cursor), is_last=changes.is_over)

    return poll


def watching_run(states: RunStates, run_id: int) -> Watching:
    """Return the function that compares cursors with the run's state."""

    def watching(
        cursors: Collection[str], wake: Callable[[], object]
    ) -> AbstractContextManager[None]:
        parsed = map(series.Cursor.parse, cursors)
        seen = {(since.revision, since.waiting) for since in parsed}

        def has_changed(state: State | None) -> bool:
            if state is None or state.status in (Status.QUEUED, *ENDED):
                return True
            return seen != {(state.revision, state.silent_seconds)}

        return states.watching(run_id, has_changed, wake)

    return watching


def _the_end(cursor: str) -> Update:
    return Update(encode(RunEnd()), cursor, is_last=True)


def waiting_mark(session: Session, run: Run, settings: Settings) -> int:
    """Return a mark of the pending reason on a run's page, or of a watched run's silence."""
    if run.status != Status.QUEUED:
        is_watched = run.last_report_at is not None
        return runs.states(session, [run.id])[run.id].silent_seconds if is_watched else 0
    queue = Queue.read(session)
    reason = pending_reasons.reason(run, queue, **settings.per_user)
    return pending_reasons.mark(reason.text, queue.places.get(run.id, 0))


def _message(
    session: Session,
    settings: Settings,
    changes: series.Changes,
    parts: Collection[str],
    chosen: Choice,
    findings: Sequence[AdvisedFinding],
    *,
    has_new_findings: bool,
) -> RunMessage:
    run, owner = runs.get_with_owner(session, changes.run.id)
    summary = summarise(session, run, owner, settings)
    names = chosen.names(session, run.id) if changes.has_new_metrics else None
    metrics = [row for row in changes.metrics if names and row.name in {*names.names}]
    has_spikes = any(row.kind == SPIKE for row in changes.diagnoses)
    steps = changes.steps if changes.steps["step"] else None
    fragments: dict[str, str] | UnsetType = UNSET
    rows: dict[str, TableRows] | UnsetType = UNSET
    if "fragments" in parts:
        listed = names.page if names else ()
        fragments, rows = _fragments(session, summary, run, changes, listed, findings)
        if has_new_findings:
            html = fragment("run/_findings.html", run=summary, findings=findings)
            fragments["findings"] = html
        if FIRST_CHARTS in parts:
            fragments |= _first_charts(session, summary, run)
    return RunMessage(
        run=summary.model_dump(mode="json"),
        is_over=changes.is_over,
        resumptions=history.resumptions(session, run.id),
        labels=labels_mark(run),
        diagnosed=sorted({row.kind for row in changes.diagnoses}),
        spikes=spikes(session, run.id) if has_spikes else UNSET,
        steps=steps if "steps" in parts else UNSET,
        events=_dump(Event, changes.events) if "events" in parts else UNSET,
        metrics=_dump(MetricPoint, metrics) if "metrics" in parts else UNSET,
        has_all_metrics=changes.has_all_metrics,
        metric_names=names.every if names else UNSET,
        log=_dump(LogLine, changes.log_lines) if "log" in parts else UNSET,
        checkpoints=_dump(CheckpointFileRow, changes.checkpoints)
        if "checkpoints" in parts
        else UNSET,
        fragments=fragments,
        rows=rows,
    )


def _fragments(
    session: Session,
    summary: RunSummary,
    run: Run,
    changes: series.Changes,
    metrics: Sequence[str],
    findings: Sequence[AdvisedFinding],
) -> tuple[dict[str, str], dict[str, TableRows]]:
    """Return the page's fragments as a whole, and the changed rows of its tables.

    metrics: names of those in the table.
    """
    last = runs.last_change(session, run.id)
    fragments = {
        "status": fragment("run/_status_pill.html", run=summary),
        "facts": _facts(session, run, summary),
        "health": fragment("run/_health.html", run=summary, last=last, findings=findings),
        "skip_count": count(summary.skipped),
    }
    if changes.statuses:  # it has started, with a recorded environment, or ended
        environment = environment_of(session, run)
        fragments["environment"] = fragment(
            "run/_environment.html", run=summary, environment=environment
        )
    if summary.is_scaled or changes.events:
        scaler = scaler_card(session, run)
        for part in ("scaler_figures", *(["scaler"] if changes.events else [])):
            fragments[part] = fragment(f"run/_{part}.html", run=summary, scaler=scaler)
    is_listed = not summary.is_watched
    if is_listed and (changes.goes_back or any(row.kind == SPIKE for row in changes.diagnoses)):
        fragments["spikes"] = fragment(
            "run/_spikes.html", spikes=spikes(session, run.id), training_settings=run.settings
        )
    has_first_line = any(line.number == 1 for line in changes.log_lines)
    has_log = any(file.name.startswith(artifacts.LOG) for file in changes.artifacts)
    log_bytes = artifacts.log_bytes(session, run.id) if has_log or changes.is_over else 0
    if has_first_line or log_bytes:
        html = fragment("run/_log_link.html", run=summary, log_bytes=log_bytes, has_log=True)
        fragments["log_link"] = html
    if changes.has_new_files:
        files = checkpoints.of_run(session, run.id)
        fragments["latest_fork"] = fragment("run/_latest_fork.html", run=summary, files=files)
    for kind in histograms.MEASURED.keys() & {row.kind for row in changes.diagnoses}:
        measured = {kind: histograms.MEASURED[kind](session, run.id)}
        fragments[kind] = fragment(f"run/_{kind}.html", run=summary, **measured)
    if changes.goes_back:
        skipped = list_skipped_steps(session, run.id)
        fragments["skips"] = fragment("run/_skips.html", run=summary, skipped=skipped)
    tables = dict(_rows(session, summary, changes, metrics))
    return fragments, {name: rows for name, rows in tables.items() if name not in fragments}


def _facts(session: Session, run: Run, summary: RunSummary) -> str:
    """Return the tiles."""
    if stepless := stepless_figures(session, run):
        return fragment("run/_stepless_facts.html", run=summary, stepless=stepless)
    return fragment("run/_facts.html", run=summary, figures=key_figures(session, run))


def _first_charts(session: Session, summary: RunSummary, run: Run) -> dict[str, str]:
    """Return the charts and their legends that the page shows until plotly is loaded."""
    charts = static_charts(session, run, is_scaled=summary.is_scaled)
    parts = {"chart": "run/_static_chart.html", "lines": "run/_static_lines.html"}
    return {
        f"{part}_{row}": fragment(template, chart=chart)
        for part, template in parts.items()
        for row, chart in charts.items()
    }


def _rows(
    session: Session, run: RunSummary, changes: series.Changes, metrics: Sequence[str]
) -> Iterator[tuple[str, TableRows]]:
    """Yield the changed rows, by table."""
    if changes.statuses:
        html = fragment("run/_history.html", statuses=changes.statuses)
        yield "history", TableRows(html=html)
    if changes.has_new_files:
        files = checkpoints.of_run(session, run.id)
        html = fragment(
            "run/_checkpoints.html",
            run=run,
            files=changes.checkpoints,
            saves=checkpoints.saves(session, run.id) if changes.checkpoints else {},
            forks=runs.forks(session, run.id) if changes.checkpoints else [],
        )
        whole = [file for file in files if not file.is_shard]
        in_order = sorted(whole, key=lambda file: -file.step)
        yield "checkpoints", TableRows(html=html, keys=[str(file.id) for file in in_order])
        logged = file_keys(artifacts.newest(session, run.id, most=ARTIFACTS_SHOWN))
        changed = {key_name(file.name) for file in changes.artifacts}
        html = fragment(
            "run/_artifacts.html", run=run, keys=[key for key in logged if key.name in changed]
        )
        yield "artifacts", TableRows(html=html, keys=[key.name for key in logged])
    if steps := _find_shown_skips(session, changes):
        skipped = list_skipped_steps(session, run.id, steps=steps)
        html = fragment("run/_skips.html", run=run, skipped=skipped)
        is_old = min(steps) < series.first_skip_of_latest(session, run.id, most=SKIPS_SHOWN)
        keys = [step.key for step in list_skipped_steps(session, run.id)] if is_old else UNSET
        yield "skips", TableRows(html=html, keys=keys, most=SKIPS_SHOWN)
    if names := {metric.name for metric in changes.metrics}.intersection(metrics):
        measured = windows.measure(session, run.id, names=names)
        keys = sorted(metrics, key=metric_order)
        html = fragment("run/_metrics.html", metrics=measured)
        yield "metrics", TableRows(html=html, keys=keys)


def labels_mark(run: Run) -> int:
    """Return a mark of a run's name, tags and note."""
    return crc32("\0".join((run.name, run.tags, run.note)).encode())


def metric_order(name: str) -> tuple[bool, tuple[str, str]]:
    """Return the sort key of a metric in the table: metrics of whole runs come last."""
    return name.startswith("run/"), natural_key(name)


def _find_shown_skips(session: Session, changes: series.Changes) -> set[int]:
    """Return the steps of shown skips whose rows changed."""
    steps = {event.step for event in changes.events if event.kind == "skip"}
    steps |= {row.step for row in changes.diagnoses if row.kind in ("replay", "retry")}
    if not steps:
        return steps
    first = series.first_skip_of_latest(session, changes.run.id, most=SKIPS_SHOWN)
    replayed = {row.step for row in changes.diagnoses if row.kind == "replay"}
    return {step for step in steps if step >= first or step in replayed}


def list_skipped_steps(
    session: Session, run_id: int, *, steps: Collection[int] | None = None
) -> list[SkippedStep]:
    """Return the latest skips and all replayed ones, newest first, with their replays and retries.

    steps: only these.
    """
    skips = series.skips(session, run_id, most=SKIPS_SHOWN, steps=steps)
    replaying = run_control.replaying_steps(session, run_id)
    if steps is None and len(skips) == SKIPS_SHOWN:
        kept = {row.step for row in artifacts.diagnoses(session, run_id, "replay")} | replaying
        older = {step for step in kept if step < skips[-1].step}
        skips += series.skips(session, run_id, steps=older) if older else []
    shown = {skip.step for skip in skips}
    rows = artifacts.diagnoses(session, run_id, "replay", "retry", steps=shown)
    found = {(row.kind, row.step): row.content for row in rows}
    is_early = any(step <= CALIBRATING_FOR for step in shown)
    last = series.last_skip_of_calibration(session, run_id) if is_early else None
    return [
        SkippedStep(
            skip,
            found.get(("replay", skip.step)),
            found.get(("retry", skip.step)),
            skip.step in replaying,
            last.scale_after if last and skip.step <= last.step else None,
        )
        for skip in skips
    ]


def _dump(model: Any, rows: Sequence[object]) -> list[JsonObject]:
    return [model.model_validate(row).model_dump(mode="json") for row in rows]


def of_list(
    database: Database,
    settings: Settings,
    clock: Callable[[], float] = time.monotonic,
    columns: Sequence[Column] = tuple(list_columns.chosen("")),
    grants: Grants | None = None,
) -> Poll:
    """Return the function that reads changed rows of the list.

    columns: of its rows.  grants: of the viewer; None: everything.

    A cursor is the newest run's id, whether a worker is up, and the marks of those runs that its
    page shows and that had not ended. The cost depends on the page, not on the length of the
    queue: positions in the queue, which one claim changes for all, and the workers are read every
    few seconds.
    """
    queue: Queue | None = None
    facts: ListFacts | None = None
    read_at = -math.inf

    def poll(cursor: str) -> Update | None:
        nonlocal queue, facts, read_at
        seen_newest, seen = _parse(cursor)
        has_facts = FACTS in cursor
        with database.reading() as session:
            if grants is not None:
                permissions.limit(session, grants)
            if queue is None or clock() - read_at >= PLACES_SECONDS:
                queue, facts, read_at = Queue.read(session), None, clock()
            if has_facts and facts is None:
                facts = list_facts.read(session, queue)
            newest = runs.newest_id(session)
            new = set(range(max(seen_newest, newest - 50) + 1, newest + 1))
            marks = pending_reasons.live_marks(session, seen.keys() | new, queue)
            is_worker_up = queue.has_takers
            shown_facts = facts if has_facts else None
            now = list_cursor(newest, marks, is_worker_up=is_worker_up, facts=shown_facts)
            if now == cursor:
                return None
            changed = {run_id for run_id, mark in marks.items() if seen.get(run_id) != mark}
            changed |= (seen.keys() - marks.keys()) | new
            rows = runs.with_owners(session, changed)
            lines = series.sparklines(session, [run for run, _owner in rows])
            summaries = summarise_all(session, rows, settings)
            values = list_columns.values(session, [run.id for run in summaries], columns)
        shown = {
            run.id: fragment(
                "runs/_row.html",
                run=run,
                sparkline=lines[run.id],
                columns=columns,
                values=values[run.id],
            )
            for run in summaries
        }
        message = ListMessage(
            newest=newest,
            is_worker_up=is_worker_up,
            rows=shown,
            facts=fragment("runs/_facts.html", facts=shown_facts) if shown_facts else UNSET,
        )
        return Update(encode(message), now)

    return poll


def list_cursor(
    newest: int, marks: dict[int, str], *, is_worker_up: bool, facts: ListFacts | None = None
) -> str:
    """Return the cursor of the current list. facts: of its header, for a page that has one."""
    followed = islice(marks.items(), ROWS_FOLLOWED)
    seen = (f"{run_id}-{mark}" for run_id, mark in followed)
    state = ("up" if is_worker_up else "down") + (f"{FACTS}{facts.mark}" if facts else "")
    return ".".join((str(newest), state, *seen))


def _parse(cursor: str) -> tuple[int, dict[int, str]]:
    newest, _is_worker_up, *marks = (*cursor.split(".")[: ROWS_FOLLOWED + 2], "")
    pairs = (mark.partition("-") for mark in marks)
    seen = {_number(run_id): mark for run_id, _, mark in pairs if _number(run_id)}
    return _number(newest), seen


def _number(text: str) -> int:
    """Read an id from a cursor; 0 if it is invalid."""
    number = int(text) if text.isdecimal() and len(text) < 19 else 0
    return number if number <= LARGEST_ID else 0
