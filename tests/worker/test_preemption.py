"""Preemption with a real server, worker and training: a preempted run ends with equal bits."""

import pytest

from db.runs import runs
from db.tables import Status
from tests.faults.kills_made import serving
from tests.faults.sameness import assert_same, config
from tests.site import GATED, Site, free_port

pytestmark = pytest.mark.sql


def test_a_run_gives_its_device_to_a_higher_one_and_ends_with_equal_bits(site: Site) -> None:
    """A preempted run gives its device to a higher one, and then resumes exactly."""
    settings = config(steps=120)
    low = site.submit(recipe=GATED, config=settings, preemptible=True)
    with serving(site, free_port()), site.start_gated_worker():
        site.wait_for_step(low, 10)
        high = site.submit(steps=20, priority=1)
        assert site.wait(high).status == Status.FINISHED
        site.open_gate()
        run = site.wait(low)
        undisturbed = site.submit(recipe=GATED, config=settings)
        site.wait(undisturbed)
    with site.database.reading() as session:
        reasons = [row.reason for row in runs.statuses(session, low)]
    assert reasons.count(f"preempted by run {high}") == 2  # pausing, queued
    assert (run.attempt, run.killed_attempts) == (2, 0)
    assert f"resumed at step {run.resumed_step}, exactly" in site.log(low)
    assert_same(site, low, undisturbed)
