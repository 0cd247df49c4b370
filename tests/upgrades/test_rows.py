"""A database upgrade keeps each row, and each value that a user wrote."""

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
from sqlalchemy import select

from db.database import Database
from db.tables import StepConversion
from db.telemetry import step_blocks, step_conversion
from db.telemetry.metric_blocks import Point
from db.telemetry.step_rows import StepRow
from tests.db.telemetry.telemetry_made import read_logged_points
from tests.upgrades.build import FIRST
from tests.upgrades.conftest import Old, Rows, upgrade_of

pytestmark = pytest.mark.sql

#: Tables that are computed from other rows.
COMPUTED = {"alembic_version", "metric_buckets"}
TABLES = {
    "deeds": "audit_events",
    "notices": "alerts",
    "tries": "login_attempts",
    "requests": "control_requests",
    "checkpoints": "checkpoint_files",
    "run_settings": "run_config_values",
    "alert_looks": "alert_evaluations",
    "running_backups": "backups",
}
COLUMNS = {
    "deed": "action",
    "well_at": "resolved_at",
    "looked_at": "evaluated_at",
    "notice_id": "alert_id",
    "is_operator": "is_admin",
    "wanted": "desired_state",
    "fault": "failure_kind",
    "heard_at": "last_report_at",
    "rewinds": "rollbacks",
    "rewound_step": "rollback_step",
    "obeyed_at": "acknowledged_at",
    "walls_stand": "is_sandboxed",
    "walls": "sandbox",
}
SPIKE = {
    "rewind": "rollback",
    "most_rewinds": "max_rollbacks",
    "look_every_steps": "check_every_steps",
}
VIEWS = {
    "spike.most_rewinds=2": "spike.max_rollbacks=2",
    "spike.most_rewinds": "spike.max_rollbacks",
    "name,spike.most_rewinds,rewind": "name,spike.max_rollbacks,rewind",
    "name,spike.most_rewinds,rollback": "name,spike.max_rollbacks,rollback",
    "name,verdict,val/verdict": "name,health,val/verdict",
    "-status:unapplied": "-status:no_updates",
}


@upgrade_of("0503e20-sqlite", "c35dd635-postgresql")
def test_an_upgrade_keeps_each_row_step_and_point(old: Old) -> None:
    """No row and no user's value changes in an upgrade; the product's own values get their new
    names.

    Blocks have the values of the rows to the bit: only rows of flagged steps stay.
    """
    before = old.rows()
    old.migrate()
    _compare(before, old.rows())
    with old.database() as database:
        with database.reading() as session:
            waiting = list(session.scalars(select(StepConversion.run_id)))
        for run_id in waiting:  # those that were active are left to their recorders
            step_conversion.convert(database, run_id, is_own=True)
        _compare_steps(before["steps"], old)
        _compare_points(before["metrics"], database)
    after = old.rows()
    assert after["metrics"] == after["metric_buckets"] == after["step_conversions"] == []
    assert all(row["flags"] & step_blocks.FLAGS for row in after["steps"])


def _compare_steps(before: list[dict[str, Any]], old: Old) -> None:
    names = [name for name in StepRow._fields if name in before[0]]
    for run_id in {row["run_id"] for row in before}:
        mine = sorted((row for row in before if row["run_id"] == run_id), key=itemgetter("step"))
        expected = [{name: row[name] for name in names} for row in mine]
        for row in expected:
            if row["grad_norm_clipped"] is None:  # the clip changed nothing
                row["grad_norm_clipped"] = row["grad_norm"]
        found = [{name: getattr(row, name) for name in names} for row in old.steps(run_id)]
        assert repr(found) == repr(expected)


def _compare_points(before: list[dict[str, Any]], database: Database) -> None:
    assert before
    for run_id in {row["run_id"] for row in before}:
        with database.reading() as session:
            points = read_logged_points(session, run_id)
        mine = [row for row in before if row["run_id"] == run_id]
        expected = [
            Point(
                row["name"],
                row["step"],
                row["elapsed_ms"],
                math.nan if row["value"] is None else row["value"],
            )
            for row in sorted(mine, key=itemgetter("name", "step"))
        ]
        assert repr(points) == repr(expected)


@pytest.mark.parametrize("old", [f"{FIRST}-sqlite"], indirect=True)
def test_names_of_users_that_an_earlier_upgrade_replaced_are_restored(old: Old) -> None:
    """Users' names that 58406ad5 replaced in configurations and views are restored."""
    before = old.rows()
    old.replace_database(f"{FIRST}-upgraded-by-58406ad5.db.xz")
    damaged = old.rows()
    # This may be spike.rollback or the recipe's rewind.
    before["saved_views"][3]["group"] = "rollback"
    before["saved_views"][2]["columns"] = "name,spike.most_rewinds,rollback"
    assert "tag:rewind-lab" not in {view["filter"] for view in damaged["saved_views"]}
    old.migrate()
    _compare(before, old.rows())


def _compare(before: Rows, after: Rows) -> None:
    for table, rows in before.items():
        if table in COMPUTED:
            continue
        expected = [_rename(table, row) for row in rows] if "deeds" in before else rows
        columns = expected[0].keys() if expected else ()
        found = [{name: row[name] for name in columns} for row in after[TABLES.get(table, table)]]
        order: Callable[[Any], str] = repr
        assert sorted(found, key=order) == sorted(expected, key=order)


def _rename(table: str, row: dict[str, Any]) -> dict[str, Any]:
    renamed = {_column(table, name): value for name, value in row.items()}
    if table in ("runs", "presets", "sweeps") and renamed["recipe"]:
        renamed["config"] = _config(renamed["config"])
    if table == "sweeps":
        renamed["space"] = {_path(path): value for path, value in renamed["space"].items()}
    if table == "trials":
        renamed["params"] = {_path(path): value for path, value in renamed["params"].items()}
    if table == "run_settings" and row["path"] != (path := _path(row["path"])):
        renamed |= {"path": path, "name": path.partition(".")[2]}
    if table == "run_settings" and row["path"] == "spike.afterwards":
        renamed["text"] = "continue"
    if table == "saved_views":
        renamed = {name: VIEWS.get(value, value) for name, value in renamed.items()}
    if table in ("alert_rules", "notices") and row["condition"] == "unapplied":
        renamed["condition"] = "no_updates"
    if table == "api_tokens" and row["kind"] == "steer":
        renamed["kind"] = "control"
    return renamed


def _column(table: str, name: str) -> str:
    of_another = {("sweeps", "wanted"), ("runs", "walls")}
    return name if (table, name) in of_another else COLUMNS.get(name, name)


def _path(path: str) -> str:
    group, _, name = path.partition(".")
    return f"spike.{SPIKE.get(name, name)}" if group == "spike" else path


def _config(config: dict[str, Any]) -> dict[str, Any]:
    if "spike" not in config:
        return config
    spike = {SPIKE.get(name, name): value for name, value in config["spike"].items()}
    if spike.get("afterwards") == "go on":
        spike["afterwards"] = "continue"
    return config | {"spike": spike}
