"""Disk usage of runs, by command and API."""

import pytest
from sqlalchemy import update
from starlette.testclient import TestClient

from db.database import Database
from db.files import checkpoints
from db.queue import queue
from db.runs import runs
from db.runs.trash import DAY_SECONDS
from db.settings import Settings
from db.tables import CheckpointFile, Run, Status, User
from tests.app.conftest import submit
from tests.db.files.checkpoints_made import make_saved
from tests.site import halfstep
from tests.spool_made import checkpoint_of


@pytest.fixture
def old(
    database: Database,
    running: Run,
    settings: Settings,
    ada: User,
    monkeypatch: pytest.MonkeyPatch,
) -> int:
    """An ended run in an installation that the commands find."""
    monkeypatch.setenv("HALFSTEP_DATA", str(settings.data))
    url = database.engine.url.render_as_string(hide_password=False)
    monkeypatch.setenv("HALFSTEP_DATABASE_URL", url)
    with database.writing() as session:
        for step in (10, 20):
            key = f"runs/{running.id}/checkpoints/{step}.pt"
            path = settings.data / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * 10)
            checkpoints.publish(session, running.id, 1, checkpoint_of(make_saved(step)), [key])
        queue.end(session, running.id, 1, Status.FINISHED)
        runs.get(session, running.id).ended_at = DAY_SECONDS
        session.execute(update(CheckpointFile).values(created_at=DAY_SECONDS))
    submit(database, ada, name="small")
    return running.id


def run_command(*words: str) -> str:
    """Return the output of a command in this installation."""
    done = halfstep("storage", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_largest_come_first(old: int) -> None:
    """The list of disk usage has the largest runs first and a limit; its total is of all runs."""
    result = run_command("runs", "--limit", "1").splitlines()
    assert result[0].split() == ["20", "B", str(old), "finished", "digits-fp16", "ada"]
    assert result[1:3] == [
        "20 B of 2 runs, those shown included",
        "0 B of 0 deleted ones in the trash",
    ]
    assert "free on the disk of" in result[3]


@pytest.mark.slow
def test_files_to_delete_are_listed_first(old: int, settings: Settings) -> None:
    """With --dry-run nothing is deleted; with --yes the listed files are."""
    folder = settings.run_folder(old) / "checkpoints"
    result = run_command("prune", "--checkpoints", "30", "--dry-run")
    assert f"{old}  digits-fp16: 1 step's checkpoints" in result
    assert "1 runs, 10 B of files" in result
    assert len(list(folder.iterdir())) == 2
    assert "1 runs pruned, 10 B freed" in run_command("prune", "--checkpoints", "30", "--yes")
    assert [path.name for path in folder.iterdir()] == ["20.pt"]


@pytest.mark.slow
def test_without_a_rule_nothing_is_pruned(old: int) -> None:
    """Without a retention rule nothing is pruned, and the message names the missing option."""
    done = halfstep("storage", "prune")
    assert (done.returncode, "use at least one of them" in done.stderr) == (1, True)


def test_the_api_says_the_same(old: int, script: TestClient) -> None:
    """The API has the usage of disk, runs and trash."""
    found = script.get("/api/v1/storage").json()
    assert (found["stored_bytes"], found["trash_bytes"], found["trash_runs"]) == (20, 0, 0)
    assert 0 < found["disk"]["free_bytes"] <= found["disk"]["total_bytes"]
    script.delete(f"/api/v1/runs/{old}")
    found = script.get("/api/v1/storage").json()
    assert (found["stored_bytes"], found["trash_bytes"], found["trash_runs"]) == (0, 20, 1)
