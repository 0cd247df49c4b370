"""What a worker's machine keeps of runs that were deleted."""

from pathlib import Path

import pytest

from db import queue, run_bin
from db.database import Database
from db.settings import Settings
from db.tables import Run, Status, User
from tests.db.conftest import running, worker  # noqa: F401 - fixtures
from worker.tidying import delete_erased


def test_only_folders_of_erased_runs_go(
    database: Database,
    running: Run,  # noqa: F811
    ada: User,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the bin a run keeps its folder, as every stranger's does; then it goes, though a file
    of another is in the way.
    """
    settings = Settings(data=tmp_path / "data", database_url=str(database.engine.url))
    assert delete_erased(settings, database) == []
    for name in (str(running.id), "77", "notes"):
        (tmp_path / "data" / "runs" / name / "spool").mkdir(parents=True)
    with database.writing() as session:
        queue.end(session, running.id, 1, Status.FINISHED)
        run_bin.delete(session, running.id, ada)
    assert delete_erased(settings, database) == []
    with database.writing() as session:
        run_bin.erase(session, running.id, ada)
    assert delete_erased(settings, database) == [running.id]
    assert {path.name for path in (tmp_path / "data" / "runs").iterdir()} == {"77", "notes"}
    settings.run_folder(running.id).write_text("not a folder")
    assert delete_erased(settings, database) == []
    assert f"the folder of run {running.id}" in capsys.readouterr().out
