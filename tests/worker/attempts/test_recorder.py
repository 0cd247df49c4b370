"""Recording across crashes: real spools and a real database, without processes."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, text

from app.runs.summary import summarise
from db.database import Database
from db.errors import StorageUnreachable
from db.files.object_store import open_store
from db.health import findings
from db.queue import queue
from db.runs import runs
from db.settings import Settings
from db.tables import (
    COMMAND,
    RECIPE,
    Artifact,
    ArtifactLink,
    ArtifactVersion,
    Blob,
    CheckpointFile,
    Diagnosis,
    MetricTail,
    Run,
    RunNode,
    RunStatus,
    ScalerEvent,
    Status,
    User,
    Worker,
)
from db.telemetry.recording import Recording
from db.telemetry.series import Cursor, changes, log_lines, raw_steps
from db.telemetry.windows import windows_of
from halfstep.artifacts.manifest import Entry, digest_of
from halfstep.telemetry.events import Sample
from halfstep.telemetry.spool import EVENT, STEPS, UNTIMED_DTYPE, SpoolWriter
from tests.buckets import Bucket
from tests.db.conftest import CPU, DIGITS, add_worker, claim, submit
from tests.db.telemetry.earlier_steps import as_file
from tests.db.telemetry.telemetry_made import (
    make_events,
    make_metric,
    make_steps,
    read_logged_points,
)
from tests.halfstep.telemetry.events_made import HONEST
from tests.site import until
from tests.spool_made import event_of, spool_anything, spool_raw
from worker.attempts.recorder import CannotRecord, Recorder

pytestmark = pytest.mark.sql_sample


class NoDevices:
    """A sampler without devices, since only trainings are recorded here."""

    def take(self, elapsed_ms: int) -> list[Sample]:
        return []


class Attempts:
    """A run, and the machines that train it, each with its own data folder.

    The loss of every step is the number of the attempt that made it.
    """

    def __init__(self, database: Database, folder: Path, owner: User) -> None:
        self.database, self.folder = database, folder
        self.closing = ExitStack()
        self.workers: dict[str, Worker] = {}
        self.number, self.storage_url = 0, ""
        with database.writing() as session:
            self.run_id = submit(session, owner).id

    def next(self, machine: str = "a", **options: Any) -> SpoolWriter:
        """End the running attempt, if any; return the next one's spool."""
        if machine not in self.workers:
            self.workers[machine] = add_worker(self.database, machine, [DIGITS], [CPU])
        with self.database.writing() as session:
            if self.number:
                queue.end(session, self.run_id, self.number, Status.QUEUED)
            run = claim(session, self.workers[machine])
            assert run is not None
            self.number = run.attempt
        self.settings = Settings(data=self.folder / machine, storage_url=self.storage_url)
        spool = self.settings.scratch_folder(self.run_id) / "spool"
        return self.closing.enter_context(SpoolWriter(spool, self.number, **options))

    def steps(self, first: int, last: int) -> Any:
        return make_steps([float(self.number)] * (last - first + 1), first=first)

    def take_for(self, source: str) -> None:
        with self.database.writing() as session:
            session.get_one(Run, self.run_id).source = source

    def recorder(self) -> Recorder:
        """Return a worker's recorder, for a dead supervisor's remaining data."""
        store = open_store(self.settings)
        return Recorder(self.settings, self.database, store, self.run_id, self.number)

    def supervisor(self, policy: dict[str, Any] | None = None) -> Recorder:
        """Return a supervisor's recorder: it records remaining data before its training begins."""
        recorder = self.recorder()
        drain(recorder)
        recorder.begin(NoDevices(), 0.0, policy or {})  # type: ignore[arg-type]
        return recorder

    def made_by(self) -> dict[int, int]:
        """Return the attempt that recorded each step."""
        with self.database.reading() as session:
            steps = raw_steps(session, self.run_id)
        return dict(zip(steps["step"], map(int, steps["loss"]), strict=True))

    def steps_of(self, table: Any) -> list[int]:
        with self.database.reading() as session:
            if table is MetricTail:
                return [point.step for point in read_logged_points(session)]
            return list(session.scalars(select(table.step).order_by(table.step)))

    @property
    def spool(self) -> Path:
        """The spool folder of the running attempt."""
        return self.settings.scratch_folder(self.run_id) / "spool"

    def left(self) -> list[str]:
        """Return the names of the remaining spool files on the training machine."""
        folder = self.settings.scratch_folder(self.run_id) / "spool"
        return sorted(path.name for path in folder.iterdir())

    def list_resumed_steps(self) -> list[int | None]:
        """Return the step from which each attempt recorded."""
        with self.database.reading() as session:
            nodes = select(RunNode.resumed_step).order_by(RunNode.attempt)
            found = list(session.scalars(nodes))
            assert session.get_one(Run, self.run_id).resumed_step == found[-1]
        return found


def test_a_command_that_only_logs_has_its_numbers(attempts: Attempts) -> None:
    """A command's numbers need no step, and the next attempt's values replace them."""
    for number in (1, 2):
        attempts.take_for(RECIPE)  # as the worker's
        spool = attempts.next()
        attempts.take_for(COMMAND)
        for step in range(4 - number):
            event = {"event": "metric", "name": "score", "step": step, "elapsed_ms": 1}
            spool.event(event_of(event | {"value": float(number)}))
        recorder = attempts.supervisor()
        drain(recorder)
    with attempts.database.reading() as session:
        found = read_logged_points(session)
    assert [(point.step, point.value) for point in found] == [(0, 2.0), (1, 2.0)]


def drain(recorder: Recorder) -> None:
    while not recorder.flush():
        pass


def make_resumed(step: int, *, exact: bool) -> dict[str, Any]:
    notes = [] if exact else ["another device"]
    return {"event": "resumed", "step": step, "exact": exact, "notes": notes}


def span(first: int, last: int, attempt: int) -> dict[int, int]:
    return dict.fromkeys(range(first, last + 1), attempt)


@pytest.fixture
def attempts(database: Database, tmp_path: Path, ada: User) -> Iterator[Attempts]:
    """A run in the queue."""
    attempts = Attempts(database, tmp_path, ada)
    with attempts.closing:
        yield attempts


@pytest.mark.parametrize("exact", [True, False])
def test_a_dead_supervisor_of_a_resumed_run_takes_nothing_with_it(
    attempts: Attempts, exact: bool
) -> None:
    """After a resumed run's supervisor died, earlier records stay and its spooled data are
    added.
    """
    spool = attempts.next()
    spool.steps(attempts.steps(1, 50))
    spool.event(event_of(make_metric(40, 0.5)))
    first = attempts.supervisor()
    drain(first)
    first.clear()
    spool = attempts.next()
    recorder = attempts.supervisor()
    spool.event(event_of(make_resumed(50, exact=exact)))
    spool.steps(attempts.steps(51, 70))
    drain(recorder)
    spool.steps(attempts.steps(71, 80))
    drain(attempts.recorder())
    assert attempts.made_by() == span(1, 50, 1) | span(51, 80, 2)
    assert attempts.steps_of(MetricTail) == [40]
    assert attempts.list_resumed_steps() == [0, 50]


@pytest.mark.parametrize(("exact", "kept"), [(True, 60), (False, 55)])
def test_a_supervisor_that_died_before_it_recorded_is_stood_in_for(
    attempts: Attempts, exact: bool, kept: int
) -> None:
    """A worker that records for a dead supervisor finds the replaced steps by the spool."""
    spool = attempts.next()
    spool.steps(attempts.steps(1, 60))
    first = attempts.supervisor()
    drain(first)
    first.clear()
    spool = attempts.next()
    spool.event(event_of(make_resumed(50, exact=exact)))
    spool.steps(attempts.steps(51, 55))
    drain(attempts.recorder())
    assert attempts.made_by() == span(1, 50, 1) | span(51, 55, 2) | span(56, kept, 1)
    assert attempts.list_resumed_steps() == [0, 50]


def test_an_attempt_without_a_checkpoint_reports_that_it_starts_over(attempts: Attempts) -> None:
    """The history says that an attempt without a checkpoint starts over, or its resumed step."""
    for _ in range(2):
        attempts.next().steps(attempts.steps(1, 3))
        supervisor = attempts.supervisor()
        drain(supervisor)
        supervisor.clear()
    with attempts.database.reading() as session:
        began = select(RunStatus.reason).where(RunStatus.status == Status.RUNNING)
        assert list(session.scalars(began.order_by(RunStatus.id))) == [
            None,
            "restarts at step 1",
        ]


def test_a_dead_supervisor_keeps_what_its_spool_no_longer_has(attempts: Attempts) -> None:
    """Data of a first attempt stay recorded after its spool was deleted by rotation."""
    spool = attempts.next(rotate_bytes=17)
    [event] = [event for event in make_events([5]) if event["kind"] == "skip"]
    spool.event(event_of(event | {"kind": "set"}))
    spool.steps(attempts.steps(1, 50))
    recorder = attempts.supervisor()
    drain(recorder)
    spool.steps(attempts.steps(51, 70))
    drain(recorder)
    spool.event(event_of(make_metric(71, 0.5)))
    drain(attempts.recorder())
    assert attempts.made_by() == span(1, 70, 1)
    assert attempts.steps_of(ScalerEvent) == [5]
    assert attempts.steps_of(MetricTail) == [71]


def test_what_two_attempts_left_is_recorded_one_after_the_other(attempts: Attempts) -> None:
    """Steps of an earlier attempt that the later one did not repeat bit for bit are deleted."""
    attempts.next().steps(attempts.steps(1, 60))
    spool = attempts.next()
    spool.event(event_of(make_resumed(50, exact=False)))
    spool.steps(attempts.steps(51, 55))
    drain(attempts.recorder())
    assert attempts.made_by() == span(1, 50, 1) | span(51, 55, 2)


def test_files_of_a_superseded_attempt_are_deleted_unread(attempts: Attempts) -> None:
    """A stale attempt's spool, on a machine that comes back, is deleted unread."""
    old = attempts.next("a")
    old.steps(attempts.steps(1, 180))
    old.event(event_of(make_metric(150, 0.5)))
    spool = attempts.next("b")
    recorder = attempts.supervisor()
    spool.steps(attempts.steps(1, 120))
    drain(recorder)
    spool = attempts.next("a")
    recorder = attempts.supervisor()
    assert attempts.made_by() == span(1, 120, 2)
    assert attempts.steps_of(MetricTail) == []
    spool.event(event_of(make_resumed(100, exact=False)))
    spool.steps(attempts.steps(101, 110))
    drain(recorder)
    assert attempts.made_by() == span(1, 100, 2) | span(101, 110, 3)
    assert attempts.left() == ["3-0.spool"]


def test_files_of_an_unrecorded_attempt_are_not_lost(attempts: Attempts) -> None:
    """Of an unrecorded attempt only data before the recorded steps are dropped."""
    spool = attempts.next()
    recorder = attempts.supervisor()
    spool.steps(attempts.steps(1, 50))
    drain(recorder)
    spool.steps(attempts.steps(51, 60))
    spool = attempts.next()
    spool.event(event_of(make_resumed(60, exact=True)))
    spool.steps(attempts.steps(61, 70))
    attempts.next()
    attempts.supervisor()
    assert attempts.made_by() == span(1, 60, 1) | span(61, 70, 2)


def test_events_before_the_first_step_survive_an_inexact_resume(
    attempts: Attempts,
) -> None:
    """An attempt's first events are written with its first steps, which replace earlier ones."""
    spool = attempts.next()
    recorder = attempts.supervisor()
    spool.steps(attempts.steps(1, 60))
    for event in (*make_events([54]), make_metric(55, 0.5)):
        spool.event(event_of(event))
    drain(recorder)
    spool = attempts.next()
    recorder = attempts.supervisor()
    spool.event(event_of(make_resumed(50, exact=False)))
    shapes = {"share": 0.5, "count": 1, "layers": ["head (65 to 10)"], "batch_size": None}
    spool.event(event_of({"event": "shapes", "step": 0, **shapes}))
    for event in (*make_events([51]), make_metric(52, 0.5)):
        spool.event(event_of(event))
    drain(recorder)
    assert attempts.steps_of(Diagnosis) == [0]  # of no step: there is nothing to wait for
    assert attempts.steps_of(ScalerEvent) == [54, 54]
    spool.steps(attempts.steps(51, 52))
    drain(recorder)
    assert attempts.steps_of(ScalerEvent) == [51, 51]
    assert attempts.steps_of(MetricTail) == [52]
    spool.event(event_of(make_metric(53, 0.5)))
    drain(recorder)
    assert attempts.steps_of(MetricTail) == [52, 53]  # once it has made steps, nothing waits


def test_events_of_an_attempt_without_steps_are_withdrawn(attempts: Attempts) -> None:
    """Events of an attempt without steps do not replace an earlier attempt's."""
    spool = attempts.next()
    spool.steps(attempts.steps(1, 60))
    spool.event(event_of(make_metric(55, 0.5)))
    drain(attempts.supervisor())
    spool = attempts.next()
    recorder = attempts.supervisor()
    spool.event(event_of(make_resumed(50, exact=False)))
    spool.event(event_of(make_metric(52, 0.5)))
    drain(recorder)
    drain(attempts.recorder())
    assert attempts.steps_of(MetricTail) == [55]


def test_an_event_that_cannot_be_recorded_is_kept_and_the_rest_is_recorded(
    attempts: Attempts,
) -> None:
    """An invalid event's frame is stored next to the spool, as the error and the log say."""
    attempts.next().steps(attempts.steps(1, 4))
    event = make_metric(3, "warm-up", "phase")
    spool_anything(attempts.spool, 1, make_metric(2, 0.5), event, make_metric(4, 0.5))
    recorder = attempts.recorder()
    drain(recorder)
    assert recorder.problem is not None
    assert "metric 'phase' at step 3: value is 'warm-up'; allowed: a number" in recorder.problem
    kept = attempts.settings.run_folder(attempts.run_id) / "quarantine-1" / "frames"
    assert str(kept.parent) in recorder.problem
    assert json.dumps(event).encode() in kept.read_bytes()
    assert attempts.steps_of(MetricTail) == [2, 4]
    with attempts.database.reading() as session:
        assert recorder.problem in [line.text for line in log_lines(session, attempts.run_id)]


@pytest.mark.parametrize("place", ["middle", "end"])
def test_damaged_bytes_of_a_spool_cost_their_frame_and_are_reported(
    attempts: Attempts, place: str
) -> None:
    """Damaged bytes of a spool are named in the log, and the training continues."""
    spool = attempts.next()
    for first in (1, 5, 9):
        spool.steps(attempts.steps(first, first + 3))
    path = attempts.spool / "1-0.spool"
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place == "middle" else -1] ^= 0x55
    path.write_bytes(content)
    recorder = attempts.recorder()
    drain(recorder)
    while recorder.finish():
        drain(recorder)
    lost = {5, 6, 7, 8} if place == "middle" else {9, 10, 11, 12}
    assert attempts.made_by().keys() == {*range(1, 13)} - lost
    assert (recorder.problem, recorder.lost_bytes) == (None, (len(content) - 16) // 3)
    with attempts.database.reading() as session:
        lines = [line.text for line in log_lines(session, attempts.run_id)]
    assert sum(f"{recorder.lost_bytes:,} damaged bytes of the spool" in line for line in lines) == 1


@pytest.mark.parametrize("place", ["artifacts", "checkpoints"])
def test_a_link_out_of_the_runs_folder_is_not_followed(attempts: Attempts, place: str) -> None:
    """A linked file, or one in a linked folder, is not stored as the run's own."""
    attempts.next()
    folder, secret = attempts.spool.parent, attempts.folder / "secret"
    secret.mkdir()
    (secret / "a.txt").write_text("secret")
    (folder / place).mkdir()
    (folder / place / "step-00000400").symlink_to(secret)
    (folder / place / "a.txt").symlink_to(secret / "a.txt")
    kind = place.removesuffix("s")
    for path in (f"{place}/step-00000400/a.txt", f"{place}/a.txt"):
        file = {"kind": "checkpoint", "path": path, "size_bytes": 6, "sha256": "ab" * 32}
        spool_anything(attempts.spool, 1, HONEST[kind] | file | {"files": [file]})
    recorder = attempts.recorder()
    drain(recorder)
    assert f"{place}/step-00000400/a.txt is a link" in str(recorder.problem)
    assert attempts.steps_of(Artifact) == attempts.steps_of(CheckpointFile) == []


def test_what_fails_for_good_is_put_aside_with_the_whole_spool(attempts: Attempts) -> None:
    """A spool that cannot be read is moved, and the message has the folder."""
    attempts.next()
    spool_anything(attempts.spool, 1, make_metric(2, 0.5)).write_bytes(b"another file's header")
    with pytest.raises(CannotRecord, match=r"is not a spool file of version 1.*quarantine-1"):
        drain(attempts.recorder())
    assert attempts.left() == []
    quarantine = attempts.settings.run_folder(attempts.run_id) / "quarantine-1"
    assert (quarantine / "1-0.spool").exists()
    drain(attempts.recorder())


def test_a_disk_that_fails_is_not_held_against_the_run(attempts: Attempts) -> None:
    """Spooled data stay where they are while the disk fails, and are recorded afterwards."""
    attempts.next().steps(attempts.steps(1, 5))
    path, moved = attempts.spool / "1-0.spool", attempts.folder / "moved"
    path.rename(moved)
    path.mkdir()  # reading it is an error of the system's
    with pytest.raises(OSError, match="not a regular file"):
        drain(attempts.recorder())
    path.rmdir()
    moved.rename(path)
    drain(attempts.recorder())
    assert attempts.made_by() == span(1, 5, 1)


#: JSON that no training writes.
HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**31, 2**53, 2**63, -(2**63) - 1, 10**400, -1, 0, 1e308, 5e-324, -0.0]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["NaN", "Infinity", "\0", "\ud800", "x" * 5000, "skip", "../a.txt", "\u2028"]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5)),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every part of a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from places(each, (*path, key))


@st.composite
def spoilt(draw: st.DrawFn) -> dict[str, Any]:
    """Draw valid events in which values are replaced by arbitrary ones."""
    event: dict[str, Any] = json.loads(json.dumps(draw(st.sampled_from(list(HONEST.values())))))
    for _ in range(draw(st.integers(0, 2))):
        *way, last = draw(st.sampled_from(list(places(event))))
        inside: Any = event
        for key in way:
            inside = inside[key]
        inside[last] = draw(HOSTILE)
        if draw(st.booleans()) and isinstance(inside, dict):
            del inside[last]
    return event


PAYLOADS = st.one_of(
    spoilt().map(lambda event: (EVENT, json.dumps(event).encode())),
    HOSTILE.map(lambda value: (EVENT, json.dumps(value).encode())),
    st.binary(max_size=100).map(lambda payload: (EVENT, payload)),
    st.tuples(st.integers(0, 255), st.binary(min_size=48, max_size=48)),
    st.binary(min_size=48, max_size=48).map(lambda payload: (STEPS, payload)),
    st.just((STEPS, b"")),
)


@pytest.mark.slow
@settings(
    max_examples=2 * settings.default.max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(frames=st.lists(PAYLOADS, max_size=6))
def test_the_recorder_takes_whatever_a_spool_holds(
    database: Database, tmp_path: Path, ada: User, frames: list[tuple[int, bytes]]
) -> None:
    """After arbitrary frames the recorder still records the valid event at the end."""
    attempts = Attempts(database, tmp_path, ada)
    with attempts.closing:
        attempts.next().steps(attempts.steps(1, 2))
    for kind, payload in frames:
        spool_raw(attempts.spool, 1, payload, kind=kind)
    spool_anything(attempts.spool, 1, make_metric(7, 0.5, "the last"))
    drain(attempts.supervisor())
    with database.reading() as session:
        [point] = read_logged_points(session, attempts.run_id, "the last")
        assert point.value == 0.5
        assert summarise(session, *runs.get_with_owner(session, attempts.run_id), attempts.settings)
        changes(session, attempts.run_id, Cursor())
        findings.of_run(session, runs.get(session, attempts.run_id))


def make_rollback(step: int, now: int, rollbacks: int = 1) -> list[dict[str, Any]]:
    """Return the events of a training that rolls back from a spike in its last step."""
    spike = {"event": "spike", "step": now, "loss": 20.5, "z": 99.5}
    back = {"event": "rolled_back", "step": step, "from_step": now, "spike": now}
    back |= {"loss": 20.5, "z": 99.5, "examples": 320, "rollbacks": rollbacks}
    return [spike, back, {**spike, "rolled_back_to": step}]


@pytest.mark.sql
@pytest.mark.parametrize("is_at_once", [True, False])
def test_rows_after_a_rewind_are_withdrawn(attempts: Attempts, is_at_once: bool) -> None:
    """A rollback deletes later steps, skips and metrics, recorded already or in the same flush.

    The spike stays, the history mentions it once, also if the spool is read twice, and clients
    continue from the run's position.
    """
    spool = attempts.next()
    recorder = attempts.supervisor()
    spool.steps(attempts.steps(1, 30))
    for event in [make_metric(25, 0.5), *make_events({24}), HONEST["histogram"] | {"step": 22}]:
        spool.event(event_of(event))
    if not is_at_once:
        drain(recorder)
    with attempts.database.reading() as session:
        news = changes(session, attempts.run_id, Cursor())
        cursor = news.cursor if news else Cursor()
    for event in make_rollback(20, 30):
        spool.event(event_of(event))
    attempts.number = 7  # as what was made after it
    spool.steps(attempts.steps(21, 24))
    attempts.number = 1
    drain(recorder)
    expected = span(1, 20, 1) | span(21, 24, 7)
    assert attempts.made_by() == expected
    assert [attempts.steps_of(table) for table in (MetricTail, ScalerEvent, Diagnosis)] == [
        [],
        [],
        [30],
    ]
    drain(attempts.recorder())  # which stands in for one that died
    assert attempts.made_by() == expected
    with attempts.database.reading() as session:
        reasons = [each.reason for each in runs.statuses(session, attempts.run_id)]
        news = changes(session, attempts.run_id, cursor)
        [spike] = session.scalars(select(Diagnosis.content))
    assert spike["rolled_back_to"] == 20
    assert [each for each in reasons if each and each.startswith("rollback")] == [
        "rollback 1: from step 30 to step 20, for the loss of 20.5 at step 30; continued without "
        "320 examples"
    ]
    assert news is not None
    assert news.goes_back
    assert news.steps["step"][-4:] == [21, 22, 23, 24]
    assert news.cursor.step == 24


def test_acknowledged_requests_survive_a_rewind() -> None:
    """After a rollback requests stay acknowledged, and failed diagnoses stay off."""
    recording = Recording(1, 1, has_begun=True, last_line=0)
    done = [HONEST[kind] | {"step": 25} for kind in ("obeyed", "failed_diagnosis")]
    taken = [*done, make_metric(25, 0.5), *make_rollback(20, 30)]
    recording.take([event_of(each) for each in taken])
    assert [event.tag for event in recording.pending.events] == [
        "obeyed",
        "failed_diagnosis",
        "spike",
        "spike",
    ]


@pytest.mark.sql
def test_two_rewinds_unseen_are_both_followed(attempts: Attempts) -> None:
    """After two rollbacks since a client's last poll it reloads everything."""
    spool = attempts.next()
    recorder = attempts.supervisor()
    spool.steps(attempts.steps(1, 30))
    drain(recorder)
    with attempts.database.reading() as session:
        news = changes(session, attempts.run_id, Cursor())
    for event in [*make_rollback(10, 30), *make_rollback(10, 30, rollbacks=2)]:
        spool.event(event_of(event))
    spool.steps(attempts.steps(11, 12))
    drain(recorder)
    with attempts.database.reading() as session:
        assert news is not None
        news = changes(session, attempts.run_id, news.cursor)
    assert news is not None
    assert news.steps["step"] == list(range(1, 13))


def test_a_spool_of_the_version_before_is_recorded_and_added_to(attempts: Attempts) -> None:
    """A spool of the previous version is recorded without waits, and appended to with them."""
    steps = attempts.steps(1, 70)
    before = steps[:40][list(UNTIMED_DTYPE.names or ())].astype(UNTIMED_DTYPE)
    spool = attempts.next(sequence=1)
    spool_raw(attempts.spool, 1, before.tobytes(), kind=STEPS)
    spool.steps(steps[40:])
    drain(attempts.supervisor())
    with attempts.database.reading() as session:
        found = raw_steps(session, attempts.run_id)["data_us"]
        drawn = windows_of(session, [attempts.run_id]).get(attempts.run_id)
    assert found == [None] * 40 + steps["data_us"][40:].tolist()
    assert drawn is not None
    assert drawn.series["data_us"].y == found


def make_saved(attempts: Attempts, step: int) -> dict[str, Any]:
    """Make a checkpoint's file and event."""
    path = attempts.spool.parent / "checkpoints" / f"step-{step:08d}.pt"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"weights")
    file = {"kind": "checkpoint", "path": f"checkpoints/{path.name}", "size_bytes": 7}
    file["sha256"] = hashlib.sha256(b"weights").hexdigest()
    return {"event": "checkpoint", "step": step, "reason": "interval", "files": [file]}


def train_ten(attempts: Attempts, spool: SpoolWriter, last: int) -> None:
    """Emit ten steps and the checkpoint of the last one."""
    spool.steps(attempts.steps(last - 9, last))
    spool.event(event_of(make_saved(attempts, last)))


def cut_off(attempts: Attempts, bucket: Bucket, **options: Any) -> tuple[SpoolWriter, Recorder]:
    """Begin an attempt with files for a bucket that becomes unavailable."""
    attempts.storage_url = bucket.url
    spool = attempts.next(**options)
    recorder = attempts.supervisor()
    bucket.proxy.is_broken = True
    return spool, recorder


@pytest.mark.xdist_group("bucket")
def test_a_bucket_that_is_away_holds_up_files_and_nothing_else(
    attempts: Attempts, bucket: Bucket
) -> None:
    """While the bucket is unavailable, steps are recorded and files wait in the spool."""
    spool, recorder = cut_off(attempts, bucket, rotate_bytes=1)  # a file each time
    for last in (10, 20, 30):
        train_ten(attempts, spool, last)
        until(lambda last=last: not recorder.flush() and last in attempts.made_by())  # type: ignore[misc]
    assert attempts.steps_of(CheckpointFile) == []
    assert len(attempts.left()) > 3
    assert not recorder.flush()
    bucket.proxy.is_broken = False
    until(recorder.flush)
    assert attempts.steps_of(CheckpointFile) == [10, 20, 30]
    assert len(bucket.keys()) == 3
    spool.steps(attempts.steps(31, 31))
    drain(recorder)
    assert len(attempts.left()) == 1


@pytest.mark.xdist_group("bucket")
def test_files_on_their_way_to_a_bucket_outlive_the_supervisor(
    attempts: Attempts, bucket: Bucket
) -> None:
    """Files not yet sent when their supervisor died are sent by the next recorder."""
    spool, recorder = cut_off(attempts, bucket, rotate_bytes=1)
    for last in (10, 20):
        train_ten(attempts, spool, last)
        recorder.flush()
    bucket.proxy.is_broken = False
    drain(attempts.recorder())
    assert attempts.steps_of(CheckpointFile) == [10, 20]
    assert attempts.made_by() == span(1, 20, 1)


@pytest.mark.xdist_group("bucket")
def test_a_training_that_goes_back_waits_for_the_bucket(attempts: Attempts, bucket: Bucket) -> None:
    """A rollback waits until earlier files are in the bucket, to be recorded in order."""
    spool, recorder = cut_off(attempts, bucket)
    spool.steps(attempts.steps(1, 20))
    spool.event(event_of(make_saved(attempts, 20)))
    recorder.flush()
    for event in make_rollback(10, 20):
        spool.event(event_of(event))
    back = Timer(0.5, lambda: setattr(bucket.proxy, "is_broken", False))
    back.start()
    assert not recorder.flush()
    assert attempts.steps_of(CheckpointFile) == [20]
    assert attempts.made_by() == span(1, 10, 1)
    drain(recorder)


@pytest.mark.xdist_group("bucket")
def test_complete_files_are_published_although_others_cannot_be_recorded(
    attempts: Attempts, bucket: Bucket
) -> None:
    """A run can resume from a complete checkpoint, even if other files cannot be recorded."""
    spool, recorder = cut_off(attempts, bucket, rotate_bytes=1)
    train_ten(attempts, spool, 10)
    drained = [recorder.flush() for _ in range(3)]
    assert drained[-1] is False
    bucket.proxy.is_broken = False
    (attempts.spool / "1-9.spool").write_bytes(b"another file's header")
    with pytest.raises(CannotRecord):
        until(recorder.flush)
    assert attempts.steps_of(CheckpointFile) == [10]


def rename(database: Database, table: str, name: str) -> None:
    with database.writing() as session:
        session.execute(text(f"ALTER TABLE {table} RENAME TO {name}"))


def test_a_checkpoint_is_published_although_what_came_with_it_cannot_be_recorded(
    attempts: Attempts,
) -> None:
    """A checkpoint is published even if other events with it cannot be recorded."""
    spool = attempts.next()
    recorder = attempts.supervisor()
    rename(attempts.database, "metric_tails", "gone")
    spool.steps(attempts.steps(1, 10))
    spool.event(event_of(make_metric(10, 0.5)))
    spool.event(event_of(make_saved(attempts, 10)))
    with pytest.raises(CannotRecord, match="metric_tails"):
        recorder.flush()
    rename(attempts.database, "gone", "metric_tails")
    assert attempts.made_by() == {}
    assert attempts.steps_of(CheckpointFile) == [10]


@pytest.mark.xdist_group("bucket")
def test_an_unreachable_bucket_delays_no_steps(attempts: Attempts, bucket: Bucket) -> None:
    """While the bucket is unreachable rows are recorded at once, and files later."""
    attempts.storage_url = bucket.url
    spool = attempts.next()
    recorder = attempts.supervisor({"keep_last": 1})
    for step in (10, 20):
        train_ten(attempts, spool, step)
        if step == 20:  # from when it has arrived on
            until(lambda: not recorder.flush() and len(bucket.keys()) == 2)
            bucket.proxy.is_broken = True
        until(lambda step=step: recorder.flush() or step in attempts.steps_of(CheckpointFile))  # type: ignore[misc]
    spool.steps(attempts.steps(21, 30))
    until(lambda: not recorder.flush() and 30 in attempts.made_by())
    assert attempts.steps_of(CheckpointFile) == [20]
    assert len(bucket.keys()) == 2
    bucket.proxy.is_broken = False
    until(recorder.flush)
    assert len(bucket.keys()) == 1


@pytest.mark.xdist_group("bucket")
@pytest.mark.parametrize("exact", [True, False])
def test_a_run_of_an_earlier_version_that_goes_back_waits_for_the_bucket(
    attempts: Attempts, bucket: Bucket, exact: bool
) -> None:
    """A rollback of an earlier version's run converts its file first, once the bucket is back."""
    attempts.storage_url = bucket.url
    spool = attempts.next()
    spool.steps(attempts.steps(1, 1500))
    drain(attempts.supervisor())
    with attempts.database.writing() as session:
        queue.end(session, attempts.run_id, attempts.number, Status.FINISHED)
    store = open_store(attempts.settings)
    with attempts.database.reading() as session:
        run = session.get_one(Run, attempts.run_id)
    as_file(attempts.database, store, run)
    with attempts.database.writing() as session:
        session.get_one(Run, attempts.run_id).status = Status.QUEUED
    attempts.number = 0  # which has ended
    attempts.database.open_store = partial(open_store, attempts.settings, retry_seconds=0.1)
    shutil.rmtree(attempts.spool)  # or its steps would be recorded again
    spool = attempts.next()
    recorder = attempts.supervisor()
    bucket.proxy.is_broken = True
    spool.event(event_of(make_resumed(600, exact=exact)))
    spool.steps(attempts.steps(601, 700))
    for _ in range(2):
        with pytest.raises(StorageUnreachable):
            recorder.flush()
    assert not list(attempts.settings.run_folder(attempts.run_id).glob("quarantine-*"))
    bucket.proxy.is_broken = False
    drain(recorder)
    repeated = span(701, 1500, 1) if exact else {}  # until the attempt has repeated them
    assert attempts.made_by() == span(1, 600, 1) | span(601, 700, 2) | repeated


def test_named_artifacts_of_a_queued_script_are_stored(attempts: Attempts) -> None:
    """A queued script's artifacts are stored once with their run; equal content is no new
    version.
    """
    content = b"weights"
    sha256 = hashlib.sha256(content).hexdigest()
    file = {"name": "a.pt", "path": f"blobs/{sha256}", "size_bytes": 7, "sha256": sha256}
    digest = digest_of([Entry("a.pt", 7, sha256)])
    event = {"event": "saved_artifact", "name": "model", "type": "model", "digest": digest}
    event |= {"is_file": True, "files": [file]}
    spool = attempts.next()
    blob = attempts.settings.scratch_folder(attempts.run_id) / file["path"]  # type: ignore[operator]
    blob.parent.mkdir(parents=True)
    blob.write_bytes(content)
    recorder = attempts.supervisor()
    for _ in range(2):
        spool.event(event_of(event))
        drain(recorder)
    with attempts.database.reading() as session:
        [row] = session.scalars(select(Blob))
        [version] = session.scalars(select(ArtifactVersion))
        [link] = session.scalars(select(ArtifactLink))
    assert (attempts.settings.data / row.key).read_bytes() == content
    assert version.completed_at is not None
    assert (link.run_id, link.version_id, link.role) == (attempts.run_id, version.id, "made")


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_run_gets_no_content_by_stating_its_hash(attempts: Attempts, is_taken_over: bool) -> None:
    """A file is not stored under a hash that its content does not have."""
    stated, path = hashlib.sha256(b"theirs!").hexdigest(), "blobs/a"
    spool = attempts.next()
    settings, run_id = attempts.settings, attempts.run_id
    folder = settings.run_folder(run_id) if is_taken_over else settings.scratch_folder(run_id)
    file = {"name": "a.pt", "path": path, "size_bytes": 7, "sha256": stated}
    digest = digest_of([Entry("a.pt", 7, stated)])
    event = {"event": "saved_artifact", "name": "model", "type": "model", "digest": digest}
    recorder = attempts.supervisor()
    (folder / path).parent.mkdir(parents=True)
    (folder / path).write_bytes(b"my own!")
    spool.event(event_of(event | {"is_file": True, "files": [file]}))
    drain(recorder)
    with attempts.database.reading() as session:
        assert list(session.scalars(select(Blob))) == []
        assert list(session.scalars(select(ArtifactVersion))) == []
