"""Data folders of an earlier version, where runs wrote into the service's folder."""

import os
import shutil
from pathlib import Path

import pytest

from db.settings import Settings
from db.tables import Status
from db.telemetry import step_rows
from db.telemetry.pyramid import END
from tests.site import Site
from worker.attempts.scratch_folders import divide_all, make_folders


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A data folder where run 1 has a spool, files and links, run 2 an attempt, run 3 two nodes."""
    settings = Settings(data=tmp_path / "data")
    for folder in ("1", "2", "3", "3/node-1"):
        run = settings.data / "runs" / folder
        for name in ("spool", "work", "tmp", "checkpoints/step-1", "log", "mine"):
            (run / name).mkdir(parents=True)
        (run / "job-1.json").write_text("{}")
        (run / "spool" / "1-0.spool").write_bytes(b"steps")
        (run / "work" / "link").symlink_to("/etc/passwd")
        (run / "checkpoints" / "step-1.pt").write_bytes(b"state")
        (run / "checkpoints" / "step-1" / "shard").write_bytes(b"shard")
    run = settings.run_folder(1)
    for place in ("link", "quarantine-1", "log/attempt-0001-000002.txt", "checkpoints/step-2.pt"):
        (run / place).symlink_to("/etc/passwd")
    os.mkfifo(run / "outcome-1.json")
    return settings


def test_an_earlier_version_s_folders_are_divided(settings: Settings) -> None:
    """Files of runs are moved, the service's stay, and links are dropped; a repetition does
    nothing.
    """
    for _ in range(2):
        divide_all(settings, [2])
        folder, scratch = settings.run_folder(1), settings.scratch_folder(1)
        assert {each.name for each in folder.iterdir()} == {"checkpoints", "job-1.json", "log"}
        assert {each.name for each in scratch.iterdir()} == {"spool", "work", "mine", "checkpoints"}
        assert [each for each in folder.rglob("*") if each.is_symlink()] == []
        assert (scratch / "spool" / "1-0.spool").read_bytes() == b"steps"
        assert (scratch / "work" / "link").is_symlink()
        for name in ("step-1.pt", "step-1/shard"):  # for a rollback
            assert (scratch / "checkpoints" / name).samefile(folder / "checkpoints" / name)
    assert (settings.run_folder(2) / "spool" / "1-0.spool").exists()
    assert not settings.scratch_folder(2).exists()
    assert (settings.scratch_folder(3, 1) / "spool" / "1-0.spool").exists()
    assert not (settings.run_folder(3, 1) / "spool").exists()


def test_an_interrupted_division_continues(settings: Settings) -> None:
    """A division that was interrupted by a kill is completed by the next call."""
    partial = settings.scratch_folder(2).with_name(".0")
    partial.mkdir(parents=True)
    (settings.run_folder(2) / "work").rename(partial / "work")
    _folder, scratch = make_folders(settings, 2)
    assert {each.name for each in scratch.iterdir()} == {"spool", "work", "mine", "checkpoints"}
    assert not partial.exists()


@pytest.mark.slow
def test_a_run_of_an_earlier_version_resumes(site: Site) -> None:
    """A run of an earlier version finds its checkpoint and spool, and resumes."""
    with site.start_gated_worker(HALFSTEP_SANDBOX="yes"):
        run_id = site.submit(recipe="gated", steps=60)
        site.wait_for_step(run_id, 5)
    assert site.run(run_id).status == Status.QUEUED
    scratch, folder = site.scratch(run_id), site.data / "runs" / str(run_id)
    for each in scratch.iterdir():
        if each.name != "checkpoints":  # of which the service's folder has the other name
            each.rename(folder / each.name)
    shutil.rmtree(scratch.parent)
    site.open_gate()
    with site.start_gated_worker(HALFSTEP_SANDBOX="yes"):
        ended = site.wait(run_id)
    assert (ended.status, ended.attempt, ended.step) == (Status.FINISHED, 2, 60)
    assert site.count_steps(run_id) == 60
    with site.database.reading() as session:
        rows = step_rows.read_rows(session, run_id, most=END)
    assert [row.step for row in rows] == list(range(1, 61))
    assert not (folder / "spool").exists()
