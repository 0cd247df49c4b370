"""Database outages: training continues, and nothing is lost or recorded twice."""

import statistics
import time
from pathlib import Path

import pytest
from sqlalchemy import make_url

from db.files import checkpoints
from db.runs import runs
from db.tables import Status
from db.telemetry import step_rows
from db.telemetry.pyramid import END
from tests.conftest import postgresql_control
from tests.faults.conftest import COUNTS, IS_FULL, often, only_in_full
from tests.site import GATED, Site, is_running, until


@pytest.mark.only_on("postgresql")
def test_runs_train_on_while_postgresql_is_stopped(site: Site) -> None:
    """PostgreSQL is stopped in the middle of three runs and started again: every step is
    recorded.
    """
    seconds, steps = often(full=30, short=0), often(full=15_000, short=200)
    ids = [site.submit(steps=steps, recipe=GATED) for _ in range(3)]
    folder = Path(str(make_url(site.url).query["host"]))
    if IS_FULL:
        site.open_gate()
    with site.start_gated_worker(HALFSTEP_CPU_DEVICES="3"):
        for run_id in ids:
            site.wait_for_step(run_id, often(full=100, short=10))
        began = time.time()
        postgresql_control(folder, "stop", "-m", "immediate")
        before = [spool_bytes(site, run_id) for run_id in ids]
        time.sleep(seconds)
        until(
            lambda: all(
                spool_bytes(site, run_id) > so_far
                for run_id, so_far in zip(ids, before, strict=True)
            )
        )
        postgresql_control(folder, "start")
        ended_at = time.time()
        site.open_gate()
        until(lambda: site.reaches_database())
        ended = [site.wait(run_id) for run_id in ids]
    for run in ended:
        assert (run.status, run.attempt) == (Status.FINISHED, 1)
        assert site.count_steps(run.id) == run.step == steps
    COUNTS.append(
        f"PostgreSQL away for {ended_at - began:.0f} s: 3 runs, {3 * steps} steps all there; "
        f"median step during ÷ before or after: {ratio(site, ids, began, ended_at):.2f}"
    )


def spool_bytes(site: Site, run_id: int) -> int:
    folder = site.scratch(run_id) / "spool"
    return sum(path.stat().st_size for path in folder.glob("*.spool"))


def ratio(site: Site, ids: list[int], began: float, ended: float) -> float:
    """Return the median step time in the outage, relative to the rest."""
    during, other = [], []
    for run_id in ids:
        started_at = site.run(run_id).started_at or 0
        with site.database.reading() as session:
            for row in step_rows.read_rows(session, run_id, most=END):
                away = began < started_at + row.elapsed_ms / 1000 < ended
                (during if away else other).append(row.step_us)
    return statistics.median(during) / statistics.median(other)


@only_in_full
@pytest.mark.only_on("postgresql")
def test_a_run_survives_an_outage_longer_than_the_lease(site: Site) -> None:
    """In an outage longer than the lease the training saves a checkpoint, and continues from it."""
    run_id = site.submit(steps=20_000)
    folder = Path(str(make_url(site.url).query["host"]))
    with site.worker(HALFSTEP_LEASE_SECONDS="6"):
        site.wait_for_step(run_id, 100)
        training = site.training(run_id)
        postgresql_control(folder, "stop", "-m", "immediate")
        until(lambda: not is_running(training))
        time.sleep(6)
        postgresql_control(folder, "start")
        until(lambda: site.reaches_database())
        run = site.wait(run_id)
    assert (run.status, run.attempt) == (Status.FINISHED, 2)
    assert site.count_steps(run_id) == run.step == 20_000
    with site.database.reading() as session:
        reasons = [row.reason for row in runs.statuses(session, run_id)]
        states = checkpoints.of_run(session, run_id)
    assert "its lease could not be renewed" in reasons
    assert f"resumed at step {run.resumed_step}, exactly" in reasons
    assert "preempt" in [row.reason for row in states if row.step == run.resumed_step]
    COUNTS.append(f"PostgreSQL away for longer than the lease: resumed at step {run.resumed_step}")


@only_in_full
@pytest.mark.only_on("sqlite")
def test_a_locked_database_delays_only_telemetry(site: Site) -> None:
    """While the database is locked beyond its timeout, training continues, and every step is
    recorded.
    """
    run_id = site.submit(steps=20_000)
    with site.worker():
        site.wait_for_step(run_id, 100)
        with site.database.writing() as session:
            session.connection()  # from here on no other process writes
            before = spool_bytes(site, run_id)
            time.sleep(35)
            assert spool_bytes(site, run_id) > before
        run = site.wait(run_id)
    assert (run.status, run.attempt) == (Status.FINISHED, 1)
    assert site.count_steps(run_id) == run.step == 20_000
    COUNTS.append("SQLite locked for 35 s: all steps there, one attempt")
