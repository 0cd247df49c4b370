"""A purge by a killed server is continued by the next one."""

import os
import signal
import sys

from db.queue import queue
from db.runs import trash
from db.tables import Run, Status
from tests import warm
from tests.db.telemetry.telemetry_made import make_steps, record
from tests.faults.conftest import COUNTS
from tests.site import Site, free_port, until

STEPS = 240_000


def test_a_server_killed_in_the_middle(site: Site) -> None:
    """A server killed after some of the steps is continued by the next one."""
    worker = site.idle_worker()
    run_id = site.submit(steps=STEPS)
    site.lost_attempt(worker, run_id)
    run = site.run(run_id)
    record(site.database, run, make_steps([1.0] * STEPS))
    (site.scratch(run_id) / "spool").mkdir(parents=True)
    with site.database.writing() as session:
        queue.end(session, run_id, 1, Status.FINISHED)
        trash.delete(session, run_id, site.owner)
        trash.erase(session, run_id, site.owner)
    command = [sys.executable, "-m", "halfstep.cli.main", "server"]
    environment = {**os.environ, **site.environment, "HALFSTEP_PORT": str(free_port())}
    server = warm.Popen(command, env=environment)
    until(lambda: site.count_steps(run_id) < STEPS)
    server.send_signal(signal.SIGKILL)
    server.wait()
    left = site.count_steps(run_id)
    assert left > 0
    server = warm.Popen(command, env=environment)
    try:
        until(lambda: _row(site, run_id).erased_at is not None)
    finally:
        server.terminate()
        server.wait()
    assert site.count_steps(run_id) == 0
    assert not (site.data / "scratch" / str(run_id)).exists()
    COUNTS.append(f"server killed with {left:,} of {STEPS:,} steps left to erase: the next went on")


def _row(site: Site, run_id: int) -> Run:
    with site.database.reading() as session:
        return session.get_one(Run, run_id)
