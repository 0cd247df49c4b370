"""What live streams say, from rows of both databases."""

import json
from itertools import count
from typing import Any

from app import news
from db import queue, runs, waiting
from db.database import Database
from db.settings import Settings
from db.tables import Run, Status, User
from tests.app.conftest import submit
from tests.db.telemetry_made import make_events, make_metric, make_steps, record


def _told(found: news.News | None) -> tuple[dict[str, Any], str]:
    assert found is not None
    return json.loads(found.data), found.cursor


def test_run_tells_what_was_recorded_since(
    database: Database, settings: Settings, running: Run
) -> None:
    """Steps, events and metrics come once, with the parts of the page that they change."""
    look = news.of_run(database, settings, running.id)
    record(database, running, make_steps([1.0] * 5, skipped=[2]), events=make_events([2]))
    first, cursor = _told(look(""))
    assert first["steps"]["step"] == [1, 2, 3, 4, 5]
    assert first["steps"]["grad_norm"][1] == "Infinity"
    assert [event["kind"] for event in first["events"]] == ["skip", "backoff"]
    assert first["run"]["applied"] == 4
    assert first["fragments"].keys() >= {"facts", "skips", "history", "checkpoints"}
    assert look(cursor) is None

    record(database, running, make_steps([float("nan")], first=6), events=[make_metric(6, 0.5)])
    second, _cursor = _told(look(cursor))
    assert (second["steps"]["step"], second["steps"]["loss"]) == ([6], [None])
    assert "val/accuracy" in second["fragments"]["metrics"]
    assert "skips" not in second["fragments"]


def test_list_tells_rows_that_changed(
    database: Database, settings: Settings, running: Run, ada: User
) -> None:
    """A step, a new run, a new place in the queue and an end each change a row, and no other."""
    clock = count(step=news.PLACES_SECONDS)
    look = news.of_list(database, settings, lambda: next(clock))
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
        runs.cancel(session, new.id, ada)
    ended, cursor = _told(look(cursor))
    assert ended["rows"].keys() == {str(running.id), str(waiting.id), str(new.id)}
    assert "finished" in ended["rows"][str(running.id)]
    assert look(cursor) is None


def test_a_run_that_was_paused_comes_back(
    database: Database, settings: Settings, ada: User, offered: None
) -> None:
    """Pausing and resuming a run each change its row."""
    look = news.of_list(database, settings)
    run = submit(database, ada)
    _all, cursor = _told(look("0"))
    for act, status in ((runs.pause, "paused"), (runs.resume, "queued")):
        with database.writing() as session:
            act(session, run.id, ada)
        told, cursor = _told(look(cursor))
        assert f'data-status="{status}"' in told["rows"][str(run.id)]


def test_a_long_queue_costs_what_the_page_shows(
    database: Database, settings: Settings, ada: User, running: Run
) -> None:
    """With 300 waiting, a claim tells the places of the rows shown, a few seconds later at most."""
    for _ in range(300):
        submit(database, ada)
    seconds = 0.0
    look = news.of_list(database, settings, lambda: seconds)
    with database.reading() as session:
        newest, places = runs.newest_id(session), waiting.places(session)
        shown = [running.id, *range(newest, newest - 20, -1)]
        cursor = news.list_cursor(newest, waiting.live_marks(session, shown, places))
    assert len(cursor) < 300
    assert look(cursor) is None
    with database.writing() as session:
        runs.cancel(session, running.id + 1, ada)
    assert look(cursor) is None
    seconds = news.PLACES_SECONDS
    told, cursor = _told(look(cursor))
    assert told["rows"].keys() == {str(run_id) for run_id in shown[1:]}
    assert "#299 in the queue" in told["rows"][str(newest)]
    assert look(cursor) is None


def test_a_cursor_that_makes_no_sense_is_none(
    database: Database, settings: Settings, running: Run
) -> None:
    """Whatever stands in an address, the answer is news from the beginning."""
    for cursor in ("", "x", "9-9.x-.7", "1.2.3", "²", "9" * 30, "1.²-1." + "9" * 18 + "-1"):
        assert news.of_list(database, settings)(cursor) is not None
        assert news.of_run(database, settings, running.id)(cursor) is not None
