"""The supervisor during delays by database, storage or users."""

import threading
from collections.abc import Callable

import obstore
import pytest
from sqlalchemy import select

from db.database import Database
from db.queue import queue, run_control
from db.runs import runs
from db.settings import Settings
from db.tables import RunNode, Status, User
from tests.app.conftest import offer_digits, start_run
from tests.site import Site
from worker.attempts import supervisor
from worker.attempts.renew_lease import wait_for
from worker.attempts.supervisor import Supervisor


@pytest.fixture
def attempt(site: Site, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """A supervisor in this process, with a claimed run and no pauses in an outage."""
    monkeypatch.setattr(supervisor, "OUTAGE_SECONDS", 0.0)
    monkeypatch.setattr("worker.attempts.renew_lease.WAITING_SECONDS", 0.01)
    offer_digits(site.database)
    run = start_run(site.database, site.owner)
    settings = Settings(data=site.data, database_url=site.url)
    return Supervisor(settings, site.database, run.id, run.attempt)


def failing(times: int, then: Callable[[], None]) -> Callable[[], None]:
    """Return a function that fails a number of times as if the store was unavailable."""
    left = [times]

    def prepare() -> None:
        if left[0]:
            left[0] -= 1
            raise obstore.exceptions.GenericError("the bucket is away")
        then()

    return prepare


def test_an_unreachable_store_is_retried(attempt: Supervisor) -> None:
    """An attempt that cannot fetch its checkpoint starts later."""
    attempt._prepare = failing(3, attempt._prepare)  # type: ignore[method-assign]
    attempt._begin()
    assert (attempt.folder / f"job-{attempt.attempt}.json").exists()


def test_a_run_that_waits_for_its_store_can_be_cancelled(
    attempt: Supervisor, database: Database, ada: User
) -> None:
    """A run that waits for its storage can be cancelled without training, with that reason."""
    with database.writing() as session:
        run_control.cancel(session, attempt.run_id, ada)
    attempt._prepare = failing(10**6, lambda: None)  # type: ignore[method-assign]
    attempt.run()
    with database.reading() as session:
        assert runs.get(session, attempt.run_id).status == Status.CANCELLED
        assert "the bucket is away" in (runs.statuses(session, attempt.run_id)[-1].reason or "")


def test_what_waits_to_be_recorded_outlives_a_stop(attempt: Supervisor) -> None:
    """A worker stopped while the storage is unavailable returns its run without losing data."""
    spooled = attempt.files.spool / f"{attempt.attempt}-0.spool"
    spooled.parent.mkdir()
    spooled.write_bytes(b"of a supervisor that died")
    attempt._recover = failing(10**6, lambda: None)  # type: ignore[method-assign]
    attempt.preempt()
    attempt.run()
    with attempt.database.reading() as session:
        assert runs.get(session, attempt.run_id).status == Status.QUEUED
    assert spooled.exists()


def test_the_lease_is_renewed_while_a_file_is_on_its_way(attempt: Supervisor) -> None:
    """The lease is renewed during a slow upload."""
    attempt._renew()
    is_renewed = threading.Event()

    def lease() -> float:
        with attempt.database.reading() as session:
            return session.scalars(select(RunNode.lease_expires_at)).one()

    before = lease()

    def meanwhile() -> None:
        attempt._renew_lease()
        if lease() > before:
            is_renewed.set()

    def put() -> str:
        assert is_renewed.wait(60)
        return "stored"

    assert wait_for(put, meanwhile) == "stored"


def test_a_takeover_ends_the_wait(attempt: Supervisor, database: Database) -> None:
    """A superseded attempt stops waiting for the storage, and other errors are raised."""
    with database.writing() as session:
        queue.end(session, attempt.run_id, attempt.attempt, Status.QUEUED, reason="given up")
    is_told = threading.Event()

    def meanwhile() -> None:
        is_told.set()
        attempt._renew_lease()

    with pytest.raises(queue.StaleAttempt):
        wait_for(is_told.wait, meanwhile)
    with pytest.raises(TimeoutError, match="slow"):
        wait_for(lambda: (_ for _ in ()).throw(TimeoutError("slow")), lambda: None)
