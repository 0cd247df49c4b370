"""Frozen runs as the server's pages, API, uploads, backups and trash meet them."""

import logging
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from obstore.store import MemoryStore
from sqlalchemy import delete, func, select, update
from starlette.testclient import TestClient

from app.files import freeze_job, json_lines
from app.files.freeze_job import FreezeJob
from app.files.json_lines import MOST_LINES
from app.files.spool_ingest import SpoolPosition, take_spool
from db.database import Database
from db.errors import StorageUnreachable
from db.files import backup
from db.files.backup import back_up, restore
from db.files.erasure import erase
from db.files.object_store import open_store
from db.files.step_files import StepFiles
from db.files.storage import mend, mismatches
from db.runs import trash
from db.settings import Settings
from db.tables import RECIPE, Backup, FrozenSteps, Run, Step, StepBucket, User
from db.telemetry import series, windows
from halfstep.telemetry.events import Resumed
from tests.app.uploading import Uploader, write_token
from tests.buckets import Bucket
from tests.db.telemetry.frozen_made import Gate, change_meanwhile, everything
from tests.db.telemetry.telemetry_made import make_events, make_steps
from tests.marks import extended
from tests.site import until
from tests.spool_made import event_of

pytestmark = [pytest.mark.slow, pytest.mark.sql]

STEPS = 3000
ZOOMS = [(1, 100), (1500, 2900)]


@pytest.fixture
def settings(tmp_path: Path, database_url: str) -> Settings:
    """Settings by which a run is due at its end."""
    return Settings(data=tmp_path / "data", database_url=database_url, freeze_after_days=1e-9)


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    """A connection that reads files of the store, as that of a server."""
    settings.data.mkdir()
    database = Database(settings.database_url, StepFiles(partial(open_store, settings)))
    yield database
    database.dispose()


@pytest.fixture
def uploader(stranger: TestClient, database: Database, ada: User, tmp_path: Path) -> Uploader:
    """An uploader of Ada's that has sent a run, which has ended."""
    uploader = Uploader(stranger, write_token(database, ada), tmp_path / "spool")
    send(uploader, STEPS, skipped=(7, 1200, 1201))
    return uploader


def send(
    uploader: Uploader,
    length: int,
    *,
    first: int = 1,
    skipped: tuple[int, ...] = (),
    **changes: str,
) -> None:
    """Send and end an attempt. first: its first step, after a resume."""
    attempt = uploader.attempt + 1
    assert uploader.begin(attempt=attempt, **changes).status_code == 200
    with uploader.spool() as spool:
        if attempt > 1:
            spool.event(Resumed(step=first - 1, exact=False, notes=["test"]))
        for event in make_events(skipped):
            spool.event(event_of(event))
        losses = [float(attempt) + step % 13 for step in range(length)]
        spool.steps(make_steps(losses, first=first, skipped=skipped))
    assert uploader.send().status_code == 200
    uploader.end("finished", step=first + length - 1)


def freeze_due(settings: Settings, database: Database) -> list[str]:
    """Run the task once; return the keys of all files."""
    FreezeJob(settings, database, Event()).freeze_due()
    with database.reading() as session:
        return list(session.scalars(select(FrozenSteps.key).order_by(FrozenSteps.run_id)))


def rows(database: Database) -> int:
    with database.reading() as session:
        return session.scalar(select(func.count(Step.step))) or 0


def answers(script: TestClient, run: int = 1) -> dict[str, bytes]:
    """Return what the API has of a run's steps."""
    api = f"/api/v1/runs/{run}"
    paths = (
        f"{api}/series",
        f"{api}/series?first=100&last=300",
        f"{api}/series?points=64",
        f"{api}/flagged",
        f"{api}/findings",
        f"{api}/export/steps.csv",
        f"{api}/export/steps.parquet",
        f"/api/v1/comparison/series?runs={run}",
        "/api/v1/runs",
    )
    responses = {path: script.get(path) for path in paths}
    assert {response.status_code for response in responses.values()} == {200}
    return {path: response.content for path, response in responses.items()}


def test_a_due_run_is_frozen(
    uploader: Uploader,
    settings: Settings,
    database: Database,
    script: TestClient,
    browser: TestClient,
) -> None:
    """What the API returns stays the same, and rows and files match."""
    off = settings.model_copy(update={"freeze_after_days": 0.0})
    later = settings.model_copy(update={"freeze_after_days": 1.0})
    assert freeze_due(off, database) == freeze_due(later, database) == []
    before, readers = answers(script), everything(database, 1, ZOOMS)
    [key] = freeze_due(settings, database)
    assert rows(database) < 300
    assert answers(script) == before
    assert everything(database, 1, ZOOMS) == readers
    with database.reading() as session:
        assert mismatches(session, open_store(settings), deep=True) == []
    assert freeze_due(settings, database) == [key]
    used = script.get("/api/v1/storage").json()
    assert used["frozen_runs"] == 1
    assert used["frozen_bytes"] == (settings.data / key).stat().st_size > used["stored_bytes"] == 0
    assert " of 1 run</p>" in browser.get("/retention").text


@pytest.mark.parametrize(
    ("url", "storage", "days", "what"),
    [
        ("", "", 7, "move into files, because the database is "),
        ("", "s3://bucket", 0, "stay in the database, which is not "),
        ("postgresql://host/name", "", 0, "stay in the database, which is not "),
    ],
)
def test_the_default_is_logged(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    url: str,
    storage: str,
    days: int,
    what: str,
) -> None:
    """With the reason, unless the operator has set the days."""
    settings = Settings(data=tmp_path, database_url=url, storage_url=storage)
    caplog.set_level(logging.INFO, "app")
    for given in (settings, settings.model_copy(update={"freeze_after_days": 7.0})):
        FreezeJob(given, Database(settings.database_url), Event()).log_default()
    [message] = [record.message for record in caplog.records]
    assert (
        f"is not set and defaults to {days}: steps of ended runs {what}{tmp_path / 'halfstep.db'}"
        in message
    )


def test_a_round_is_bounded(
    uploader: Uploader,
    settings: Settings,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Of many due runs each round begins those of some time; the next round continues."""
    monkeypatch.setattr(freeze_job, "ROUND_SECONDS", 0.0)
    for number in range(2):
        token = uploader.headers["Authorization"].removeprefix("Bearer ")
        send(Uploader(uploader.client, token, tmp_path / str(number)), STEPS, id=f"{number}" * 32)
    assert [len(freeze_due(settings, database)) for _ in range(3)] == [1, 2, 3]


def test_an_error_of_the_store_ends_the_round(
    uploader: Uploader,
    settings: Settings,
    database: Database,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged once; the next round begins with another run."""
    token = uploader.headers["Authorization"].removeprefix("Bearer ")
    send(Uploader(uploader.client, token, tmp_path / "other"), STEPS, id="1" * 32)
    steps, job = settings.data / "steps", FreezeJob(settings, database, Event())
    steps.write_bytes(b"")  # no folder
    with caplog.at_level(logging.WARNING):
        job.freeze_due()
    [message] = [record.message for record in caplog.records]
    assert message.startswith("the steps of run 1 cannot be frozen: ")
    assert job._retry_at.keys() == {1}
    steps.unlink()
    job.freeze_due()
    with database.reading() as session:
        assert session.scalars(select(FrozenSteps.run_id)).all() == [2]


def test_a_run_of_a_worker_with_another_folder_stays_in_the_database(
    uploader: Uploader, settings: Settings, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Its worker could not read the file if it continued the run."""
    with database.writing() as session:
        session.get_one(Run, 1).source = RECIPE
    for _ in range(2):
        job = FreezeJob(settings, database, Event())
        with caplog.at_level(logging.WARNING):
            job.freeze_due()
            job.freeze_due()
        assert job._retry_at.keys() == {1}
    message = "the steps of run 1 and of 0 further runs stay in the database"
    assert [record.message[: len(message)] for record in caplog.records] == [message] * 2
    settings.run_folder(1).mkdir(parents=True)
    assert len(freeze_due(settings, database)) == 1


def test_runs_that_cannot_be_frozen_do_not_delay_others(
    uploader: Uploader,
    settings: Settings,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """However many they are: a round begins after the last run of the round before."""
    monkeypatch.setattr(freeze_job, "MOST_RUNS", 1)
    monkeypatch.setattr(freeze_job, "AGAIN_SECONDS", 0.0)
    token = uploader.headers["Authorization"].removeprefix("Bearer ")
    send(Uploader(uploader.client, token, tmp_path / "other"), STEPS, id="1" * 32)
    with database.writing() as session:
        session.get_one(Run, 1).source = RECIPE
    job, found = FreezeJob(settings, database, Event()), []
    for _ in range(4):
        job.freeze_due()
        with database.reading() as session:
            found.append({*session.scalars(select(FrozenSteps.run_id))})
        settings.run_folder(1).mkdir(parents=True, exist_ok=True)
    assert found == [set(), {2}, {2}, {1, 2}]


def test_a_run_without_steps_is_tried_once_an_hour(
    uploader: Uploader, settings: Settings, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays due, and nothing is logged."""
    with database.writing() as session:
        session.execute(delete(Step))
    job = FreezeJob(settings, database, Event())
    with caplog.at_level(logging.WARNING):
        job.freeze_due()
    due = job._retry_at.copy()
    assert due.keys() == {1}
    job.freeze_due()
    assert job._retry_at == due
    assert caplog.records == []


@pytest.mark.parametrize("first", [1000, 3001, *extended([1, 2999])])
def test_a_frozen_run_continues(
    uploader: Uploader, settings: Settings, database: Database, script: TestClient, first: int
) -> None:
    """Steps before the resume are those of the file, and a second file has all."""
    [key] = freeze_due(settings, database)
    send(uploader, 500, first=first, skipped=(first + 9,))
    steps = script.get("/api/v1/runs/1").json()["step"]
    before, readers = answers(script), everything(database, 1, ZOOMS)
    if steps >= 2000:
        [again] = freeze_due(settings, database)
        assert again != key
    assert steps == first + 499
    assert answers(script) == before
    assert everything(database, 1, ZOOMS) == readers


@pytest.mark.parametrize("first", [1000, 3001])
def test_the_list_of_runs_reads_no_file(
    uploader: Uploader, settings: Settings, database: Database, browser: TestClient, first: int
) -> None:
    """A frozen run keeps its curve; a continued one has points from its first step to its last."""
    before = _curve(database)
    [key] = freeze_due(settings, database)
    (settings.data / key).rename(settings.data / "away")
    other = Database(settings.database_url, StepFiles(partial(open_store, settings)))
    assert _curve(other) == before
    (settings.data / "away").rename(settings.data / key)
    send(uploader, 500, first=first)
    (settings.data / key).unlink()
    curve = _curve(other)
    other.dispose()
    assert 30 <= len(curve) <= 60
    assert curve[0] == before[0]
    assert set(curve[-3:]) <= {2.0 + step % 13 for step in range(13)}
    assert browser.get("/runs").status_code == 200


def _curve(database: Database) -> list[Any]:
    with database.reading() as session:
        return series.sparklines(session, [session.get_one(Run, 1)])[1]


def test_json_lines_continue_a_frozen_run(
    uploader: Uploader, settings: Settings, database: Database
) -> None:
    """A line of a step that only the file has is compared with it."""
    client, run = uploader.client, {"id": uuid.uuid4().hex, "name": "shell"}
    client.headers["Authorization"] = uploader.headers["Authorization"]
    number = client.post("/api/v1/ingest", json=run).json()["run"]

    def log(steps: range, loss: float) -> Any:
        lines = "\n".join(f'{{"step": {step}, "loss": {loss}}}' for step in steps)
        response = client.post(f"/api/v1/ingest/{number}/log", content=lines.encode())
        assert response.status_code == 200, response.text
        return response.json()

    for first in range(1, 2501, MOST_LINES):
        log(range(first, min(first + MOST_LINES, 2501)), 0.5)
    client.post(f"/api/v1/ingest/{number}/1/end", json={"status": "finished", "step": 2500})
    assert len(freeze_due(settings, database)) == 2
    assert client.post("/api/v1/ingest", json=run | {"attempt": 2}).status_code == 200
    assert log(range(1501, 1503), 0.25) == {"lines": 2, "problems": []}
    assert log(range(1400, 1401), 0.5) == {"lines": 1, "problems": []}
    [problem] = log(range(1401, 1402), 0.75)["problems"]
    assert "allowed: after 1,502" in problem["error"]
    with database.reading() as session:
        assert session.get_one(Run, number).step == 1502


@pytest.mark.parametrize("sender", ["spool", "lines"])
def test_no_upload_waits_for_the_store_in_its_transaction(
    uploader: Uploader, settings: Settings, database: Database, ada: User, sender: str
) -> None:
    """While an upload to a frozen run waits for it, another connection changes the run."""
    freeze_due(settings, database)
    uploader.begin(attempt=2)
    with uploader.spool() as spool:
        spool.event(Resumed(step=1500, exact=False, notes=["test"]))
        spool.steps(make_steps([0.25] * 10, first=1501))
    gate = Gate(open_store(settings))
    gated = Database(settings.database_url, StepFiles(gate.open_store))
    lines = b"".join(b'{"step": %d, "loss": 0.25}\n' % step for step in range(1501, 1511))
    with ThreadPoolExecutor(1) as pool:
        if sender == "spool":
            piece = uploader.content(uploader.sequence)
            position = SpoolPosition(ada, 1, 2, uploader.sequence, uploader.offset)
            sending = pool.submit(lambda: take_spool(gated, position, piece) and None)
        else:
            sending = pool.submit(lambda: json_lines.take(gated, ada, 1, lines).problems or None)
        assert gate.is_reached.wait(60)
        change_meanwhile(database, 1)
        gate.is_open.set()
        assert sending.result() is None
    with gated.reading() as session:
        steps = series.raw_steps(session, 1, first=1490, most=10**6)
        assert session.get_one(Run, 1).name == "changed meanwhile"
    assert steps["step"] == [*range(1490, 1511)]
    assert steps["loss"][11:] == [0.25] * 10
    gated.dispose()


@pytest.mark.one_database
def test_a_damaged_file_is_reported(
    uploader: Uploader,
    settings: Settings,
    database: Database,
    browser: TestClient,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The run's data names the file; its page and the list work, and so does the task."""
    [key] = freeze_due(settings, database)
    path = settings.data / key
    path.write_bytes(path.read_bytes()[:-1])
    response = browser.get("/api/v1/runs/1/series", headers={"accept": "application/json"})
    assert (response.status_code, response.json()["code"]) == (500, "steps_unreadable")
    assert key in response.json()["detail"]
    assert browser.get("/runs").status_code == 200
    assert f"The steps of a run that has ended are in {key}" in browser.get("/runs/1").text
    uploader.begin(attempt=2)
    uploader.end("finished", step=STEPS)
    with caplog.at_level(logging.WARNING):
        freeze_due(settings, database)
    assert [record.message[:38] for record in caplog.records] == [
        "the steps of run 1 cannot be frozen: T"
    ]


def test_a_run_without_the_record_of_its_file_is_not_frozen_again(
    uploader: Uploader,
    settings: Settings,
    database: Database,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its charts stay, and so does its file if it is found again."""
    [key] = freeze_due(settings, database)
    path, store = settings.data / key, open_store(settings)
    content = path.read_bytes()
    path.unlink()
    with database.reading() as session:
        wrong = mismatches(session, store)
    assert [mismatch.key for mismatch in wrong] == [key]
    mend(database, store, wrong, lost=True)
    before = _charts(database), rows(database)
    job = FreezeJob(settings, database, Event())
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            job.freeze_due()
    [message] = [record.message for record in caplog.records]
    assert f"{before[1]} of its 3,000 steps are left" in message
    path.write_bytes(content)
    os.utime(path, (0, 0))
    with database.reading() as session:
        assert mismatches(session, store) == []  # it has the only copy of the steps
    assert freeze_due(settings, database) == []
    assert (_charts(database), rows(database)) == before
    assert path.read_bytes() == content
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def _charts(database: Database) -> str:
    with database.reading() as session:
        [window] = windows.windows_of(session, [1], most=32).values()
        assert window.total == STEPS
        return repr(window)


def test_an_erased_run_has_no_file(
    uploader: Uploader, settings: Settings, database: Database, ada: User
) -> None:
    """Its row and its file are deleted with it."""
    [key] = freeze_due(settings, database)
    with database.writing() as session:
        trash.delete(session, 1, ada)
        trash.erase(session, 1, ada)
    erase(database, settings, open_store(settings), 1, Event())
    assert freeze_due(settings, database) == []
    assert rows(database) == 0
    assert not (settings.data / key).exists()


@pytest.mark.one_database
def test_a_backup_has_the_file(
    uploader: Uploader, settings: Settings, database: Database, tmp_path: Path
) -> None:
    """After a restore all readers return the same; the summaries are equal."""
    freeze_due(settings, database)
    saved = back_up(database, open_store(settings), tmp_path / "backup")
    assert (saved["files"], saved["left_out"]) == (1, [])
    store = MemoryStore()
    target = Database(f"sqlite:///{tmp_path / 'other.db'}", StepFiles(lambda: store))
    target.migrate()
    restore(target, store, tmp_path / "backup")
    assert everything(target, 1, ZOOMS) == everything(database, 1, ZOOMS)
    assert _stones(target) == _stones(database)
    target.dispose()


def test_a_backup_has_the_files_that_its_rows_name(
    uploader: Uploader,
    settings: Settings,
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long it takes: the file of a run that is frozen again stays until it is copied."""
    [key] = freeze_due(settings, database)
    readers, copy, store = everything(database, 1, ZOOMS), backup._copy_file, open_store(settings)
    is_reached, may_copy = Event(), Event()

    def copy_late(*arguments: Any) -> bool:
        is_reached.set()
        assert may_copy.wait(60)
        return copy(*arguments)

    monkeypatch.setattr(backup, "_copy_file", copy_late)
    monkeypatch.setattr(backup, "RENEWAL_SECONDS", 0.01)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(back_up, database, store, tmp_path / "backup")
        assert is_reached.wait(60)
        send(uploader, 500, first=STEPS + 1)
        [second] = freeze_due(settings, database)
        _set_back(settings, second)
        with database.writing() as session:
            session.execute(update(Backup).values(seen_at=0.0))
        until(lambda: _seen_at(database) != [0.0])
        freeze_due(settings, database)
        with database.reading() as session:
            assert mismatches(session, store) == []
        may_copy.set()
        saved = saving.result()
    assert (saved["files"], saved["left_out"]) == (1, [])
    assert (tmp_path / "backup/files" / key).is_file()
    copies = MemoryStore()
    target = Database(f"sqlite:///{tmp_path / 'other.db'}", StepFiles(lambda: copies))
    target.migrate()
    restore(target, copies, tmp_path / "backup")
    assert everything(target, 1, ZOOMS) == readers
    target.dispose()
    assert _seen_at(database) == []
    assert freeze_due(settings, database) == [second]
    assert not (settings.data / key).exists()


def test_a_backup_that_was_killed_keeps_files_for_an_hour(
    uploader: Uploader, settings: Settings, database: Database
) -> None:
    """It reports no more that it runs."""
    [key] = freeze_due(settings, database)
    send(uploader, 500, first=STEPS + 1)
    [second] = freeze_due(settings, database)
    _set_back(settings, second)
    with database.writing() as session:
        session.add(Backup(folder="elsewhere"))
    freeze_due(settings, database)
    assert (settings.data / key).exists()
    with database.writing() as session:
        session.execute(update(Backup).values(seen_at=Backup.seen_at - 3601))
    freeze_due(settings, database)
    assert not (settings.data / key).exists()


def _set_back(settings: Settings, key: str) -> None:
    """Make a file old enough for the one before it to be deleted."""
    os.utime(settings.data / key, (0, 0))


def _seen_at(database: Database) -> list[float]:
    with database.reading() as session:
        return list(session.scalars(select(Backup.seen_at).where(Backup.ended_at.is_(None))))


def _stones(database: Database) -> list[Any]:
    with database.reading() as session:
        table = StepBucket.__table__
        query = select(table).order_by(*table.primary_key)
        return [tuple(row) for row in session.execute(query)]


def test_a_bucket_has_the_file(
    bucket: Bucket, ada: User, database_url: str, tmp_path: Path, stranger: TestClient
) -> None:
    """Steps are written to it and read from it; without it, requests report an outage."""
    settings = Settings(data=tmp_path / "data", database_url=database_url, freeze_after_days=1e-9)
    assert settings.storage_url == bucket.url
    store = partial(open_store, settings, retry_seconds=0.1)
    database = Database(database_url, StepFiles(store))
    send(Uploader(stranger, write_token(database, ada), tmp_path / "spool"), STEPS)
    before = everything(database, 1, ZOOMS)
    [key] = freeze_due(settings, database)
    assert bucket.keys() == [key]
    assert everything(database, 1, ZOOMS) == before
    bucket.proxy.requests.clear()
    cold, other = (Database(database_url, StepFiles(store)) for _ in range(2))
    with cold.reading() as session:
        assert windows.window(session, 1, first=100, last=2900, most=32) is not None
    assert bucket.proxy.requests["GET"] == 2  # the footer and a row group, for steps and summaries
    bucket.proxy.is_broken = True
    with cold.reading() as session:  # both are cached
        assert series.raw_steps(session, 1, first=600, most=10)["step"][0] == 600
    with other.reading() as session, pytest.raises(StorageUnreachable):
        series.raw_steps(session, 1, first=500, most=10)
    for each in (cold, other, database):
        each.dispose()
