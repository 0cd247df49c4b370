"""Clocks that jump: leases and step times do not follow them."""

import subprocess
import time
from pathlib import Path

from sqlalchemy import func, select

from db.tables import Status, Step
from db.telemetry import series
from tests.faults.conftest import COUNTS
from tests.faults.test_leases import LEASE, RECIPE, clocked
from tests.site import Site

HOUR = 3600


def test_a_clock_that_jumps_an_hour_either_way_changes_nothing(site: Site, tmp_path: Path) -> None:
    """Worker, supervisor and training live through both jumps in one attempt, never unreachable.

    SQLite takes its time from the machine, so there the database's own clock jumps with them.
    """
    offset = tmp_path / "offset"
    jump(offset, 0)
    run_id = site.submit(recipe=RECIPE, steps=250)
    with site.worker(**LEASE, **clocked(tmp_path), **faked(offset)):
        site.wait_for_step(run_id, 20)
        jump(offset, -HOUR)
        site.wait_for_step(run_id, 100)
        jump(offset, HOUR)
        run = site.wait(run_id)
    assert (run.status, run.attempt) == (Status.FINISHED, 1)
    assert "unreachable" not in site.history(run_id)
    with site.database.reading() as session:
        query = select(func.min(Step.elapsed_ms), func.max(Step.elapsed_ms))
        first, last = session.execute(query.where(Step.run_id == run_id)).one()
        said_at = series.log_lines(session, run_id)[-1].time
    assert 0 < first < last < HOUR * 1000
    assert said_at > time.time() + HOUR / 2  # so the clock did jump
    COUNTS.append("clock back an hour, then two ahead: one attempt, never unreachable")


def jump(offset: Path, seconds: int) -> None:
    """Set the clock of all that look there so far from the real one."""
    written = offset.with_suffix(".new")
    written.write_text(str(seconds))
    written.replace(offset)


def faked(offset: Path) -> dict[str, str]:
    """Let the clock that people can set, and no other, follow a file."""
    source, library = Path(__file__).with_name("jumping_clock.c"), offset.with_suffix(".so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return {"LD_PRELOAD": str(library), "HALFSTEP_TEST_OFFSET": str(offset)}
