"""Full disks and damaged checkpoints: they are named, and no damaged one is loaded."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from db.database import Database
from db.files import checkpoints
from db.queue import run_control
from db.runs import runs
from db.settings import Settings
from db.tables import Status
from tests.faults.conftest import COUNTS, often, only_in_full
from tests.site import GATED, Site, until
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import CheckpointError
from worker.attempts.supervisor import Supervisor
from worker.disk_space import DiskSpace

SMALL = 6 * 2**20  # bytes


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a few checkpoints."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


CONFIG = {
    "precision": "fp16",
    "training": {"steps": 100_000},
    "checkpoints": {"every_steps": 100},
}


def test_a_full_disk_pauses_the_run_which_continues_once_there_is_room(
    site: Site, small_disk: Path
) -> None:
    """When a disk is full the run pauses with the disk's name, and its newest checkpoint is
    complete.
    """
    site.data = small_disk
    run_id = site.submit(config=CONFIG)
    with site.worker(HALFSTEP_RESERVE_DISK_GB="0"):
        site.wait(run_id, Status.PAUSED)
    assert_disk_full(site, run_id)
    with site.database.reading() as session:
        saved = checkpoints.of_run(session, run_id)
    newest = next(row for row in saved if row.kind == "checkpoint")
    state = checkpoint.load(small_disk / newest.key, sha256=newest.sha256)
    assert state["progress"]["step"] == newest.step
    subprocess.run(["mount", "-o", f"remount,size={20 * SMALL}", small_disk], check=True)
    with site.database.writing() as session:
        run_control.resume(session, run_id, site.owner)
    with site.worker(HALFSTEP_RESERVE_DISK_GB="0"):
        until(lambda: site.run(run_id).resumed_step == newest.step)
    COUNTS.append(f"disk of {SMALL} bytes full: paused, resumed from step {newest.step}")


@pytest.mark.only_on("sqlite")
def test_a_worker_whose_disk_is_nearly_full_starts_no_run(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker logs once that its disk is nearly full, and the run stays queued."""
    run_id = site.submit(steps=10)
    worker = site.idle_worker()
    worker.disk = DiskSpace(worker.settings.model_copy(update={"reserve_disk_gb": 1e9}))
    worker._claim()
    worker._claim()
    assert site.run(run_id).status == Status.QUEUED
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "HALFSTEP_RESERVE_DISK_GB" in caplog.text


@pytest.mark.only_on("sqlite")
def test_a_run_is_warned_once_before_the_disk_is_full(site: Site) -> None:
    """A run gets one warning before the disk is full, in its history and its log."""
    run_id = site.submit(steps=10)
    attempt = site.lost_attempt(site.idle_worker(), run_id)
    settings = Settings(data=site.data, database_url=site.url, reserve_disk_gb=1e9)
    supervisor = Supervisor(settings, site.database, *attempt)
    for _ in range(2):
        supervisor._warn_of_disk()
    with site.database.reading() as session:
        reasons = [row.reason or "" for row in runs.statuses(session, run_id)]
    assert ["free space" in reason for reason in reasons].count(True) == 1


@only_in_full
@pytest.mark.only_on("sqlite")
def test_a_disk_full_of_spool_and_database_pauses_the_run_once_there_is_room(
    site: Site, small_disk: Path
) -> None:
    """With full disks of spool and database nothing is written; then the run pauses with the
    reason.
    """
    site.database.dispose()  # which leaves one file without a journal
    path = shutil.copy(make_url(site.url).database, small_disk)
    site.data, site.url = small_disk, f"sqlite:///{path}"
    site.database = Database(site.url)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(SMALL // 3))
    run_id = site.submit(config={**CONFIG, "checkpoints": {}})
    with site.worker(HALFSTEP_RESERVE_DISK_GB="0"):
        until(lambda: site.has_training(run_id))
        until(lambda: not site.has_training(run_id))
        recorded = site.count_steps(run_id)
        assert site.run(run_id).ended_at is None
        ballast.unlink()
        run = site.wait(run_id, Status.PAUSED)
    assert_disk_full(site, run_id)
    assert site.count_steps(run_id) == run.step >= recorded
    site.database.dispose()
    COUNTS.append(f"disk full of spool and database: run paused, all {run.step} steps recorded")


def assert_disk_full(site: Site, run_id: int) -> None:
    """Assert that the run is paused with the name of the full disk."""
    with site.database.reading() as session:
        last = runs.statuses(session, run_id)[-1]
    folder = site.data / "runs" / str(run_id)
    reason = f"no space left on the disk that holds {folder}: free space, then resume the run"
    assert (last.status, last.failure_kind, last.reason) == (
        Status.PAUSED,
        "infrastructure",
        reason,
    )


@pytest.mark.only_on("sqlite")
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(site: Site) -> None:
    """If the newest checkpoint has a flipped bit, the run resumes the one before, and says why."""
    config = {
        "precision": "fp16",
        "training": {"steps": 200},
        "checkpoints": {"every_steps": 10},
    }
    run_id = site.submit(config=config, recipe=GATED)
    with site.start_gated_worker():
        site.wait_for_step(run_id, 25)
        with site.database.writing() as session:
            run_control.pause(session, run_id, site.owner)
        site.wait(run_id, Status.PAUSED)
    with site.database.reading() as session:
        newest, before = checkpoints.to_resume(session, runs.get(session, run_id))[:2]
    path = site.data / newest.key
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with site.database.writing() as session:
        run_control.resume(session, run_id, site.owner)
    site.open_gate()
    with site.start_gated_worker():
        run = site.wait(run_id)
    assert (run.status, run.resumed_step) == (Status.FINISHED, before.step)
    assert f"{newest.key} is damaged" in site.log(run_id)
    assert site.count_steps(run_id) == 200
    COUNTS.append("one flipped bit: named, the checkpoint before it used")


@pytest.mark.only_on("sqlite")
def test_a_checkpoint_cut_anywhere_is_never_loaded(site: Site, tmp_path: Path) -> None:
    """A checkpoint cut at any KiB, or with a flipped bit, is refused by name."""
    run_id = site.submit(steps=10)
    with site.worker():
        site.wait(run_id)
    with site.database.reading() as session:
        state = checkpoints.to_resume(session, runs.get(session, run_id))[0]
    whole = (site.data / state.key).read_bytes()
    damaged = tmp_path / "damaged.pt"
    cuts = range(0, len(whole), 1024 * often(full=1, short=16))
    for cut in cuts:
        damaged.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"damaged\.pt"):
            checkpoint.load(damaged)
    flips = range(64, len(whole), len(whole) // often(full=200, short=20))
    for place in flips:
        damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"damaged\.pt"):
            checkpoint.load(damaged, sha256=state.sha256)
    COUNTS.append(f"checkpoint cut at {len(cuts)} places and flipped at {len(flips)}: never loaded")
