"""Watched runs: external trainings whose spool is uploaded to the server in pieces.

They have no worker and no lease: only the uploader or a user changes their state.
"""

import json
import math
import signal
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from db import clock
from db.access import permissions, projects
from db.access.permissions import Permission
from db.clock import now
from db.errors import Ended, Invalid, NotFound, NotOwner, OffsetMismatch, StaleAttempt
from db.queue import queue
from db.runs import config_values, environments, runs
from db.sweeps import agent_claims
from db.tables import (
    ENDED,
    WATCH,
    Artifact,
    CheckpointFile,
    Run,
    RunNode,
    Status,
    User,
    WatchedAttempt,
)
from db.telemetry import metric_blocks, series
from db.telemetry.recording import Item, Recording, in_words
from halfstep.telemetry import events
from halfstep.telemetry.event_codec import BadEvent, convert, fields_of
from halfstep.telemetry.plain_json import JsonObject

#: The process that writes a spool of an attempt.
Writer: TypeAlias = Literal["training", "sidecar"]
#: Size limit of the events held until an attempt's first steps.
EARLY_BYTES = 16 * 2**20
REASON_CHARACTERS = 500
INTERRUPTED, PREEMPTED = "interrupted by a new run", "preempted"
HOW_IT_ENDED = {
    "interrupted": (Status.CANCELLED, INTERRUPTED),
    "finished": (Status.FINISHED, None),
    "failed": (Status.FAILED, "its script raised"),
    "terminated": (Status.FAILED, "its process was terminated"),
    "vanished": (Status.FAILED, "its process exited unexpectedly (killed?)"),
}


def begin(
    session: Session,
    owner: User,
    watch_id: str,
    attempt: int,
    *,
    name: str,
    project: str,
    config: dict[str, Any],
    tags: str,
    started_at: float,
    host: str,
    versions: dict[str, Any],
    command: Sequence[str] = (),
    folder: str = "",
) -> WatchedAttempt:
    """Return an attempt of the watched run with this id; create them if needed.

    project: of a new run; an existing run may have been moved since.  Raises StaleAttempt if a
    later attempt has begun, Ended if a user has ended this one.
    """
    # Of two concurrent requests, the second waits.
    session.execute(select(User.id).where(User.id == owner.id).with_for_update(key_share=True))
    run = find_watched(session, owner, watch_id)
    if run is not None:
        projects.lock_within(session, Run, run.id)
        session.expire(run)
        run = find_watched(session, owner, watch_id)
    _check_project(session, owner, project if run is None else run.project)
    moment = clock.current(session)
    if run is None:
        run = Run(
            name=name,
            source=WATCH,
            watch_id=watch_id,
            project=project,
            recipe="",
            precision="",
            config=config,
            tags=tags,
            owner_id=owner.id,
            created_at=min(started_at, moment),
            started_at=min(started_at, moment),
            steps_total=0,
        )
        session.add(run)
        session.flush()
        config_values.note(session, run)
    _check_not_deleted(run)
    if run.attempt == 0 and run.status in ENDED:  # of an agent that has lost its point
        raise Ended(_describe_end(run))
    run.started_at = run.started_at or min(started_at, moment)
    run.last_report_at = moment
    if attempt > run.attempt:
        _start(session, run, attempt, host, versions)
        if command:  # missing from uploaders of earlier versions
            _note_environment(session, run, host, versions, command, folder)
    elif attempt < run.attempt:
        raise StaleAttempt
    elif _is_stopped(run):
        raise Ended(_describe_end(run))
    if run.config != config:  # the script has changed it since
        run.config = config
        config_values.note(session, run)
        run.revision += 1
    return session.get_one(WatchedAttempt, (run.id, attempt))


def find_watched(session: Session, owner: User, watch_id: str) -> Run | None:
    """Return the watched run with this id that a user has sent before, or None."""
    return session.scalar(select(Run).where(Run.owner_id == owner.id, Run.watch_id == watch_id))


def _check_project(session: Session, owner: User, project: str) -> None:
    """Check that a user may send runs to a project.

    An administrator's project is created if missing. Raises Invalid.
    """
    if owner.is_admin:
        if project != projects.DEFAULT:
            projects.get_or_create(session, project)
    elif not permissions.grants(session, owner).may(Permission.SUBMIT_RUN, project):
        named = repr(project[:100]) if project else "Default project"
        raise Invalid({"project": f"you may not upload runs to {named}; ask its maintainers"})
    else:
        projects.lock_shared(session, project)


def _start(session: Session, run: Run, attempt: int, host: str, versions: dict[str, Any]) -> None:
    _close_node(session, run)
    agent_claims.keep_run(session, run.id)
    run.attempt, run.resumed_step, run.desired_state = attempt, None, "run"
    run.error = run.stop_reason = run.ended_at = None
    session.add(RunNode(run_id=run.id, attempt=attempt, node=0, devices=[], step_before=run.step))
    session.add(
        WatchedAttempt(run_id=run.id, attempt=attempt, host=host, versions=versions, early=[])
    )
    runs.set_status(session, run, Status.RUNNING, reason=f"watched on {host}")


def _note_environment(
    session: Session,
    run: Run,
    host: str,
    versions: dict[str, object],
    command: Sequence[str],
    folder: str,
) -> None:
    known = {"host": host, "versions": versions, "command": [*command], "folder": folder or None}
    unknown: dict[str, object] = {
        "worker": None,
        "platform": None,
        "devices": [],
        "file": None,
        "git": None,
    }
    environments.record(session, run.id, run.attempt, known | unknown, environments.Texts())


def describe(
    session: Session,
    user: User,
    run_id: int,
    attempt: int,
    content: JsonObject,
    texts: environments.Texts,
) -> None:
    """Complete the environment of an attempt. content: its file and git."""
    run, place = lock_attempt(session, user, run_id, attempt)
    known = environments.newest(session, run.id)
    if known is None or known.attempt != attempt:
        _note_environment(session, run, place.host, place.versions, (), "")
        known = environments.newest(session, run.id)
    before = known.content if known else {}
    environments.record(session, run.id, attempt, {**before, **content}, texts)


def _check_not_deleted(run: Run) -> None:
    """Check that a run is not in the trash. Raises Ended."""
    if run.deleted_at is not None:
        raise Ended(runs.IN_THE_TRASH.format(run.id) + " Until then it takes nothing more.")


def _close_node(session: Session, run: Run) -> None:
    node = (RunNode.run_id == run.id, RunNode.attempt == run.attempt)
    session.execute(update(RunNode).where(*node).values(ended_at=now()))


def not_found(run_id: int) -> NotFound:
    """Return the error for a run that is missing or that the sender may not see, the same one."""
    return NotFound(f"There is no watched run {run_id}, or no such attempt of it.")


def lock_attempt(
    session: Session, user: User, run_id: int, attempt: int
) -> tuple[Run, WatchedAttempt]:
    """Lock and return a watched run and its attempt, and update its last report time.

    Raises NotFound, NotOwner, StaleAttempt if a later attempt has begun, Ended if a user ended it.
    """
    run = session.get(Run, run_id, with_for_update=True, populate_existing=True)
    grants = permissions.grants(session, user)
    is_visible = run is not None and grants.may(Permission.VIEW_RUN, run.project)
    if run is None or not is_visible or run.source != WATCH or attempt > run.attempt:
        raise not_found(run_id)
    if run.owner_id != user.id or not grants.may(Permission.SUBMIT_RUN, run.project):
        raise NotOwner
    if attempt < run.attempt:
        raise StaleAttempt
    _check_not_deleted(run)
    if _is_stopped(run):
        raise Ended(_describe_end(run))
    run.last_report_at = clock.current(session)
    return run, session.get_one(WatchedAttempt, (run_id, attempt), populate_existing=True)


def attempt_of(session: Session, run: Run) -> WatchedAttempt | None:
    """Return the current attempt of a watched run, or None."""
    return session.get(WatchedAttempt, (run.id, run.attempt))


def check_position(
    run: Run, attempt: WatchedAttempt, writer: Writer, sequence: int, offset: int
) -> None:
    """Check that an upload continues at the expected place. Raises Ended, OffsetMismatch."""
    if run.status in ENDED:
        raise Ended(_describe_end(run))
    if writer == "sidecar":
        expected = (attempt.sidecar_sequence, attempt.sidecar_offset)
    else:
        expected = (attempt.sequence, attempt.offset)
    if (sequence, offset) != expected and not (sequence > expected[0] and offset == 0):
        raise OffsetMismatch(offset=expected[1], sequence=expected[0])


def _is_stopped(run: Run) -> bool:
    """Return whether a user has ended a run.

    An end that the uploader reported does not count: the uploader may repeat its requests.
    """
    return run.status == Status.CANCELLED and run.stop_reason not in (INTERRUPTED, PREEMPTED)


def _describe_end(run: Run) -> str:
    how = f" ({run.stop_reason})" if run.stop_reason else ""
    return f"Run {run.id} has ended: it is {run.status}{how}. Its next attempt may continue."


def record(
    session: Session,
    run: Run,
    place: WatchedAttempt,
    items: Sequence[Item],
    *,
    end: tuple[int, int],
    writer: Writer = "training",
    remarks: Sequence[str] = (),
) -> None:
    """Write items of a writer's spool and their end: the sequence and offset to continue from."""
    last = series.log_lines(session, run.id, most=1)
    remarks = [*remarks]
    resumed = _held([place.resumed] if place.resumed else [], events.Resumed, remarks)
    recording = Recording(
        run.id,
        run.attempt,
        has_begun=run.resumed_step is not None,
        last_line=last[0].number if last else 0,
        resumed=resumed[0] if resumed else None,
        early=_held(place.early, events.StepEvent, remarks),
        may_log_alone=run.step == 0,
    )
    recording.take(items)
    early = [fields_of(event) for event in recording.early]
    if len(json.dumps(early)) > EARLY_BYTES:
        recording.early, early = [], []
        limit = f"{EARLY_BYTES:,} bytes"
        remarks.append(f"events of more than {limit} before the first step were dropped")
    for item in items:
        if isinstance(item, events.Resumed):
            recording.append_log(in_words(item))
    for text in remarks:
        recording.append_log(text)
    if recording:
        not_here = [[""] * len(event.files) for event in recording.checkpoints]
        recording.write(session, not_here, [""] * len(recording.artifacts))
    place.resumed = fields_of(recording.resumed) if recording.resumed else None
    place.early = early
    if writer == "sidecar":
        place.sidecar_sequence, place.sidecar_offset = end
    else:
        place.sequence, place.offset = end


E = TypeVar("E", bound=events.Event)


def _held(rows: Sequence[JsonObject], kind: type[E], remarks: list[str]) -> list[E]:
    """Return the events that were held before; add a remark about one that cannot be read."""
    held: list[E] = []
    for fields in rows:
        try:
            event = convert(fields)
        except BadEvent as error:
            remarks.append(f"an event could not be recorded: {error}")
        else:
            held += [event] if isinstance(event, kind) else []
    return held


def end(
    session: Session,
    user: User,
    run_id: int,
    attempt: int,
    how: str,
    *,
    step: int,
    error: str | None,
    exit_code: int | None = None,
    preemption: str = "",
    lost_bytes: int = 0,
) -> bool:
    """Close an attempt whose process has ended; return whether the run had not ended before.

    how: a key of HOW_IT_ENDED.  exit_code: negative for a signal.  preemption: signal and job, if
    a batch system has ended it.  lost_bytes: damaged bytes of the spool.  Idempotent.
    """
    run, place = lock_attempt(session, user, run_id, attempt)
    if run.status in ENDED:
        return False
    if lost_bytes:
        text = f"{lost_bytes:,} bytes of its spool were damaged: what they held is lost"
        record(session, run, place, [], end=(place.sequence, place.offset), remarks=[text])
    status, reason = HOW_IT_ENDED[how]
    reason = _reason(reason, error, exit_code)
    if preemption and not error:
        status, reason = Status.CANCELLED, f"{PREEMPTED} ({preemption})"
    failure_kind = "code" if error or (status == Status.FAILED and (exit_code or 0) > 0) else None
    error = error or (reason if status == Status.FAILED else None)
    if step > run.step:
        reason = "; ".join(
            filter(None, [reason, f"{run.step:,} of its {step:,} steps were received"])
        )
    queue.end(
        session, run_id, attempt, status, reason=reason, error=error, failure_kind=failure_kind
    )
    if status == Status.CANCELLED:
        run.stop_reason = INTERRUPTED if how == "interrupted" else PREEMPTED
    run.ended_at = min(run.ended_at or 0.0, _last_moment(session, run))
    _date_history(session, run)
    return True


def _date_history(session: Session, run: Run) -> None:
    """Set the times of an ended attempt in the history, which may be long before the upload."""
    for number, row in enumerate(runs.statuses(session, run.id)):
        if row.attempt == run.attempt:
            latest = run.ended_at if number else run.started_at
            row.time = min(row.time, latest or row.time)


def _reason(how: str | None, error: str | None, exit_code: int | None) -> str | None:
    """Return one line on why a process ended, with its exit code or signal."""
    if exit_code is not None and exit_code < 0 and how:
        return f"{how} by {_signal_name(-exit_code)}" if not error else _last_line(error)
    if error and (line := _last_line(error)):
        is_usual = not exit_code or (exit_code == 1 and error.startswith("Traceback"))
        return line if is_usual else f"{line} (exit code {exit_code})"
    return f"its script exited with code {exit_code}" if exit_code and how else how


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:REASON_CHARACTERS]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_moment(session: Session, run: Run) -> float:
    """Return the time of a run's last step or, without steps, of its last metric.

    This may be long before the upload. Infinity if unknown.
    """
    elapsed_ms = run.last_elapsed_ms
    if elapsed_ms is None:
        elapsed_ms = metric_blocks.last_elapsed_ms(session.connection(), run.id)
    if run.started_at is None or elapsed_ms is None:
        return math.inf
    return run.started_at + max(elapsed_ms, 0) / 1000


def find_awaited(
    session: Session, run_id: int, path: str, *, size_bytes: int, sha256: str
) -> list[CheckpointFile | Artifact]:
    """Return the rows that name a file in the run's folder on the training machine.

    Raises NotFound if there are none, Invalid if they name another size or hash.
    """
    rows: list[CheckpointFile | Artifact] = []
    for table in (CheckpointFile, Artifact):
        rows += session.scalars(select(table).where(table.run_id == run_id, table.path == path))
    if not rows:
        text = "send the spool with its event first"
        raise NotFound(f"No event of run {run_id} names the file {path[:200]!r}: {text}.")
    matches = [row for row in rows if (row.size_bytes, row.sha256) == (size_bytes, sha256)]
    if not matches:
        text = f"{size_bytes} bytes and {sha256}; allowed: as its event says, "
        text += f"{rows[0].size_bytes} bytes and {rows[0].sha256}"
        raise Invalid({"size, sha256": text})
    return matches


def record_stored(run: Run, rows: Sequence[CheckpointFile | Artifact], key: str) -> None:
    """Record that a file has been stored under a key."""
    run.revision += 1
    run.files_revision = run.revision
    for row in rows:
        before = row.stored_bytes
        row.key, row.revision = key, run.revision
        run.stored_bytes += row.stored_bytes - before
