"""Backing up a running installation, losing it, and continuing from the backup."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest
from sqlalchemy import select

from db.database import Database
from db.files.backup import NOT_SENT
from db.tables import Artifact, CheckpointFile, Delivery, Run
from halfstep import Client
from tests import warm
from tests.app.receivers import http_receiver
from tests.db.files.backup_made import contents, empty_database
from tests.journeys.backup_made import SCRIPT
from tests.journeys.installation import Admin, Installation, until_some
from tests.site import SECONDS, until

SIGN_INS = {"sessions", "sign_in_links"}
#: Ended by a restore, or computed by it.
NOT_COMPARED = SIGN_INS | {"step_buckets", "metric_buckets"}


@pytest.fixture
def installation(tmp_path: Path, database_url: str) -> Installation:
    return Installation(tmp_path / "data", database_url)


def use_everything(admin: Admin, folder: Path) -> int:
    """Use all features of an installation; return the run that is still training."""
    client, browser = admin.client, admin.browser
    until_some(client.recipes)
    digits = client.submit("digits", {"training": {"steps": 60}}, tags=["first"])["id"]
    client.wait(digits)
    line = "python -c 'print(1 + 1)'"
    command = client.submit_command(line, name="sum")["id"]
    sweep = client.begin_sweep(
        "digits",
        {"recipe.learning_rate": [0.01, 0.1]},
        {"training": {"steps": 20}},
        runs=2,
    )
    client.wait_for_sweep(sweep["id"])
    client.wait(command)
    script = [sys.executable, str(SCRIPT), str(folder / "last.pt")]
    environment = os.environ | admin.environment
    ended = warm.run(script, env=environment, cwd=folder, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    [watched] = until_some(lambda: client.runs("source:watch status:finished"))
    assert {each["name"].partition(".")[0] for each in client.artifacts(watched["id"])} >= {
        *("picture", "table", "note", "weights", "speech"),
    }
    with http_receiver() as receiver:
        channel = client.add_channel("webhook", receiver.url, name="hook")
        client.alert("ended", channels=[channel["id"]])
        client.wait(client.submit("digits", {"training": {"steps": 20}})["id"])
        until(lambda: bool(receiver.got))
        until(lambda: all(each["is_delivered"] for each in client.deliveries()))
    assert browser.post("/people", data={"name": "grace"}).status_code == 200
    assert browser.post("/projects", data={"name": "vision"}).status_code == 200
    client.write_note("# Why\nIt overflowed.", digits)
    client.save_preset("quick", "digits", {"training": {"steps": 40}})
    client.save_view("failures", "status:failed", columns=["loss"])
    client.set_retention(project="vision", checkpoint_days=30)
    shared = browser.post("/api/v1/links", json={"runs": [digits], "days": 7})
    assert shared.status_code == 201, shared.text
    weights = folder / "last.pt"
    client.upload_weights(weights)
    endless = {"training": {"steps": 10_000_000}, "checkpoints": {"every_steps": 200}}
    training = client.submit("digits", endless, name="endless")["id"]
    until(lambda: len(client.checkpoints(training)) > 0)
    return int(training)


def list_stored_files(database: Database, data: Path) -> dict[str, str]:
    """Return the SHA-256 of each file that the database names, computed from the disk."""
    with database.reading() as session:
        rows = [*session.scalars(select(CheckpointFile)), *session.scalars(select(Artifact))]
        keys = [row.key for row in rows if row.is_stored]
    return {key: hashlib.sha256((data / key).read_bytes()).hexdigest() for key in keys}


def test_a_backup_replaces_a_lost_installation(
    installation: Installation, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A backup is made during training and when stopped, and each row and file is restored into
    either database. Tokens work, cookies do not, the run continues from its checkpoint, and pending
    deliveries are not sent.
    """
    with installation.running() as admin:
        training = use_everything(admin, tmp_path)
        saved = installation.command("backup", str(tmp_path / "live"), "--json")
        assert (saved.returncode, json.loads(saved.stdout)["left_out"]) == (0, []), saved.stderr
        cookies = admin.browser.cookies
        admin.client.cancel(training)
        reached = admin.client.wait(training)["step"]
    saved = installation.command("backup", str(tmp_path / "stopped"))
    assert saved.returncode == 0, saved.stderr
    source = Database(installation.database_url)
    before, files = contents(source), list_stored_files(source, installation.data)
    with source.reading() as session:  # the receiver of alerts is gone by now
        due = set(session.scalars(select(Delivery.id).where(Delivery.ended_at.is_(None))))
    source.dispose()
    for kind in ("sqlite", "postgresql"):
        with restore(kind, tmp_path / kind, tmp_path / "stopped", request) as (copy, target):
            after = contents(target)
            audit_events = after.pop("audit_events")
            assert (before["audit_events"][: len(audit_events) - 1], len(audit_events) > 1) == (
                audit_events[:-1],
                True,
            )
            with target.reading() as session:
                unsent = set(
                    session.scalars(select(Delivery.id).where(Delivery.answer == NOT_SENT))
                )
            assert unsent == due
            for name in before.keys() - NOT_COMPARED - {"audit_events"}:
                ended = unsent if name == "deliveries" else set()
                assert without(after[name], ended) == without(before[name], ended), name
            assert not SIGN_INS & after.keys()
            assert list_stored_files(target, copy.data) == files
            assert copy.command("storage", "check", "--deep").returncode == 0
    with (
        restore("sqlite", tmp_path / "again", tmp_path / "live", request) as (copy, target),
        copy.running() as again,
        ExitStack() as stack,
    ):
        base = str(again.browser.base_url).rstrip("/")
        assert httpx2.get(f"{base}/api/v1/runs", cookies=cookies).status_code == 401
        client = stack.enter_context(Client(base, admin.token))
        until(lambda: client.run(training)["step"] > reached)
        with target.reading() as session:
            assert session.get_one(Run, training).resumed_step is not None
        client.cancel(training)
        client.wait(training)


def without(rows: list[tuple[object, ...]], ids: set[int]) -> list[tuple[object, ...]]:
    """Return rows without those of these ids, which are in the first column."""
    return [row for row in rows if row[0] not in ids]


@contextmanager
def restore(
    kind: str, folder: Path, backup: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Installation, Database]]:
    """Restore a backup into a new installation."""
    folder.mkdir()
    with empty_database(kind, folder, request) as target:
        copy = Installation(folder / "data", target.engine.url.render_as_string(False))
        ended = copy.command("restore", str(backup))
        assert ended.returncode == 0, ended.stderr
        assert "API token 'journey' of operator: full, all projects" in ended.stdout
        yield copy, target
