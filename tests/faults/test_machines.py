"""Runs that continue with another version of the software, or on another machine."""

import os
from pathlib import Path

from obstore.store import LocalStore

from db.files.storage import mismatches
from db.runs import runs
from db.tables import Status
from tests.faults.conftest import COUNTS, only_in_full
from tests.site import GATED, Site


def test_a_run_continues_with_another_version_as_its_page_says(site: Site, tmp_path: Path) -> None:
    """A run resumed by a newer version names the changed packages on its page."""
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "sitecustomize.py").write_text(
        "import platform\nplatform.python_version = lambda: '99.0'\n"
    )
    run_id = site.submit(steps=200, recipe=GATED)
    with site.start_gated_worker():
        site.wait_for_step(run_id, 10)
    stopped = site.run(run_id)
    site.open_gate()
    with site.start_gated_worker(
        PYTHONPATH=os.pathsep.join([str(newer), os.environ.get("PYTHONPATH", "")])
    ):
        run = site.wait(run_id)
    assert (stopped.status, run.status, run.attempt) == (Status.QUEUED, Status.FINISHED, 2)
    assert run.resumed_step == stopped.step
    assert site.count_steps(run_id) == 200
    with site.database.reading() as session:
        reasons = [row.reason or "" for row in runs.statuses(session, run_id)]
    said = f"resumed at step {stopped.step}, not bit-exactly: python version was "
    assert [reason.endswith(", is 99.0") for reason in reasons if reason.startswith(said)] == [True]
    COUNTS.append("worker stopped and started with newer software: resumed, and the page says so")


@only_in_full
def test_a_run_moves_to_a_machine_that_has_nothing_of_it(site: Site, tmp_path: Path) -> None:
    """Another machine resumes, prunes and forks a run's checkpoints from the store."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    environment = {"HALFSTEP_STORAGE_URL": bucket.as_uri()}
    config = {
        "precision": "fp16",
        "training": {"steps": 800},
        "checkpoints": {"every_steps": 50, "keep_last": 2},
    }
    run_id = site.submit(config=config)
    with site.worker("w1", **environment):
        site.wait_for_step(run_id, 200)
    stopped = site.run(run_id)
    environment["HALFSTEP_DATA"] = str(tmp_path / "elsewhere")
    with site.worker("w2", **environment):
        run = site.wait(run_id)
        longer = {**config, "training": {"steps": 900}}
        fork = site.wait(site.submit(config=longer, parent_id=run_id, parent_step=run.step))
    assert (run.status, run.attempt, run.resumed_step) == (Status.FINISHED, 2, stopped.step)
    assert (fork.status, fork.resumed_step) == (Status.FINISHED, run.step)
    with site.database.reading() as session:
        assert mismatches(session, LocalStore(bucket), deep=True) == []
    COUNTS.append("a run resumed and forked on a machine without its files, by way of the store")
