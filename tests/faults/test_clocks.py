"""Leases and step times do not follow clocks that jump."""

import time
from pathlib import Path

from db.tables import Status
from db.telemetry import series, step_rows
from db.telemetry.pyramid import END
from tests.faults.clocks_made import HOUR, fake_clock, jump
from tests.faults.conftest import COUNTS
from tests.faults.leases_made import LEASE, RECIPE, add_clock
from tests.site import Site


def test_a_clock_that_jumps_an_hour_either_way_changes_nothing(site: Site, tmp_path: Path) -> None:
    """Worker, supervisor and training survive jumps of the wall clock by an hour in one attempt,
    never unreachable. SQLite takes its time from the machine, so there the database's own clock
    jumps with them.
    """
    offset = tmp_path / "offset"
    jump(offset, 0)
    run_id = site.submit(recipe=RECIPE, steps=250)
    with site.worker(**LEASE, **add_clock(tmp_path), **fake_clock(offset)):
        site.wait_for_step(run_id, 20)
        jump(offset, -HOUR)
        site.wait_for_step(run_id, 100)
        jump(offset, HOUR)
        run = site.wait(run_id)
    assert (run.status, run.attempt) == (Status.FINISHED, 1)
    assert "unreachable" not in site.history(run_id)
    with site.database.reading() as session:
        rows = step_rows.read_rows(session, run_id, most=END)
        first, last = rows[0].elapsed_ms, rows[-1].elapsed_ms
        said_at = series.log_lines(session, run_id)[-1].time
    assert 0 < first < last < HOUR * 1000
    assert said_at > time.time() + HOUR / 2  # so the clock did jump
    COUNTS.append("clock back an hour, then two ahead: one attempt, never unreachable")
