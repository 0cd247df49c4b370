"""The placer's output and rows."""

import os
from pathlib import Path

import pytest

from db.database import Database
from db.errors import Invalid
from db.queue import pending_reasons, placements
from db.runs import runs
from db.settings import Settings
from db.tables import Placement, Status, User
from tests.db.conftest import CPU, DIGITS, add_worker, claim, submit
from worker.clusters.placement import open_placement
from worker.clusters.placer import Placer
from worker.expired_leases import ExpiredLeases

REFUSAL = "sbatch: error: Batch job submission failed:\nInvalid account"


@pytest.fixture
def placer(
    database: Database, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Placer:
    """A running placer with a Slurm that accepts no job."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in {"squeue": "true", "sbatch": f"echo '{REFUSAL}' >&2; exit 1"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    settings = Settings(data=tmp_path, database_url=database_url, placement="slurm")
    made = Placer(settings, database)
    monkeypatch.setattr(made.capabilities, "poll_changes", lambda: None)
    made.recipes = ["digits"]
    made.id = add_worker(database, "slurm", [DIGITS]).id
    return made


def test_a_rejection_is_one_line_with_the_run_and_the_clusters_message(
    placer: Placer, database: Database, ada: User, caplog: pytest.LogCaptureFixture
) -> None:
    """A rejection is logged in one line by the placer, and is the run's pending reason."""
    with database.writing() as session:
        run_id = submit(session, ada).id
    caplog.clear()
    placer.turn()
    words = " ".join(REFUSAL.split())
    assert [record.getMessage() for record in caplog.records] == [f"sbatch: {words}"]
    assert vars(caplog.records[0])["run"] == run_id
    with database.reading() as session:
        placement = session.get_one(Placement, (run_id, 1))
        assert (placement.state, placement.reason) == ("gone", f"sbatch: {words}")
        assert placements.list_open(session) == []
        assert words in pending_reasons.Queue.read(session).placed[run_id]


def test_a_run_is_queued_again_after_its_machine_is_lost(
    placer: Placer, database: Database, ada: User
) -> None:
    """After a lost machine's lease has expired, the placer submits a new job."""
    pilot = add_worker(database, "pilot", [DIGITS], [CPU])
    with database.writing() as session:
        run_id = submit(session, ada).id
        assert claim(session, pilot, lease_seconds=0.0) is not None
    placer.lost = ExpiredLeases(database, 0.0)
    placer.turn()
    placer.turn()
    with database.reading() as session:
        assert runs.get(session, run_id).status == Status.QUEUED
        assert session.get_one(Placement, (run_id, 2)).attempts == 1


@pytest.mark.parametrize("name", ["kubernetes", "ray"])
def test_an_extra_that_is_not_installed_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error for a missing package has the extra that installs it."""
    monkeypatch.setattr("worker.clusters.placement.ENGINES", {name: f"{name}_that_is_not:Engine"})
    needed = {"kubernetes_image": "lab/halfstep:1", "ray_address": "auto"}
    with pytest.raises(Invalid, match=rf"HALFSTEP_PLACEMENT.*halfstep-service\[{name}\]"):
        open_placement(Settings(data=tmp_path, placement=name, **needed))
