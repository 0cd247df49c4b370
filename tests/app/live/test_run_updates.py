"""Messages of live streams, made from rows of both databases."""

import json
import re
from itertools import count
from typing import Any

import pytest
from sqlalchemy.orm import Session

from app.live import run_updates
from db.access.permissions import Grants
from db.database import Database
from db.errors import NotFound
from db.files import artifacts, checkpoints
from db.queue import pending_reasons, queue, run_control, workers
from db.runs import runs
from db.settings import Settings
from db.tables import Run, Status, User
from tests.app.conftest import offer_digits, submit
from tests.db.telemetry.telemetry_made import make_events, make_metric, make_steps, record
from tests.spool_made import artifact_of, checkpoint_of

pytestmark = [pytest.mark.slow, pytest.mark.sql_sample]


def _told(found: run_updates.Update | None) -> tuple[dict[str, Any], str]:
    assert found is not None
    return json.loads(found.data), found.cursor


def test_updates_of_a_run_have_the_new_rows(
    database: Database, settings: Settings, running: Run
) -> None:
    """New steps, events and metrics are sent once, with the parts of the page that they change."""
    look = run_updates.of_run(database, settings, running.id)
    record(database, running, make_steps([1.0] * 5, skipped=[2]), events=make_events([2]))
    first, cursor = _told(look(""))
    assert first["steps"]["step"] == [1, 2, 3, 4, 5]
    assert first["steps"]["grad_norm"][1] == "Infinity"
    assert [event["kind"] for event in first["events"]] == ["skip", "backoff"]
    assert first["run"]["applied"] == 4
    assert first["fragments"].keys() == {
        *("status", "facts", "health", "environment", "findings"),
        *("scaler", "scaler_figures", "skips", "spikes", "skip_count"),
    }
    assert first["fragments"]["skip_count"] == "1"
    assert first["rows"].keys() == {"history"}
    assert look(cursor) is None

    record(database, running, make_steps([float("nan")], first=6), events=[make_metric(6, 0.5)])
    second, _cursor = _told(look(cursor))
    assert (second["steps"]["step"], second["steps"]["loss"]) == ([6], ["NaN"])
    assert "val/accuracy" in second["rows"]["metrics"]["html"]
    assert second["rows"].keys() == {"metrics"}


@pytest.mark.one_database
def test_a_message_holds_what_changed_however_much_there_is(
    database: Database, settings: Settings, running: Run
) -> None:
    """One step, one skip or one file is sent as one row, without the rest of its table."""
    look = run_updates.of_run(database, settings, running.id)
    skipped = range(1, 151)
    record(database, running, make_steps([1.0] * 200, skipped=skipped), events=make_events(skipped))
    with database.writing() as session:
        for step in range(100):
            for name in ("a.txt", "b.txt"):
                _leave(session, running, step, name)
            _save(session, running, step)
    whole, cursor = _told(look(""))
    assert len(json.dumps(whole)) > 100_000
    record(database, running, make_steps([1.0], first=201))
    step, cursor = _told(look(cursor))
    assert (step["rows"], len(json.dumps(step)) < 6000) == ({}, True)

    record(database, running, make_steps([1.0], first=202), events=make_events([202]))
    with database.writing() as session:
        _leave(session, running, 202, "a.txt")
        _save(session, running, 202)
    parts, cursor = _told(look(cursor))
    keys = {
        name: re.findall('data-key="(.*?)"', part["html"]) for name, part in parts["rows"].items()
    }
    assert keys == {"skips": ["202-SGD"], "artifacts": ["a.txt"], "checkpoints": ["101"]}
    assert parts["rows"]["checkpoints"]["keys"] == [str(n) for n in range(101, 0, -1)]
    assert "Fork from step 202" in parts["fragments"]["latest_fork"]

    with database.writing() as session:
        checkpoints.prune(session, running.id, running.attempt, {"keep_last": 1})
    pruned, _cursor = _told(look(cursor))
    assert pruned["rows"]["checkpoints"]["keys"] == ["101"]


def test_the_end_is_sent_once_and_closes_the_stream(
    database: Database, settings: Settings, running: Run
) -> None:
    """An ended run is not polled, even if a client reconnects."""
    look = run_updates.of_run(database, settings, running.id)
    first = look("")
    assert first is not None
    assert not first.is_last
    with database.writing() as session:
        queue.end(session, running.id, running.attempt, Status.FINISHED)
    for cursor in (first.cursor, ""):
        result = look(cursor)
        assert result is not None
        assert (result.is_last, json.loads(result.data)["run"]["status"]) == (True, "finished")
    again = look(result.cursor)
    assert again is not None
    assert (again.is_last, json.loads(again.data)) == (True, {"is_over": True})


def test_a_queued_run_has_a_pending_reason(
    database: Database, settings: Settings, ada: User
) -> None:
    """Position and reason of a queued run change with other runs; page and row are updated."""
    clock = count(step=run_updates.PLACES_SECONDS)
    first, second = submit(database, ada), submit(database, ada)
    looks = [
        make(lambda: next(clock))
        for make in (
            lambda clock: run_updates.of_run(database, settings, second.id, clock),
            lambda clock: run_updates.of_list(database, settings, clock),
        )
    ]
    cursors = ["", "0"]

    def sent() -> str:
        found = [_told(look(cursor)) for look, cursor in zip(looks, cursors, strict=True)]
        cursors[:] = [cursor for _message, cursor in found]
        run, rows = (message for message, _cursor in found)
        assert run["run"]["waiting"] in rows["rows"][str(second.id)]
        return f"{run['run']['ahead']}: {run['run']['waiting']}"

    assert sent() == "1: no worker reports at the moment"
    offer_digits(database)
    assert sent() == f"1: 1 run is ahead: {first.id} ({first.name})"
    with database.writing() as session:
        run_control.cancel(session, first.id, ada)
    assert sent() == "0: it is next: a worker is about to take it"
    assert [look(cursor) for look, cursor in zip(looks, cursors, strict=True)] == [None, None]


def _leave(session: Session, run: Run, step: int, name: str) -> None:
    event = {"step": step, "name": name, "size_bytes": 1, "sha256": "ab" * 32}
    artifacts.publish(session, run.id, run.attempt, artifact_of(event), f"{step}/{name}")


def _save(session: Session, run: Run, step: int) -> None:
    file = {"kind": "checkpoint", "size_bytes": 1, "sha256": "ab" * 32}
    event = {"step": step, "reason": "interval", "request": None, "files": [file]}
    checkpoints.publish(session, run.id, run.attempt, checkpoint_of(event), [f"{step}.pt"])


def test_the_list_sends_changed_rows(
    database: Database, settings: Settings, running: Run, ada: User
) -> None:
    """A step, a new run, a new position in the queue and an end each send the changed row only."""
    clock = count(step=run_updates.PLACES_SECONDS)
    look = run_updates.of_list(database, settings, lambda: next(clock))
    waiting = submit(database, ada)
    _all, cursor = _told(look("0"))
    assert look(cursor) is None

    record(database, running, make_steps([1.0]))
    step, cursor = _told(look(cursor))
    assert step["rows"].keys() == {str(running.id)}

    new = submit(database, ada, priority=1)
    added, cursor = _told(look(cursor))
    assert added["newest"] == new.id
    assert added["rows"].keys() == {str(new.id), str(waiting.id)}

    with database.writing() as session:
        queue.end(session, running.id, running.attempt, Status.FINISHED)
        run_control.cancel(session, new.id, ada)
    ended, cursor = _told(look(cursor))
    assert ended["rows"].keys() == {str(running.id), str(waiting.id), str(new.id)}
    assert "finished" in ended["rows"][str(running.id)]
    assert look(cursor) is None


def test_a_run_that_was_paused_comes_back(
    database: Database, settings: Settings, ada: User, offered: None
) -> None:
    """Pausing and resuming a run each change its row."""
    look = run_updates.of_list(database, settings)
    run = submit(database, ada)
    _all, cursor = _told(look("0"))
    for act, status in ((run_control.pause, "paused"), (run_control.resume, "queued")):
        with database.writing() as session:
            act(session, run.id, ada)
        result, cursor = _told(look(cursor))
        assert f'data-status="{status}"' in result["rows"][str(run.id)]


@pytest.mark.one_database
def test_a_long_queue_costs_what_the_page_shows(
    database: Database, settings: Settings, ada: User, running: Run
) -> None:
    """With 300 queued runs, a claim updates the positions of the visible rows within seconds."""
    for _ in range(300):
        submit(database, ada)
    seconds = 0.0
    look = run_updates.of_list(database, settings, lambda: seconds)
    with database.reading() as session:
        newest, places = runs.newest_id(session), pending_reasons.Queue.read(session)
        shown = [running.id, *range(newest, newest - 20, -1)]
        cursor = run_updates.list_cursor(
            newest,
            pending_reasons.live_marks(session, shown, places),
            is_worker_up=places.has_takers,
        )
    assert len(cursor) < 400
    assert look(cursor) is None
    with database.writing() as session:
        run_control.cancel(session, running.id + 1, ada)
    assert look(cursor) is None
    seconds = run_updates.PLACES_SECONDS
    result, cursor = _told(look(cursor))
    assert result["rows"].keys() == {str(run_id) for run_id in shown[1:]}
    assert "#299 in the queue" in result["rows"][str(newest)]
    assert look(cursor) is None


def test_a_cursor_that_makes_no_sense_is_none(
    database: Database, settings: Settings, running: Run
) -> None:
    """An invalid cursor gets all updates from the beginning."""
    for cursor in ("", "x", "9-9.x-.7", "1.2.3", "²", "9" * 30, "1.²-1." + "9" * 18 + "-1"):
        assert run_updates.of_list(database, settings)(cursor) is not None
        assert run_updates.of_run(database, settings, running.id)(cursor) is not None


def test_the_poll_of_a_run_that_was_deleted_for_good_fails(
    database: Database, settings: Settings, running: Run
) -> None:
    """The stream of a run that was deleted for good ends; a stream whose viewer lost permission is
    ended by the server.
    """
    hidden = Grants(0, False, {})
    assert run_updates.of_run(database, settings, running.id, grants=hidden)("") is None
    with pytest.raises(NotFound):
        run_updates.of_run(database, settings, running.id + 1, grants=hidden)("")


def test_the_list_is_updated_when_the_first_worker_starts_and_the_last_stops(
    database: Database, settings: Settings
) -> None:
    """The list is updated when the first worker starts and the last one stops, even if it is empty;
    an up-to-date client gets no message.
    """
    time = [0.0]
    look = run_updates.of_list(database, settings, lambda: time[0])

    def sent(cursor: str) -> str:
        time[0] += run_updates.PLACES_SECONDS
        found = look(cursor)
        assert found is not None
        assert look(found.cursor) is None
        received.append(json.loads(found.data)["is_worker_up"])
        return found.cursor

    received: list[bool] = []
    down = run_updates.list_cursor(0, {}, is_worker_up=False)
    assert look(down) is None
    worker_id = offer_digits(database)
    up = sent(down)
    with database.writing() as session:
        workers.drain(session, worker_id)
    assert sent(up) == down  # no worker claims the queued runs
    with database.writing() as session:
        workers.undrain(session, worker_id)
    assert sent(down) == up
    with database.writing() as session:
        workers.stop(session, worker_id)
    assert sent(up) == down
    assert received == [True, False] * 2


def test_a_client_receives_the_parts_that_it_requests(
    database: Database, settings: Settings, running: Run
) -> None:
    """A client receives only the parts of an update that it requests, and always the status."""
    record(database, running, make_steps([1.0] * 5, skipped=[2]), events=make_events([2]))
    everything, cursor = _told(run_updates.of_run(database, settings, running.id)(""))
    assert everything.keys() >= {*run_updates.PARTS, "rows"}
    look = run_updates.of_run(database, settings, running.id, parts=("steps", "log"))
    asked, same = _told(look(""))
    left_out = {"events", "metrics", "checkpoints", "fragments", "rows"}
    assert everything.keys() - asked.keys() == left_out
    assert (asked["steps"], asked["log"]) == (everything["steps"], everything["log"])
    assert asked["run"]["step"] == 5
    assert same == cursor


def test_a_spike_is_sent_to_viewers(database: Database, settings: Settings, running: Run) -> None:
    """A spike updates chart and table; steps without a spike update neither."""
    look = run_updates.of_run(database, settings, running.id)
    record(database, running, make_steps([1.0] * 5))
    _first, cursor = _told(look(""))
    record(database, running, make_steps([1.0], first=6))
    plain, cursor = _told(look(cursor))
    assert "spikes" not in plain
    assert "spikes" not in plain["fragments"]
    spike = {"event": "spike", "step": 4, "loss": 20.5, "z": 99.5}
    record(database, running, events=[spike])
    second, _cursor = _told(look(cursor))
    assert second["spikes"] == [{"step": 4, "loss": 20.5, "z": 99.5, "rolled_back_to": None}]
    assert "99.5" in second["fragments"]["spikes"]
