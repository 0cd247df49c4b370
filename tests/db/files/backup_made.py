"""Shared helpers of the tests of backup."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import func, select

from db.database import Database
from db.tables import Table
from tests import swept


@contextmanager
def empty_database(kind: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[Database]:
    """Yield a migrated database without rows."""
    if kind == "sqlite":
        target = Database(f"sqlite:///{folder / 'other.db'}")
        target.migrate()
        yield target
        target.dispose()
        return
    server = request.getfixturevalue("postgresql_server")
    with swept.fresh(server, request.getfixturevalue("postgresql_template")) as name:
        target = Database(server.format(name=name))
        yield target
        target.dispose()


def contents(database: Database) -> dict[str, list[tuple[object, ...]]]:
    """Return all rows of all tables in order of their keys."""
    with database.reading() as session:
        return {
            table.name: [
                tuple(row) for row in session.execute(select(table).order_by(*table.primary_key))
            ]
            for table in Table.metadata.sorted_tables
            if session.scalar(select(func.count()).select_from(table))
        }
