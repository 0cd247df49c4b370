"""Submitting, listing and finding runs."""

from typing import Any

import pytest
from sqlalchemy import select, update

from db.database import Database
from db.errors import Invalid, NotFound
from db.files import checkpoints
from db.queue import pending_reasons, queue, run_control
from db.runs import runs
from db.runs.run_filters import Compared, InStatus, NeedsAttention, Order, Term, Word
from db.tables import Run, RunStatus, Status, User, Worker
from tests.db.conftest import claim, submit
from tests.db.telemetry.telemetry_made import make_steps, record
from tests.spool_made import checkpoint_of


def test_submitted_run_waits_in_the_queue(database: Database, ada: User) -> None:
    """A submitted run is queued, named after recipe and precision, and has a position."""
    with database.writing() as session:
        first, second = submit(session, ada), submit(session, ada)
        assert (first.status, first.name, first.steps_total) == ("queued", "digits-fp16", 100)
        assert pending_reasons.Queue.read(session).places == {first.id: 0, second.id: 1}


def test_list_is_filtered_and_paged(database: Database, ada: User) -> None:
    """The list is sorted from new to old, and limited by text, status and a start run."""
    with database.writing() as session:
        for name in ("warm", "cold", "100%"):
            submit(session, ada, name=name)
        run_control.cancel(session, 1, ada)
    with database.reading() as session:
        listed = {
            "all": runs.newest(session),
            "text": runs.newest(session, conditions=[Term(Word("COL"))]),
            "literal": runs.newest(session, conditions=[Term(Word("%"))]),
            "owner": runs.newest(session, conditions=[Term(Word("ada"))]),
            "cancelled": runs.newest(session, conditions=[Term(InStatus((Status.CANCELLED,)))]),
            "page": runs.newest(session, before=3, limit=1),
        }
    names = {key: [run.name for run, _owner in rows] for key, rows in listed.items()}
    assert names == {
        "all": ["100%", "cold", "warm"],
        "text": ["cold"],
        "literal": ["100%"],
        "owner": ["100%", "cold", "warm"],
        "cancelled": ["warm"],
        "page": ["cold"],
    }


@pytest.mark.parametrize("sort", ["-id", "name", "training.steps", "-val/accuracy"])
@pytest.mark.parametrize("filtered", [True, False])
def test_a_page_and_the_count_of_all_come_together(
    database: Database, ada: User, sort: str, filtered: bool
) -> None:
    """A page and the total come by one query, equal to two, also without a match."""
    with database.writing() as session:
        for name in ("warm", "cold", "scold"):
            submit(session, ada, name=name)
    with database.reading() as session:
        for terms in ([Term(Word("cold"))], [Term(Word("hot"))]) if filtered else ([],):
            for before in (None, 2):
                page = {"conditions": terms, "sort": sort, "before": before, "limit": 1}
                expected = runs.newest(session, **page), runs.count(session, terms)
                assert runs.page_of_list(session, **page)[:2] == expected
        first = runs.page_of_list(session, conditions=terms, sort=sort, limit=1)
        assert first.total == 3 * (not filtered)


def test_pages_of_the_list_lead_on_and_back(database: Database, ada: User) -> None:
    """Active runs come first, and each page has the number of runs before it."""
    with database.writing() as session:
        for _ in range(5):
            submit(session, ada)
        for run_id in (2, 4, 5):
            run_control.cancel(session, run_id, ada)
    page: dict[str, Any] = {"conditions": (), "sort": "-active", "limit": 2}

    def ids(**place: int) -> list[int]:
        found = runs.page_of_list(session, **page, **place)
        assert found.total == 5
        return [run.id for run, _owner in found.rows]

    with database.reading() as session:
        assert [ids(), ids(before=1), ids(before=4)] == [[3, 1], [5, 4], [2]]
        assert [ids(after=2), ids(after=5)] == [[5, 4], [3, 1]]
        assert ids(before=99) == [5, 4]  # erased meanwhile, so it had ended
        ahead = [
            runs.count_ahead(session, run_id, conditions=(), sort="-active") for run_id in (3, 5, 2)
        ]
        assert ahead == [0, 2, 4]
        numbers = [
            runs.count_matching(()),
            runs.count_matching((), most=9),
            runs.count_matching((), most=4),
        ]
        assert [*session.execute(select(*numbers)).one()] == [5, 5, None]


def test_runs_that_need_attention_are_found(database: Database, ada: User) -> None:
    """Failed and unreachable runs need attention, cancelled and queued ones do not."""
    with database.writing() as session:
        for status in (Status.FAILED, Status.UNREACHABLE, Status.CANCELLED, Status.QUEUED):
            runs.set_status(session, submit(session, ada), status)
    with database.reading() as session:
        rows = runs.newest(session, conditions=[Term(NeedsAttention())])
        assert [run.id for run, _owner in rows] == [2, 1]


def test_hints_reach_sqlite(database: Database, ada: User) -> None:
    """A query by setting has an index hint in SQLite only."""
    with database.writing() as session:
        submit(session, ada)
    with database.reading() as session:
        query = Order.of(session, "training.steps").join_to(select(Run.id).select_from(Run))
    hinted = "INDEXED BY sqlite_autoindex_run_config_values_1" in str(
        query.compile(database.engine)
    )
    assert hinted == (database.engine.dialect.name == "sqlite")


def test_a_pause_is_no_part_of_a_runs_duration(database: Database, running: Run, ada: User) -> None:
    """A run's duration excludes its pauses, in filters, orders and rows."""
    with database.writing() as session:
        queue.seconds_since_start(session, session.get_one(Run, running.id))
        session.get_one(Run, running.id).status = Status.PAUSED
        began = session.get_one(Run, running.id).started_at or 0.0
        for seconds, status in ((-5, "paused"), (100, "paused"), (400, "queued"), (500, "paused")):
            time = began + seconds
            session.add(RunStatus(run_id=running.id, attempt=1, status=status, time=time))
        other = submit(session, ada)
    with database.writing() as session:  # now, after all of that
        session.execute(update(RunStatus).values(time=RunStatus.time - 1000))
        session.execute(update(Run).values(started_at=Run.started_at - 1000))
    with database.reading() as session:
        rows = [session.get_one(Run, run_id) for run_id in (running.id, other.id)]
        progress, _now = runs.progress(session, rows)
        assert progress[running.id].seconds == pytest.approx(200)
        assert progress[other.id].seconds is None
        for sign, value, found in ((">", 199.0, [running.id]), (">", 201.0, [])):
            longer = Term(Compared("duration", sign, value, ""))
            listed = runs.newest(session, conditions=[longer], sort="-duration")
            assert [run.id for run, _owner in listed] == found


def test_a_forks_steps_are_those_after_its_parents(
    database: Database, running: Run, ada: User, worker: Worker
) -> None:
    """A fork's applied steps, and steps that it can replay, exclude its parent's."""
    file = {"kind": "checkpoint", "path": "", "size_bytes": 1, "sha256": "aa"}
    event = {"step": 40, "reason": "interval", "request": None, "files": [file]}
    with database.writing() as session:
        checkpoints.publish(session, running.id, 1, checkpoint_of(event), ["key"])
        submit(session, ada, parent_id=running.id, parent_step=40)
        fork = claim(session, worker)
        assert fork is not None
        assert runs.count_applied_of(session, [fork])[fork.id] == 0
    with pytest.raises(Invalid, match="40; allowed: 41 to 100"), database.writing() as session:
        run_control.request_replay(session, fork.id, ada, 40)
    record(database, fork, make_steps([1.0] * 9, first=41, skipped=[42, 45]))
    with database.reading() as session:
        assert runs.count_applied_of(session, [runs.get(session, fork.id)])[fork.id] == 7


def test_unknown_run_is_named(database: Database) -> None:
    """The error for a missing run names it."""
    with pytest.raises(NotFound, match="run 7"), database.reading() as session:
        runs.get(session, 7)
