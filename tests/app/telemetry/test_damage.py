"""Runs with damaged blocks or files: every response names its missing parts."""

import warnings
from threading import Event
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import select, update
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from app.files import damage_check_job
from app.files.damage_check_job import WEEK_SECONDS, DamageCheckJob
from app.http.damage_header import MOST_CHARACTERS, DamageHeader
from db.database import Database
from db.settings import Settings
from db.tables import MetricBlock, MetricTail, Run, StepBlock
from db.telemetry import damage
from halfstep.api_client.errors import DamagedData
from halfstep.protocol import DAMAGED
from tests.app.auth.permissions_made import routes_of
from tests.app.compare.shared_links_made import open_link
from tests.app.reports.test_reports import PANEL
from tests.db.telemetry.earlier_steps import as_rows
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record
from tests.e2e.test_artifacts import publish

#: Streams, which do not end.
STREAMS = ("/live", "/stream", "/events/stream")


@pytest.fixture
def recorded(database: Database, running: Run) -> Run:
    """A run with two blocks of steps, two of a metric, and a tail."""
    points = [make_metric(step, 0.5) for step in range(17_000)]
    record(database, running, make_steps([1.0] * 9000, skipped=[7]), events=points)
    record(database, running, events=[make_metric(17_000, 0.5)])
    return running


def damage_blocks(database: Database, *tables: type[Any], first: int | None = None) -> None:
    """Change the bytes of all blocks, or of the one that begins at a step."""
    with database.writing() as session:
        for table in tables:
            its = [] if first is None else [table.first == first]
            session.execute(update(table).where(*its).values(data=b"x" * 100))


@pytest.mark.sql
def test_the_damage_of_a_run_has_its_steps_and_metrics(
    database: Database, recorded: Run, script: TestClient
) -> None:
    """Each damaged part of a run is listed with its steps, and intact parts are not."""
    assert script.get("/api/v1/damage?runs=1,99").json() == {"damage": [], "text": ""}
    damage_blocks(database, StepBlock, first=4096)
    damage_blocks(database, MetricBlock, first=2048)
    damage_blocks(database, MetricTail)
    found = script.get("/api/v1/damage?runs=1").json()
    parts = {part.pop("kind"): part for part in found["damage"]}
    assert parts.keys() == {"steps", "metric", "flush"}
    assert (parts["steps"]["first"], parts["steps"]["last"]) == (4096, 8191)
    assert (parts["metric"]["name"], parts["metric"]["first"]) == ("val/accuracy", 2048)
    assert "steps 4,096 to 8,191" in found["text"]


def test_responses_name_what_they_lack(
    database: Database, recorded: Run, script: TestClient
) -> None:
    """Responses have the damage header exactly if they read a damaged block."""
    damage_blocks(database, StepBlock, first=4096)
    zoomed = script.get("/api/v1/runs/1/series?first=5000&last=5100")
    assert zoomed.json()["damaged"] == [[4096, 8191]]
    assert "steps 4,096 to 8,191 cannot be read" in zoomed.headers[DAMAGED]
    assert DAMAGED not in script.get("/api/v1/runs/1/series?first=10&last=50").headers
    steps = script.get("/api/v1/runs/1/export/steps.csv")
    assert "steps 4,096 to 8,191 cannot be read" in steps.headers[DAMAGED]
    assert steps.headers["content-disposition"].endswith('"run1-steps-damaged.csv"')
    metrics = script.get("/api/v1/runs/1/export/metrics.csv")
    assert DAMAGED not in metrics.headers
    assert metrics.headers["content-disposition"].endswith('"run1-metrics.csv"')


def test_missing_files_are_named(
    settings: Settings, database: Database, running: Run, script: TestClient
) -> None:
    """A missing, truncated or altered file is listed, and not sent as if it was whole."""
    for name in ("lost.txt", "short.txt", "altered.txt"):
        publish(settings, database, running, name, b"0123456789")
    paths = {path.name: path for path in settings.run_folder(running.id).rglob("*.txt")}
    paths["lost.txt"].unlink()
    paths["short.txt"].write_bytes(b"0")
    paths["altered.txt"].write_bytes(b"0123456780")
    found = script.get("/api/v1/damage?runs=1").json()
    problems = {part["name"].rpartition("/")[2]: part["text"] for part in found["damage"]}
    assert problems.keys() == {"lost.txt", "short.txt", "altered.txt"}
    for number in (1, 2, 3):
        answer = script.get(f"/runs/1/artifacts/{number}/download")
        assert answer.status_code == 404
        assert "damaged" in answer.text or "no longer in the store" in answer.text


def check_runs(settings: Settings, database: Database) -> None:
    """Check all runs as a server does after a week."""
    with database.writing() as session:
        session.execute(update(Run).values(damage_checked_at=Run.damage_checked_at - WEEK_SECONDS))
    DamageCheckJob(settings, database, Event()).check_due()


@pytest.mark.sql
def test_a_damaged_run_is_marked_wherever_it_is_listed(
    settings: Settings,
    database: Database,
    recorded: Run,
    browser: TestClient,
    script: TestClient,
    stranger: TestClient,
) -> None:
    """Every list, comparison, report and shared page marks a damaged run until it is whole."""
    publish(settings, database, recorded, "secret.txt", b"0123456789")
    [path] = settings.run_folder(recorded.id).rglob("secret.txt")
    content = path.read_bytes()
    with database.reading() as session:
        data = session.scalars(select(StepBlock.data).where(StepBlock.first == 4096)).one()
    body = {"title": "Findings", "text": PANEL.format(1, "loss"), "project": recorded.project}
    report = script.post("/api/v1/reports", json=body).json()["id"]
    link = browser.post("/api/v1/links", json={"runs": [1]}).json()["address"]
    shared = open_link(stranger, link.partition("#")[2])
    pages = ["/runs", "/runs/1", "/compare?runs=1", f"/reports/{report}"]
    check_runs(settings, database)
    assert not [path for path in pages if "cannot be read" in browser.get(path).text]
    damage_blocks(database, StepBlock, first=4096)
    path.unlink()
    revision = script.get("/api/v1/runs/1").json()["revision"]
    check_runs(settings, database)
    text = "Run 1 is damaged: steps 4,096 to 8,191 cannot be read."
    for page in pages:
        assert text in browser.get(page).text, page
    assert text in stranger.get(shared).text
    assert "secret" not in stranger.get(shared).text
    run = script.get("/api/v1/runs/1").json()
    mark = f"{text} A backup may have them. Missing or damaged in run 1: 1 file."
    assert (run["damage"], run["revision"]) == (mark, revision + 1)
    assert script.get("/api/v1/runs").json()["runs"][0]["damage"] == mark
    assert script.get("/api/v1/comparison?runs=1").headers[DAMAGED] == mark
    path.write_bytes(content)
    with database.writing() as session:
        session.execute(update(StepBlock).where(StepBlock.first == 4096).values(data=data))
    check_runs(settings, database)
    assert script.get("/api/v1/runs").json()["runs"][0]["damage"] == ""


def test_a_run_that_a_request_meets_damaged_is_checked_soon(
    settings: Settings,
    database: Database,
    recorded: Run,
    script: TestClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run found damaged by requests is checked once soon; a restart causes no check."""
    damage.take_suspects()  # of other tests
    job = DamageCheckJob(settings, database, Event())
    job.check_due()
    damage_blocks(database, StepBlock, first=4096)
    DamageCheckJob(settings, database, Event()).check_due()
    assert script.get("/api/v1/runs/1").json()["damage"] == ""
    script.get("/api/v1/runs/1/series?first=5000&last=5100")
    job.check_due()
    assert "steps 4,096 to 8,191" in script.get("/api/v1/runs/1").json()["damage"]
    damage_blocks(database, MetricBlock, first=2048)
    script.get("/api/v1/damage?runs=1")
    job.check_due()
    assert "val/accuracy" not in script.get("/api/v1/runs/1").json()["damage"]
    monkeypatch.setattr(damage_check_job, "AGAIN_SECONDS", 0.0)
    job.check_due()
    assert "val/accuracy" in script.get("/api/v1/runs/1").json()["damage"]


def test_a_run_that_is_being_converted_is_not_marked(
    settings: Settings, database: Database, running: Run, script: TestClient
) -> None:
    """A run that is being converted is not marked as damaged, because its steps are complete in
    rows of an earlier version.
    """
    record(database, running, make_steps([1.0] * 5000))
    as_rows(database, running)
    check_runs(settings, database)
    assert script.get("/api/v1/runs").json()["runs"][0]["damage"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("tables", [(StepBlock,), (StepBlock, MetricBlock, MetricTail)])
def test_no_page_of_a_damaged_run_fails(
    app: FastAPI,
    database: Database,
    recorded: Run,
    browser: TestClient,
    tables: tuple[type[Any], ...],
) -> None:
    """No request for a run without readable blocks is a server error."""
    damage_blocks(database, *tables)
    paths = {path for method, path, _ in routes_of(app) if method == "GET" and "{run_id}" in path}
    paths |= {"/compare?runs=1", "/compare?runs=1,1", "/runs", "/reports/new?runs=1"}
    paths |= {f"/api/v1/comparison{end}?runs=1" for end in ("", "/series", "/parity")}
    for path in sorted(paths):
        address = path.replace("{run_id}", "1").replace("{kind}", "csv").replace("{name}", "steps")
        if "{" in address or any(address.endswith(end) for end in STREAMS):
            continue
        answer = browser.get(address)
        assert answer.status_code < 500, (path, answer.text)
    page = browser.get("/runs/1").text
    assert "Run 1 is damaged: steps 1 to 4,095" in page


def test_the_client_warns_of_damage(
    database: Database, recorded: Run, address: str, script: TestClient
) -> None:
    """The client warns once for each part that a response lacks."""
    import halfstep

    damage_blocks(database, StepBlock, first=4096)
    token = script.headers["authorization"].partition(" ")[2]
    with halfstep.Client(address, token) as client:
        with pytest.warns(DamagedData, match="steps 4,096 to 8,191 cannot be read"):
            assert len(client.series(1)["loss"].step) == 9000 - 4096
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert client.damage(1)["damage"][0]["first"] == 4096


def test_a_header_is_bounded_and_has_no_control_characters() -> None:
    """The damage header is one short line, for any metric names and number of damaged runs."""

    async def read(scope: Scope, receive: Receive, send: Send) -> None:
        for run_id in range(1, 200):
            damage.note(damage.Damage(run_id, damage.METRIC, 1, 9, "loss\r\né"), "a test")
        await PlainTextResponse("")(scope, receive, send)

    header = TestClient(DamageHeader(read)).get("/").headers[DAMAGED]
    assert header.startswith("Run 1 is damaged: loss\\r\\n\\xe9 at steps 1 to 9 cannot be read.")
    assert len(header) == MOST_CHARACTERS + len("...")
