"""Files of deleted runs on a worker's machine are cleaned up."""

import os
from pathlib import Path
from shlex import quote

import pytest

from db.database import Database
from db.queue import queue, run_control
from db.runs import trash
from db.settings import Settings
from db.tables import Run, Status, User
from tests.db.conftest import running, submit_command, worker  # noqa: F401 - fixtures
from tests.site import Site, until
from worker.cleanup import delete_checkouts, delete_erased

FOLDERS = ("runs", "scratch")


def test_only_folders_of_erased_runs_go(
    database: Database,
    running: Run,  # noqa: F811
    ada: User,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Folders of erased runs are deleted, those of runs in the trash and of others are kept."""
    settings = Settings(data=tmp_path / "data", database_url=str(database.engine.url))
    assert delete_erased(settings, database) == []
    for name in (str(running.id), "77", "notes"):
        for folder in FOLDERS:
            (tmp_path / "data" / folder / name / "0").mkdir(parents=True)
    with database.writing() as session:
        queue.end(session, running.id, 1, Status.FINISHED)
        trash.delete(session, running.id, ada)
    assert delete_erased(settings, database) == []
    with database.writing() as session:
        trash.erase(session, running.id, ada)
    assert delete_erased(settings, database) == [running.id]
    for folder in FOLDERS:
        assert {path.name for path in (tmp_path / "data" / folder).iterdir()} == {"77", "notes"}
    settings.run_folder(running.id).write_text("not a folder")
    assert delete_erased(settings, database) == []
    [logged] = caplog.records
    assert "the folder of the deleted run cannot be removed" in logged.getMessage()
    assert vars(logged)["run"] == running.id


def test_the_latest_checkouts_stay(database: Database, ada: User, tmp_path: Path) -> None:
    """Checkouts of the latest ended commands, and of ones that may be retried, are kept."""
    url = str(database.engine.url)
    settings = Settings(data=tmp_path / "data", database_url=url, max_cached_checkouts=2)
    assert delete_checkouts(settings, database) == []
    with database.writing() as session:
        commands = [submit_command(session, ada, "python it.py") for _ in range(6)]
        for place, run in enumerate(commands[:5]):
            run.status, run.ended_at = Status.FINISHED, 100.0 - place
        queued, ids = commands[5].id, [run.id for run in commands]
    for run_id in (*ids[:4], queued):
        (settings.scratch_folder(run_id) / "work" / ".git").mkdir(parents=True)
    (settings.scratch_folder(ids[4]) / "work").mkdir(parents=True)
    assert delete_checkouts(settings, database) == ids[2:4]
    assert delete_checkouts(settings, database) == []
    stays = {run_id for run_id in ids if (settings.scratch_folder(run_id) / "work").exists()}
    assert stays == {*ids[:2], ids[4], queued}


@pytest.mark.slow
def test_runs_train_while_a_folder_is_deleted(site: Site, tmp_path: Path) -> None:
    """The worker continues while a deleted run's folder is removed."""
    gate, programs = tmp_path / "gate", tmp_path / "programs"
    programs.mkdir()
    slow, wait = programs / "rm", f"until [ -e {quote(str(gate))} ]; do sleep 0.1; done"
    deleted = site.submit()
    slow.write_text(f'#!/bin/sh\ncase "$*" in */{deleted}) {wait};; esac\nexec /bin/rm "$@"\n')
    slow.chmod(0o755)
    with site.database.writing() as session:
        run_control.cancel(session, deleted, site.owner)
        trash.delete(session, deleted, site.owner)
        trash.erase(session, deleted, site.owner)
    folder = site.scratch(deleted)
    folder.mkdir(parents=True)
    with site.worker(PATH=f"{programs}:{os.environ['PATH']}"):
        try:
            assert site.wait(site.submit()).status == Status.FINISHED
            assert folder.exists()
        finally:
            gate.touch()  # it would wait after a failure, too
        until(lambda: not folder.exists())
