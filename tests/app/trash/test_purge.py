"""Purge of deleted runs."""

import logging
from threading import Event

import pytest
from sqlalchemy import select

from app.trash.purge import Purge
from db.database import Database
from db.queue import run_control
from db.runs import trash
from db.settings import Settings
from db.tables import Run, User
from tests.app.conftest import submit

pytestmark = pytest.mark.sql


def delete_run(database: Database, ada: User) -> int:
    run_id = submit(database, ada).id
    with database.writing() as session:
        run_control.cancel(session, run_id, ada)
        trash.delete(session, run_id, ada)
    return run_id


def list_erased(database: Database) -> list[int]:
    with database.reading() as session:
        query = select(Run.id).where(Run.erased_at.is_not(None))
        return list(session.scalars(query.order_by(Run.id)))


def test_due_runs_are_purged_each_by_itself(
    database: Database, settings: Settings, ada: User, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that cannot be deleted is reported once, tried again, and delays no other purge."""
    stuck, next_one, binned = (delete_run(database, ada) for _ in range(3))
    with database.writing() as session:
        for run_id in (stuck, next_one):
            trash.erase(session, run_id, ada)
    settings.run_folder(stuck).parent.mkdir(parents=True)
    settings.run_folder(stuck).write_text("not a folder")
    eraser = Purge(settings, database, Event())
    with caplog.at_level(logging.WARNING):
        eraser.erase_due()
        eraser.erase_due()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"run {stuck} cannot be erased"
    ]
    assert list_erased(database) == [next_one]
    settings.run_folder(stuck).unlink()
    Purge(settings, database, Event()).erase_due()
    assert list_erased(database) == [stuck, next_one]
    Purge(settings.model_copy(update={"trash_days": 0.0}), database, Event()).erase_due()
    assert list_erased(database) == [stuck, next_one, binned]
