"""Backups at an interval: hard links, rotation, and remains of failed ones."""

import hashlib
from pathlib import Path

import obstore
import pytest
from obstore.store import LocalStore
from sqlalchemy import select, update

from db.database import Database
from db.errors import Conflict
from db.files import backup, checkpoints, scheduled_backups
from db.files.backup import back_up
from db.files.scheduled_backups import back_up_if_due, list_scheduled
from db.queue import queue
from db.settings import Settings
from db.tables import Backup, Run, Status
from tests.spool_made import checkpoint_of

pytestmark = pytest.mark.slow

KEY = "runs/1/checkpoints/a.pt"


@pytest.fixture
def settings(database: Database, running: Run, tmp_path: Path) -> Settings:
    """Settings for hourly backups, two of them kept, and a run with a checkpoint."""
    content = b"weights"
    settings = Settings(
        data=tmp_path / "data",
        backup_every_hours=1.0,
        backup_folder=tmp_path / "backups",
        backup_keep=2,
    )
    file = {"kind": "checkpoint", "size_bytes": 7, "sha256": hashlib.sha256(content).hexdigest()}
    obstore.put(LocalStore(settings.data, mkdir=True), KEY, content)
    with database.writing() as session:
        event = checkpoint_of({"step": 2, "reason": "end", "files": [file]})
        checkpoints.publish(session, running.id, 1, event, [KEY])
        queue.end(session, running.id, 1, Status.FINISHED)
    return settings


def next_interval(database: Database) -> None:
    """Age the known backups by an interval."""
    with database.writing() as session:
        rows = session.scalars(select(Backup).order_by(Backup.id)).all()
        for row in rows:
            row.slot = None if row.slot is None else row.slot - 7200 * (len(rows) + 1)
            row.ended_at = None if row.ended_at is None else row.ended_at - 7200


def make(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch, second: int
) -> Path:
    """Make a backup of another interval, and name it after a second."""
    monkeypatch.setattr(scheduled_backups, "NAME", f"halfstep-20260101T0000{second:02}Z")
    folder = back_up_if_due(settings, database)
    assert folder
    next_interval(database)
    return folder


def test_an_interval_has_one_backup(settings: Settings, database: Database) -> None:
    """An interval has one backup, whatever servers start."""
    folder = back_up_if_due(settings, database)
    assert folder
    assert (folder / "files" / KEY).read_bytes() == b"weights"
    assert back_up_if_due(settings, database) is None
    assert list_scheduled(folder.parent) == [folder]
    next_interval(database)
    off = settings.model_copy(update={"backup_every_hours": 0.0})
    assert back_up_if_due(off, database) is None


def test_unchanged_files_are_linked_and_the_newest_backups_kept(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unchanged files are hard links, unless damaged; only the newest backups are kept."""
    assert settings.backup_folder
    (settings.backup_folder / "halfstep-mine").mkdir(parents=True)
    (settings.backup_folder / "halfstep-mine" / "backup.json").touch()
    first = make(settings, database, monkeypatch, 1) / "files" / KEY
    second = make(settings, database, monkeypatch, 2) / "files" / KEY
    assert first.stat().st_ino == second.stat().st_ino
    second.write_bytes(b"damaged")
    third = make(settings, database, monkeypatch, 3) / "files" / KEY
    assert third.read_bytes() == b"weights"
    kept = sorted(path.name for path in settings.backup_folder.iterdir())
    assert kept == ["halfstep-20260101T000002Z", "halfstep-20260101T000003Z", "halfstep-mine"]


def test_a_failed_backup_is_tried_again_after_a_while(
    settings: Settings, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed backup is logged and recorded, and leaves nothing."""
    assert settings.backup_folder
    settings.backup_folder.write_text("a file")
    assert back_up_if_due(settings, database) is None
    assert "the scheduled backup failed" in caplog.text
    settings.backup_folder.unlink()
    with database.reading() as session:
        [row] = session.scalars(select(Backup))
    assert row.slot is None
    assert row.ended_at
    assert "cannot be written" in row.error
    assert back_up_if_due(settings, database) is None
    next_interval(database)
    assert back_up_if_due(settings, database)


def test_a_killed_backup_is_made_again(settings: Settings, database: Database) -> None:
    """A backup that was not renewed for an hour is made again, and its remains deleted."""
    folder = back_up_if_due(settings, database)
    assert folder
    rest = folder.parent / ".halfstep-20260101T000000Z-abc"
    rest.mkdir()
    with database.writing() as session:
        session.execute(update(Backup).values(ended_at=None))
    assert back_up_if_due(settings, database) is None
    with database.writing() as session:
        session.execute(update(Backup).values(seen_at=Backup.seen_at - 7201))
    folder.rename(folder.with_name("halfstep-20260101T000000Z"))
    assert back_up_if_due(settings, database)
    assert not rest.exists()
    with database.reading() as session:
        errors = list(session.scalars(select(Backup.error).order_by(Backup.id)))
    assert errors == ["it was killed", ""]


def test_a_backup_that_lacks_rows_gets_no_name(
    settings: Settings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup is published after a test restore into a scratch database, which would find
    missing rows.
    """
    monkeypatch.setattr(backup, "_read_table", lambda *_: iter(()))
    store = LocalStore(settings.data)
    with pytest.raises(Conflict, match="but restores 0 and 1"):
        back_up(database, store, tmp_path / "saved", verifies=True)
    assert not list(tmp_path.glob("*saved*"))
