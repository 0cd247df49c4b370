"""Estimates of upgrades, in addition to tests/upgrades/test_estimate.py."""

from pathlib import Path

import obstore
import pytest
from obstore.store import LocalStore
from sqlalchemy import text

from db import upgrade_estimate
from db.database import Database, revisions
from db.tables import Run
from db.upgrade_estimate import NotMeasured, estimate, measure_free_bytes
from tests.db.telemetry.earlier_steps import as_file
from tests.db.telemetry.telemetry_made import make_steps, record

pytestmark = pytest.mark.sql


def test_steps_in_files_are_estimated_from_their_first_rows(
    database: Database, running: Run, tmp_path: Path
) -> None:
    """Steps in a file are estimated by its first rows, and the file stays."""
    store = LocalStore(tmp_path / "store", mkdir=True)
    database.open_store = lambda: store
    record(database, running, make_steps([1.0] * 3000))
    key = as_file(database, store, running)
    found = estimate(database, revisions()[-1], tmp_path, is_due=False)
    assert (found.runs, found.steps, found.points) == (1, 3000, 0)
    assert min(found.conversion_seconds, found.conversion_bytes) > 0
    assert obstore.head(store, key)["size"] > 0
    obstore.delete(store, key)
    obstore.put(store, "steps/0/of-another-run.parquet", b"")
    with pytest.raises(NotMeasured, match="the file is missing"):
        estimate(database, revisions()[-1], tmp_path, is_due=False)


@pytest.mark.only_on("postgresql")
def test_without_the_permission_nothing_is_measured(database: Database, tmp_path: Path) -> None:
    """Without the permission to create a schema nothing is measured, for PostgreSQL's reason."""
    with database.writing() as session:
        session.execute(text(f"CREATE SCHEMA {upgrade_estimate.SCRATCH}"))
        session.execute(text(f"CREATE TABLE {upgrade_estimate.SCRATCH}.runs (id int)"))
    estimate(database, revisions()[-2], tmp_path, is_due=True)
    with database.writing() as session:
        session.execute(text("CREATE ROLE reader LOGIN"))
        session.execute(text("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader"))
    url = database.engine.url.set(username="reader")
    limited = Database(url.render_as_string(hide_password=False))
    try:
        assert measure_free_bytes(limited) is None
        with pytest.raises(NotMeasured, match="permission denied for database"):
            estimate(limited, revisions()[-2], tmp_path, is_due=True)
    finally:
        limited.dispose()
        with database.writing() as session:
            session.execute(text("DROP OWNED BY reader"))
            session.execute(text("DROP ROLE reader"))
