"""Runs imported and sent to a server."""

from pathlib import Path

import pytest
from sqlalchemy import select

from db.access import accounts
from db.database import Database
from db.tables import Artifact, Run, Status, User
from db.telemetry import step_rows
from tests.db.telemetry.telemetry_made import read_logged_points
from tests.halfstep.importing.imports_made import RECORDED, event_file, scalar
from tests.site import type_command


@pytest.fixture
def server(address: str, database: Database, ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is known by a write-only token."""
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, ada, "writer", kind="write")
    monkeypatch.setenv("HALFSTEP_URL", address)
    monkeypatch.setenv("HALFSTEP_TOKEN", token)


def import_into(folder: Path, source: str, path: Path) -> None:
    assert type_command("import", source, str(path), "--folder", str(folder)) == 0


def test_an_imported_run_exists_once(server: None, database: Database, tmp_path: Path) -> None:
    """An imported run keeps its own time, and a second import adds nothing."""
    for folder in ("here", "here", "there"):
        import_into(tmp_path / folder, "wandb", RECORDED / "wandb")
    with database.reading() as session:
        [run] = session.scalars(select(Run))
        assert (run.name, run.project, run.status) == ("swift-lynx", "digits", Status.FINISHED)
        assert (run.step, run.precision, run.tags) == (12, "fp16", "fp16, tried")
        assert run.started_at is not None
        assert run.ended_at is not None
        assert 0 <= run.ended_at - run.started_at < 60
        rows = step_rows.read_rows(session, run.id, most=100)
        assert [row.step for row in rows] == list(range(1, 13))
        assert len(read_logged_points(session)) == 14


def test_logged_files_are_on_the_server(server: None, database: Database, tmp_path: Path) -> None:
    """W&B's histograms and table are artifacts at their steps."""
    import_into(tmp_path / "halfstep", "wandb", RECORDED / "wandb-media")
    with database.reading() as session:
        found = session.execute(select(Artifact.step, Artifact.name).order_by(Artifact.step)).all()
        assert [tuple(row) for row in found] == [
            (1, "weights.histogram.json"),
            (2, "weights.histogram.json"),
            (3, "val.sample.csv"),
        ]


def test_a_run_without_a_loss_has_its_numbers(
    server: None, database: Database, tmp_path: Path
) -> None:
    """A run without a loss has no steps, and a later import adds further numbers."""
    logs = tmp_path / "logs"
    path = event_file(logs, *(scalar("accuracy", step, step / 8) for step in range(5)))
    import_into(tmp_path / "halfstep", "tensorboard", logs)

    def points() -> list[tuple[int, float | None]]:
        with database.reading() as session:
            return [(point.step, point.value) for point in read_logged_points(session)]

    assert points() == [(step, step / 8) for step in range(5)]
    more = event_file(tmp_path / "more", scalar("accuracy", 5, 5 / 8))
    path.write_bytes(path.read_bytes() + more.read_bytes())
    import_into(tmp_path / "halfstep", "tensorboard", logs)
    assert points() == [(step, step / 8) for step in range(6)]
    with database.reading() as session:
        [run] = session.scalars(select(Run))
        assert (run.status, run.attempt, run.step) == (Status.FINISHED, 2, 0)
        assert run.started_at is not None
        assert run.ended_at == pytest.approx(run.started_at + 5, abs=0.01)
