"""Copies of a SQLite database before migrations."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from alembic import command

from db import database_copy
from db.database import Database, revisions
from db.errors import Conflict

pytestmark = pytest.mark.only_on("sqlite")


def revision_of(path: Path) -> str:
    with closing(sqlite3.connect(path)) as file:
        [(revision,)] = file.execute("SELECT version_num FROM alembic_version")
    return str(revision)


def test_a_migration_leaves_a_copy_of_the_database_as_it_was(database: Database) -> None:
    """A migration leaves one private copy of the earlier database; a start without one makes no
    copy.
    """
    assert database.file is not None
    database.migrate()
    assert database_copy.copies(database.file) == []
    for before in revisions()[-3:-1]:
        command.downgrade(database.migrations(), before)
        database.migrate()
        [copy] = database_copy.copies(database.file)
        assert copy.name == f"halfstep.db.before-{before}"
        assert revision_of(copy) == before
        assert copy.stat().st_mode & 0o077 == 0
    assert database.is_current()


def test_without_space_for_the_copy_nothing_is_changed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without space for the copy nothing is migrated, and the error has the needed space."""
    before = revisions()[-2]
    command.downgrade(database.migrations(), before)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    with pytest.raises(Conflict, match=r"of which 1,000 are free\. .* nothing was changed"):
        database.migrate()
    assert database.revision() == before
    assert database.file is not None
    assert list(database.file.parent.glob("*.before-*")) == []
