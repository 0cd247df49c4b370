"""Supervisors that are stopped or disconnected: no run trains twice or writes late."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from sqlalchemy import make_url

from db.runs import runs
from db.tables import Status
from tests.faults.clocked import intervals
from tests.faults.conftest import COUNTS
from tests.faults.leases_made import LEASE, RECIPE, add_clock
from tests.site import Site, until


def test_a_stopped_supervisor_cannot_train_or_write_on(site: Site, tmp_path: Path) -> None:
    """After a SIGSTOP past the lease the training is dead before the next one starts."""
    environment = {**LEASE, **add_clock(tmp_path)}
    run_id = site.submit(recipe=RECIPE, steps=400)
    with site.worker("w1", **environment):
        site.wait_for_step(run_id, 20)
        stopped = psutil.Process(site.supervisor_pid(run_id))
        stopped.suspend()
        with site.worker("w2", **environment):
            until(lambda: site.run(run_id).attempt == 2)
            site.wait_for_step(run_id, 60)
            before = site.run(run_id)
            stopped.resume()
            until(lambda: not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE)
            run = site.wait(run_id)
    assert (run.status, run.attempt, before.attempt) == (Status.FINISHED, 2, 2)
    assert site.count_steps(run_id) == 400
    assert_apart(tmp_path)
    assert "unreachable" in site.history(run_id)
    COUNTS.append("supervisor stopped past its lease: no overlap, nothing written after takeover")


@pytest.mark.only_on("postgresql")
def test_a_supervisor_cut_off_from_its_database_gives_up_in_time(
    site: Site, tmp_path: Path
) -> None:
    """If packets to the database vanish, the training ends before the next one starts."""
    run_id = site.submit(recipe=RECIPE, steps=400)
    environment = {**LEASE, **add_clock(tmp_path)}
    with (
        leaky_proxy(site.url) as (url, cut),
        site.worker("w1", **environment | {"HALFSTEP_DATABASE_URL": url}) as first,
    ):
        site.wait_for_step(run_id, 20)
        cut()
        with site.worker("w2", **environment):
            until(lambda: site.run(run_id).attempt == 2)
            run = site.wait(run_id)
        first.kill()
    assert (run.status, run.attempt) == (Status.FINISHED, 2)
    assert run.resumed_step  # it was asked for a checkpoint before it was to be dead
    assert site.count_steps(run_id) == 400
    assert_apart(tmp_path)
    COUNTS.append("database connection hung: no overlap, nothing written after takeover")
    os.kill(site.supervisor_pid(run_id), signal.SIGKILL)  # it would wait for its database for ever


def test_an_outage_shorter_than_the_lease_goes_unnoticed(site: Site, tmp_path: Path) -> None:
    """A supervisor that was stopped for less than the lease continues the same attempt."""
    run_id = site.submit(recipe=RECIPE, steps=200)
    with site.worker(**LEASE, **add_clock(tmp_path)):
        site.wait_for_step(run_id, 20)
        supervisor = psutil.Process(site.supervisor_pid(run_id))
        supervisor.suspend()
        time.sleep(1.5)
        supervisor.resume()
        run = site.wait(run_id)
    assert (run.status, run.attempt) == (Status.FINISHED, 1)
    with site.database.reading() as session:
        assert Status.QUEUED not in [row.status for row in runs.statuses(session, run_id)][1:]


def assert_apart(tmp_path: Path) -> None:
    """Assert that the training periods that the trainings recorded do not overlap."""
    first, second = intervals(tmp_path / "clock")
    assert first[1] < second[0]


@contextmanager
def leaky_proxy(url: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Forward a TCP port to PostgreSQL's socket; after cut() packets vanish in both directions."""
    parsed = make_url(url)
    target = f"{parsed.query['host']}/.s.PGSQL.5432"
    is_cut = threading.Event()
    listening = socket.create_server(("127.0.0.1", 0))
    open_sockets: list[socket.socket] = []

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not is_cut.is_set():
                    sink.sendall(data)
            if not is_cut.is_set():
                sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(target)
                open_sockets.extend((client, server))
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    port = listening.getsockname()[1]
    through = f"postgresql+psycopg://{parsed.username}@127.0.0.1:{port}/{parsed.database}"
    try:
        yield through, is_cut.set
    finally:
        listening.close()
        for each in open_sockets:
            each.close()
