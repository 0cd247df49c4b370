"""Maintenance of a running installation by the documented commands."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from db.database import Database
from db.tables import CheckpointFile, StepBucket
from tests import warm
from tests.journeys.backup_made import SCRIPT
from tests.journeys.installation import Admin, Installation, until_some
from tests.site import SECONDS, until


@pytest.fixture
def installation(tmp_path: Path, database_url: str) -> Installation:
    return Installation(tmp_path / "data", database_url)


def lines_of(command: Any) -> list[dict[str, Any]]:
    assert command.stderr == "" or command.returncode == 0, command.stderr
    return [json.loads(line) for line in command.stdout.splitlines()]


def test_storage_prune_and_rebuild(installation: Installation, database: Database) -> None:
    """While the server runs, storage is listed, damage deleted, files pruned and a run rebuilt."""
    with installation.running() as admin:
        until_some(admin.client.recipes)
        config = {"training": {"steps": 80}, "checkpoints": {"every_steps": 20}}
        run = admin.client.submit("digits", config)["id"]
        assert admin.client.wait(run)["status"] == "finished"
        [listed, *_rest] = lines_of(installation.command("storage", "runs", "--json"))
        assert (listed["run"], listed["stored_bytes"] > 0) == (run, True)
        assert installation.command("storage", "check", "--deep").returncode == 0
        damage(installation, database)
        checked = installation.command("storage", "check", "--deep", "--json")
        assert checked.returncode == 1
        problems = [each["problem"] for each in lines_of(checked) if "problem" in each]
        assert len(problems) == 2
        assert installation.command("storage", "check", "--deep", "--mend").returncode == 0
        assert installation.command("storage", "check", "--deep").returncode == 0

        steps = {file["step"] for file in admin.client.checkpoints(run)}
        prune = ("storage", "prune", "--checkpoints", "0", "--logs", "0")
        planned = lines_of(installation.command(*prune, "--dry-run", "--json"))
        assert planned[-1]["runs"] == 1
        assert {file["step"] for file in admin.client.checkpoints(run)} == steps
        assert installation.command(*prune, "--yes").returncode == 0
        assert {file["step"] for file in admin.client.checkpoints(run)} < steps
        assert admin.client.log(run) == []
        assert installation.command("storage", "check", "--deep").returncode == 0

        summaries = select(StepBucket.size, StepBucket.bucket, StepBucket.summary)
        with database.writing() as session:
            before = sorted(tuple(row) for row in session.execute(summaries))
            session.execute(update(StepBucket).values(summary=b""))
        assert installation.command("rebuild", str(run)).returncode == 0
        with database.reading() as session:
            assert sorted(tuple(row) for row in session.execute(summaries)) == before
        assert installation.command("migrate").returncode == 0


def damage(installation: Installation, database: Database) -> None:
    """Delete one checkpoint's file and alter another's."""
    with database.reading() as session:
        keys = session.scalars(select(CheckpointFile.key).order_by(CheckpointFile.step)).all()
    (installation.data / keys[0]).unlink()
    altered = installation.data / keys[1]
    altered.write_bytes(altered.read_bytes()[:-1] + b"x")


def test_export_import_and_upload(installation: Installation, tmp_path: Path) -> None:
    """A run is exported to TensorBoard and imported; one recorded offline is sent later."""
    with installation.running() as admin:
        until_some(admin.client.recipes)
        run = admin.client.submit("digits", {"training": {"steps": 60}})["id"]
        first = admin.client.wait(run)
        logs = tmp_path / "logs"
        ended = script_command(admin, tmp_path, "export", "tensorboard", str(run), str(logs))
        assert ended.returncode == 0, ended.stderr
        ended = script_command(admin, tmp_path, "import", "tensorboard", str(logs))
        assert ended.returncode == 0, ended.stderr
        [imported] = admin.client.runs("source:watch")
        assert imported["status"] == "finished"
        ours, theirs = (admin.client.series(each) for each in (run, imported["id"]))
        assert list(ours["loss"].value) == pytest.approx(list(theirs["loss"].value))
        assert (imported["step"], imported["skipped"]) == (first["step"], first["skipped"])

        offline = {**os.environ, "HALFSTEP_MODE": "offline"}
        script = [sys.executable, str(SCRIPT), str(tmp_path / "last.pt")]
        ended = warm.run(script, env=offline, cwd=tmp_path, timeout=SECONDS)
        assert ended.returncode == 0, ended.stderr
        ended = script_command(admin, tmp_path, "upload", "halfstep-runs/journey")
        assert ended.returncode == 0, ended.stderr
        until(lambda: len(list(admin.client.runs("name:journey status:finished"))) == 1)
        [sent] = admin.client.runs("name:journey")
        assert sent["step"] == 20
        assert len(admin.client.artifacts(sent["id"])) == 5
        assert len(admin.client.checkpoints(sent["id"])) == 1


def script_command(admin: Admin, folder: Path, *words: str) -> Any:
    """Run `halfstep WORDS` in a user's folder, with the server's address and a token."""
    command = [sys.executable, "-m", "halfstep.cli.main", *words]
    environment = os.environ | admin.environment
    return warm.run(command, env=environment, cwd=folder, timeout=SECONDS)


@pytest.mark.only_on("postgresql")
def test_an_empty_database_is_migrated(installation: Installation) -> None:
    """`halfstep migrate --sql` prints what `halfstep migrate` executes on an empty database."""
    printed = installation.command("migrate", "--sql")
    assert "CREATE TABLE runs" in printed.stdout
    assert installation.command("migrate").returncode == 0
