"""`halfstep migrate --check` estimates upgrades of earlier versions, and changes nothing."""

import json

import pytest
from sqlalchemy import create_engine, func, inspect, select

from db.tables import LossCurve, MetricBlock, StepBlock
from db.telemetry import step_conversion
from db.upgrade_estimate import BLOCKS
from tests.site import halfstep
from tests.upgrades.conftest import Old, upgrade_of

pytestmark = [pytest.mark.sql, pytest.mark.slow]


@upgrade_of("c35dd635-sqlite")
def test_an_upgrade_is_estimated_without_a_change(old: Old) -> None:
    """The estimate has pending changes, the time of each part and the space; no row changes."""
    before, files = old.rows(), sorted(old.data.rglob("*"))
    found = json.loads(_check(old, "--json"))
    assert old.rows() == before
    assert [each for each in old.data.rglob("*") if each not in files] == []
    engine = create_engine(old.url)
    assert "halfstep_check" not in inspect(engine).get_schema_names()
    engine.dispose()
    assert found["problem"] == ""
    assert found["due"][-1] > found["revision"]
    assert found["steps"] >= len(before["steps"])
    assert found["points"] >= len(before["metrics"])
    assert found["runs"] >= len({row["run_id"] for row in before["steps"]})
    assert min(found["migration_seconds"], found["conversion_seconds"]) > 0
    is_sqlite = old.url.startswith("sqlite")
    assert (found["copy_seconds"] > 0) == (found["copy_bytes"] > 0) == is_sqlite
    assert found["needed_bytes"] == found["copy_bytes"] + found["conversion_bytes"]
    assert found["free_bytes"] > 0


@upgrade_of("c35dd635-sqlite")
def test_the_estimate_of_what_still_waits_ends_with_the_conversion(old: Old) -> None:
    """After the migrations only the conversion is estimated, with an upper limit of its space."""
    old.migrate()
    found = json.loads(_check(old, "--json"))
    assert (found["due"], found["copy_bytes"]) == ([], 0)
    with old.database() as database:
        with database.reading() as session:
            waiting = step_conversion.unread(session)
        for run_id in waiting:
            step_conversion.convert(database, run_id, is_own=True)
        with database.reading() as session:
            sizes = [
                session.scalar(select(func.coalesce(func.sum(BLOCKS[table]), 0)))
                for table in (StepBlock, LossCurve, MetricBlock)
            ]
    assert 0 < sum(sizes) <= found["conversion_bytes"]
    printed = _check(old)
    assert "No migration is due." in printed
    assert "conversion" not in printed


def _check(old: Old, *options: str) -> str:
    ended = halfstep("migrate", "--check", *options, **old.environment)
    assert ended.returncode == 0, ended.stderr
    return str(ended.stdout)
