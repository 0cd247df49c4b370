"""The queries and notifications of an idle worker."""

import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from db.queue import workers
from db.tables import RunNode
from tests.app.looks_made import collect_queries
from tests.site import Site, until
from worker.daemon import Worker


class Waiting(Worker):
    """A registered worker that starts nothing."""

    launched: list[int]

    def _register(self) -> None: ...

    def _launch(self, node: RunNode) -> None:
        self.launched.append(node.run_id)


@contextmanager
def waiting(site: Site) -> Iterator[Waiting]:
    """Run a worker in a thread."""
    worker = site.idle_worker()
    worker.__class__ = Waiting
    worker.launched = []  # type: ignore[attr-defined]  # before its thread has come so far
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield worker  # type: ignore[misc]
    finally:
        worker.stop()
        thread.join()
        worker._name_lock.release()


@pytest.mark.only_on("sqlite")
def test_a_worker_notices_a_run_by_the_file_of_sqlite(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With SQLite a worker notices a run by the database's file, before its tick and without a
    query.
    """
    monkeypatch.setattr("worker.daemon.TICK_SECONDS", 1e6)
    with waiting(site) as worker:
        until(lambda: not getattr(worker, "may_have_work", True))
        run_id = site.submit()
        until(lambda: worker.launched == [run_id])


@pytest.mark.only_on("sqlite")
def test_a_run_that_cannot_start_is_looked_at_once_a_tick(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the database's file does not cause another check of a run that cannot start."""
    monkeypatch.setattr("worker.daemon.TICK_SECONDS", 1e6)
    with waiting(site) as worker:
        until(lambda: not getattr(worker, "may_have_work", True))
        site.submit(recipe="another")
        until(lambda: worker.ignored_until > time.monotonic())
        site.submit(recipe="another")
        assert not worker._has_database_changed()
    assert worker.launched == []


@pytest.mark.only_on("postgresql")
def test_an_idle_worker_sends_heartbeats_only(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """With notifications an idle worker only sends heartbeats, and claims a run at once."""
    monkeypatch.setattr("worker.daemon.TICK_SECONDS", 0.01)
    monkeypatch.setattr("worker.daemon.QUIET_BEAT_SECONDS", 0.02)
    with waiting(site) as worker:
        until(lambda: worker.listener.is_listening and not worker.may_have_work)
        until(lambda: worker.wakeups.empty())
        with collect_queries(site.database) as statements:
            until(lambda: len(statements) > 20)
        beats = [
            each for each in statements[-10:] if re.match("UPDATE workers SET .*seen_at", each)
        ]
        assert len(beats) == 10
        monkeypatch.setattr("worker.daemon.QUIET_BEAT_SECONDS", math.inf)
        until(lambda: worker.beat_due == math.inf)
        run_id = site.submit()
        until(lambda: worker.launched == [run_id])


def test_a_lost_notification_costs_at_most_a_heartbeat(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a lost notification the heartbeat finds the run; without notifications a worker
    polls.
    """
    monkeypatch.setattr("db.alerts.notifications.notify", lambda *_: None)
    monkeypatch.setattr("worker.daemon.QUIET_BEAT_SECONDS", 0.02)
    with waiting(site) as worker:
        until(lambda: worker.listener.is_listening or site.url.startswith("sqlite"))
        run_id = site.submit()
        until(lambda: worker.launched == [run_id])


@pytest.mark.only_on("postgresql")
def test_a_drained_worker_that_is_to_stop_hands_its_run_back(site: Site) -> None:
    """A drained worker that stops returns its run with a checkpoint until workers claim again."""
    with site.start_gated_worker():
        until(lambda: site.offers("gated"))
        run_id = site.submit(recipe="gated", steps=200)
        site.wait_for_step(run_id, 3)
        with site.database.writing() as session:
            workers.drain(session, 1, stop=True)
        until(lambda: site.run(run_id).status == "queued")
        assert site.run(run_id).step > 0
        with site.database.writing() as session:
            workers.undrain(session, 1)
        site.open_gate()
        assert site.wait(run_id).status == "finished"
    assert (site.run(run_id).attempt, site.count_steps(run_id)) == (2, 200)
