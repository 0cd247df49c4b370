"""Notifications between processes, by PostgreSQL."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import make_url, text

from db.alerts.notifications import SIGNED_IN, Listener, notify
from db.database import Database
from db.queue import queue, workers
from db.tables import Status, User, Worker
from tests.db.conftest import CPU, DIGITS, add_worker, claim, submit

pytestmark = pytest.mark.only_on("postgresql")
SECONDS = 20


@contextmanager
def listening(database: Any) -> Iterator[tuple[Listener, Callable[[], set[int]]]]:
    """Start a listener; yield it and a function that waits for its next notification."""
    received: SimpleQueue[set[int]] = SimpleQueue()
    listener = Listener(database, received.put)
    listener.start()
    yield listener, lambda: received.get(timeout=SECONDS)
    listener.close()


def test_only_affected_listeners_are_notified(
    database: Database, ada: User, worker: Worker
) -> None:
    """A queued run, or released devices while one is queued, notify all workers once per
    transaction; a run on several nodes and a drain notify their own.
    """
    other = add_worker(database, "w2", [DIGITS], [CPU])
    with listening(database) as (listener, received):
        assert received() == {SIGNED_IN}
        assert (listener.is_listening, listener.problem) == (True, None)
        with database.writing() as session:
            first, second = (submit(session, ada, nodes=2) for _ in range(2))
        assert received() == {SIGNED_IN}
        with database.writing() as session:
            assert claim(session, worker) is not None
        assert received() == {other.id}
        with database.writing() as session:
            queue.end(session, first.id, 1, Status.FINISHED)
        assert received() == {SIGNED_IN}
        with database.writing() as session:
            assert claim(session, worker) is not None
        assert received() == {other.id}
        with database.writing() as session:
            queue.end(session, second.id, 1, Status.FINISHED)  # for which no run waits
        with database.writing() as session:
            submit(session, ada)
            session.rollback()  # nor for what never was
        with database.writing() as session:
            workers.drain(session, worker.id)
        assert received() == {worker.id}
        with database.writing() as session:
            notify(session, *range(10**6, 10**6 + 2000))  # more than a word holds
            submit(session, ada)
        assert received() == {SIGNED_IN}


def test_a_listener_reconnects_and_polls_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reconnection every waiting function polls once for lost notifications."""
    monkeypatch.setattr("db.alerts.notifications.RETRY_SECONDS", 0.05)
    with listening(database) as (listener, received):
        assert received() == {SIGNED_IN}
        with database.engine.begin() as connection:
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND query LIKE 'LISTEN%'"
                )
            )
        assert received() == {SIGNED_IN}
        assert (listener.is_listening, listener.problem) == (True, None)


def test_a_listener_without_notifications_reports_it(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener behind a pooler, which accepts LISTEN and delivers nothing, reports it. The
    test notification is sent to another database here.
    """
    monkeypatch.setattr("db.alerts.notifications.PROOF_SECONDS", 0.05)
    monkeypatch.setattr("db.alerts.notifications.RETRY_SECONDS", SECONDS)
    with ExitStack() as stack:
        url = make_url(str(database.engine.url)).set(database="postgres")
        other = Database(url.render_as_string(hide_password=False))
        stack.callback(other.dispose)
        deaf = SimpleNamespace(engine=database.engine, read_only=other.read_only)
        listener, _heard = stack.enter_context(listening(deaf))
        while listener.problem is None:
            assert not listener.is_listening
        assert listener.problem == "no notification arrives (is there a transaction pooler?)"
