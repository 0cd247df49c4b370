"""Reports: their authors, the panels that each user sees, and access by a link."""

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import select
from starlette.testclient import TestClient

from app.trash.purge import Purge
from db.access import accounts, projects
from db.access.permissions import MEMBER, VIEWER
from db.database import Database
from db.files import report_images
from db.files.object_store import open_store
from db.files.storage import mend, mismatches
from db.queue import queue, quotas
from db.runs import trash
from db.settings import Settings
from db.tables import AuditEvent, Project, Report, ReportImage, Run, SharedLink, Status, User
from tests.app.auth.permissions_made import script_of
from tests.app.auth.users_pages_made import browser_of
from tests.app.compare.shared_links_made import open_link
from tests.app.conftest import CONFIG, start_run, submit
from tests.db.conftest import is_blocked
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record
from tests.pictures import picture

PNG, OTHER_PNG = picture("red"), picture("blue")
PANEL = "```panel\nruns: {}\nmetrics: {}\n```"


def test_panels_and_tables_name_runs_alike(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """Runs are named by what their names do not share, also in the image that loads first."""
    for name in ("first-run bf16", "first-run fp16 without scaler"):
        run = start_run(database, ada, name=name)
        record(database, run, make_steps([2.0, 1.0]))
    text = f"{PANEL.format('1, 2', 'loss')}\n\n```runs\nruns: 1, 2\n```"
    page = browser.get(f"/reports/{made(browser, text, project='')}").text
    names = re.findall(r'title="Run \d+: [^"]+">([^<]+)</a>', page)
    assert names == ["bf16", "fp16 without scaler"] * 2
    picture = browser.get("/charts.svg?runs=1,2&series=loss").text
    assert ">bf16<" in picture
    assert ">fp16 without scaler<" in picture


@pytest.fixture
def people(database: Database, ada: User, offered: None) -> dict[str, User]:
    """Members of two projects; `mel` is a member of both, `vic` may only see the first."""
    roles = {"mel": {"vision": MEMBER, "speech": MEMBER}, "vic": {"vision": VIEWER}}
    roles |= {"tom": {"vision": MEMBER}, "out": {"speech": MEMBER}}
    with database.writing() as session:
        for project in ("vision", "speech"):
            projects.make(session, project)
        people = {name: accounts.make_user(session, name) for name in roles}
        for name, of in roles.items():
            for project, role in of.items():
                projects.set_role(session, people[name], project, role)
    return people


@pytest.fixture
def seen(database: Database, ada: User, people: dict[str, User]) -> Run:
    """A run of the first project with a loss and two metrics."""
    run = start_run(database, ada, project="vision", name="seen run")
    events = [make_metric(step, step / 10, name) for name in ("val/a", "val/b") for step in (2, 4)]
    record(database, run, make_steps([3.0, 2.0, 1.5, 1.0]), events=events)
    return run


def made(client: TestClient, text: str = "# Words", project: str = "vision") -> int:
    """Create a report; return its id."""
    body = {"title": "Findings", "text": text, "project": project}
    answer = client.post("/api/v1/reports", json=body)
    assert answer.status_code == 201, answer.text
    return int(answer.json()["id"])


def link_to(client: TestClient, report_id: int) -> str:
    """Create a read-only link to a report; return its secret."""
    answer = client.post("/api/v1/links", json={"report": report_id})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["address"].partition("#")[2])


@pytest.mark.sql
def test_a_report_is_written_by_members_and_two_editors_do_not_overwrite_each_other(
    app: FastAPI, database: Database, people: dict[str, User], seen: Run
) -> None:
    """Members write a report, viewers read it, others do not see it; a conflicting edit overwrites
    nothing, and changes are audited.
    """
    scripts = {name: script_of(app, database, user) for name, user in people.items()}
    report_id = made(scripts["mel"], PANEL.format(seen.id, "loss"))
    path = f"/api/v1/reports/{report_id}"
    assert scripts["vic"].get(path).json()["runs"] == [seen.id]
    assert scripts["out"].get(path).status_code == 404
    assert scripts["out"].get("/api/v1/reports").json()["reports"] == []
    assert scripts["vic"].get("/api/v1/reports?project=vision").json()["total"] == 1
    change = {"title": "New", "text": "mine", "version": 1}
    assert scripts["vic"].put(path, json=change).status_code == 403
    assert scripts["out"].put(path, json=change).status_code == 404
    assert scripts["tom"].put(path, json=change).json()["version"] == 2
    late = scripts["mel"].put(path, json=change | {"text": "theirs"})
    assert (late.status_code, late.json()["code"]) == (409, "changed")
    assert scripts["mel"].put(path, json=change).status_code == 200  # the same text again
    row = scripts["vic"].get(path).json()
    assert (row["text"], row["author"], row["editor"], row["runs"]) == ("mine", "mel", "tom", [])
    assert scripts["tom"].delete(path).status_code == 403  # not its author
    assert scripts["mel"].delete(path).status_code == 204
    assert scripts["vic"].get(path).status_code == 404
    assert scripts["mel"].post(f"{path}/restoration").status_code == 204
    assert scripts["vic"].get(path).status_code == 200
    with database.reading() as session:
        in_order = select(AuditEvent.action, AuditEvent.detail).order_by(AuditEvent.id)
        events = session.execute(in_order).all()
    assert [tuple(event) for event in events if "report" in event.action] == [
        ("POST /api/v1/reports", "title Findings, project vision"),
        (f"PUT {path}", "title New, version 1"),
        (f"PUT {path}", "title New, version 1"),
        (f"DELETE {path}", ""),
        (f"POST {path}/restoration", ""),
    ]


REFUSED = [
    (PANEL.format("x", "loss"), "runs: 'x' is not valid"),
    (PANEL.format("1", ""), "metrics: none is given"),
    (PANEL.format(",".join(map(str, range(1, 53))), "loss"), "52 runs are given"),
    (PANEL.format("1", ",".join("abcdefghijklm")), "13 names; allowed: at most 12"),
    ("```panel\nruns: 1\nmetrics: loss\nx: sideways\n```", "x: 'sideways' is not valid"),
    ("```panel\nruns: 1\nmetrics: loss\nsmoothing: 2\n```", "smoothing: '2' is not valid"),
    ("```panel\nruns: 1\nmetrics: loss\ny: cubic\n```", "allowed: linear, log"),
    ("```panel\nruns: 1\nmetrics: loss\ncolour: red\n```", "colour: red: allowed: lines of"),
    ("\n\n".join([PANEL.format("1", "loss")] * 41), "41 panels; allowed: at most 40"),
    ("\n\n".join(["```runs\nruns: 1\n```"] * 11), "11 tables of runs; allowed: at most 10"),
    ("x" * 100_001, "100,001 characters; allowed: at most 100,000"),
]


def test_a_panel_that_cannot_be_drawn_is_refused_with_its_field(
    browser: TestClient, offered: None
) -> None:
    """Panels, runs, metrics and texts above a report's limits are errors with the field."""
    for text, field in REFUSED:
        answer = browser.post("/api/v1/reports", json={"title": "t", "text": text})
        assert answer.status_code == 422
        assert field in answer.json()["errors"]["text"]


def test_a_page_shows_what_the_reader_may_see_and_says_what_is_missing(
    app: FastAPI, database: Database, ada: User, people: dict[str, User], seen: Run
) -> None:
    """A report's charts, tables and images need no scripts; hidden runs are named only."""
    gone = start_run(database, ada, project="vision", name="gone run")
    hidden = submit(database, ada, project="speech", name="hidden run")
    with database.writing() as session:
        queue.end(session, gone.id, 1, Status.FINISHED)
        trash.delete(session, gone.id, ada)
    text = f"## Why\n\n{PANEL.format(f'{seen.id}, {hidden.id}, {gone.id}, 99', 'loss, val/a')}\n\n"
    text += f"```runs\nruns: {seen.id}\ncolumns: loss, val/b, nothing\n```\n\n<b>"
    report_id = made(script_of(app, database, people["mel"]), text)
    page = script_of(app, database, people["vic"]).get(f"/reports/{report_id}").text
    assert f'data-runs="{seen.id}"' in page
    assert "hidden run" not in page
    assert "gone run" not in page
    for sentence in (
        f"Run {hidden.id} does not exist or is not visible to you.",
        f"Run {gone.id} is deleted.",
        "Run 99 does not exist or is not visible to you.",
        "None of these runs has nothing.",
        "&lt;b&gt;",
        "<h3>Why</h3>",
    ):
        assert sentence in page
    assert page.count(f'src="/charts.svg?runs={seen.id}&amp;series=') == 2
    rows = re.findall(r'<tr data-key="([^"]+)"', page)
    assert rows == ["loss", "best.loss", "val/b"]
    assert "hidden run" in script_of(app, database, people["mel"]).get(f"/reports/{report_id}").text


def test_names_of_a_report_are_found_by_their_end_or_suggested(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """A setting is found by the last part of its path; for a misspelt one another is suggested."""
    run = start_run(database, ada, config=CONFIG | {"recipe": {"learning_rate": 0.1}})
    record(database, run, make_steps([2.0]), events=[make_metric(1, 0.5, "val/accuracy")])
    text = "```runs\nruns: 1\ncolumns: learning_rate, optimizer.learning_rate\n```\n\n"
    text += PANEL.format(1, "val/acuracy, loss, later")
    page = browser.get(f"/reports/{made(browser, text, project='')}").text
    assert re.findall(r'<tr data-key="([^"]+)"', page) == ["config.recipe.learning_rate"]
    question = "did you mean recipe.learning_rate?"
    assert f"None of these runs has optimizer.learning_rate; {question}" in page
    assert "None of these runs has val/acuracy; did you mean val/accuracy?" in page
    assert "None of these runs has later" not in page


def test_a_link_opens_the_panels_of_a_report_and_nothing_else(
    app: FastAPI,
    database: Database,
    ada: User,
    people: dict[str, User],
    seen: Run,
    stranger: TestClient,
) -> None:
    """A report's link opens no other metrics, runs, images or pages, nor runs hidden from its
    creator; it can be revoked.
    """
    other = submit(database, ada, project="vision", name="other run")
    hidden = start_run(database, ada, project="speech", name="hidden run")
    record(database, hidden, make_steps([1.0]))
    mel = browser_of(app, database, people["mel"])
    both = f"{seen.id}, {hidden.id}"
    report_id = made(mel, f"{PANEL.format(both, 'loss, val/a')}\n\n![i](/reports/1/images/1)")
    image = mel.post(f"/api/v1/reports/{report_id}/images", content=PNG)
    assert image.json()["address"] == f"/reports/{report_id}/images/1"
    # Tom, who may not see the second run, shares the report.
    tom = browser_of(app, database, people["tom"])
    assert (
        browser_of(app, database, people["vic"])
        .post("/api/v1/links", json={"report": report_id})
        .status_code
        == 403
    )
    page = open_link(stranger, link_to(tom, report_id))
    answer = stranger.get(page)
    assert "Findings" in answer.text
    assert f'data-runs="{seen.id}" ' in answer.text
    assert f"Run {hidden.id} is deleted, or not shared." in answer.text
    assert f'src="{page}/images/1"' in answer.text
    for absent in ("hidden run", "<form", "/api/v1", 'href="/runs', "/help", "vision"):
        assert absent not in answer.text, absent
    assert stranger.get(f"{page}/images/1").content == PNG
    series = f"{page}/comparison/series"

    def drawn(run_ids: str, *names: str) -> Any:
        params = {"runs": run_ids, "series": list(names)}
        return stranger.get(series, params=params).json()["runs"]

    runs = drawn(str(seen.id), "loss", "val/a", "val/b", "grad_norm")
    assert list(runs) == [str(seen.id)]
    assert list(runs[str(seen.id)]["metrics"]) == ["val/a"]
    assert list(runs[str(seen.id)]["series"]) == ["loss", "elapsed_ms"]
    for run_ids in (str(hidden.id), str(other.id), f"{seen.id},{other.id}"):
        assert drawn(run_ids, "loss") == {}
    chart = f"{page}/charts.svg?runs={seen.id}&series="
    assert "no values" not in stranger.get(f"{chart}loss").text
    assert "no values" in stranger.get(f"{chart}val/b").text
    for path in (f"runs/{seen.id}/series", "comparison", "images/2"):
        assert stranger.get(f"{page}/{path}").status_code == 404, path
    assert stranger.get(f"/reports/{report_id}").status_code == 303
    listed = tom.get(f"/api/v1/links?report={report_id}").json()["links"]
    assert [(link["report"], link["user"]) for link in listed] == [(report_id, "tom")]
    assert tom.delete(f"/api/v1/reports/{report_id}").status_code == 403
    assert mel.delete(f"/api/v1/reports/{report_id}").status_code == 204
    assert stranger.get(page).status_code == 401
    mel.post(f"/api/v1/reports/{report_id}/restoration")
    assert stranger.get(page).status_code == 200
    assert tom.delete(f"/api/v1/links/{listed[0]['id']}").status_code == 204
    assert stranger.get(page).status_code == 401
    both_given = mel.post("/api/v1/links", json={"report": report_id, "runs": [seen.id]})
    assert both_given.status_code == 422


def test_an_editor_reads_no_hidden_run_through_the_link_of_another_user(
    app: FastAPI,
    database: Database,
    ada: User,
    people: dict[str, User],
    seen: Run,
    stranger: TestClient,
) -> None:
    """A report's link leaves out runs that a panel's editor may not see, also after an edit."""
    hidden = start_run(database, ada, project="speech", name="hidden run")
    record(database, hidden, make_steps([1.0]))
    mel = browser_of(app, database, people["mel"])
    report_id = made(mel, PANEL.format(seen.id, "loss"))
    page = open_link(stranger, link_to(mel, report_id))
    change = {"title": "New", "text": PANEL.format(f"{seen.id}, {hidden.id}", "loss"), "version": 1}

    def list_shown() -> list[str]:
        params = {"runs": f"{seen.id},{hidden.id}", "series": ["loss"]}
        return list(stranger.get(f"{page}/comparison/series", params=params).json()["runs"])

    tom = script_of(app, database, people["tom"])
    path = f"/api/v1/reports/{report_id}"
    assert tom.put(path, json=change).json()["version"] == 2
    assert list_shown() == [str(seen.id)]
    assert f"Run {hidden.id} is deleted, or not shared." in stranger.get(page).text

    def edit_as_mel(version: int, **changes: str) -> list[str]:
        mels = change | {"version": version} | changes
        assert mel.put(path, json=mels).json()["version"] == version + 1
        return list_shown()

    tom_and_more = f"{change['text']}\n\n{PANEL.format(hidden.id, 'grad_norm')}"
    assert edit_as_mel(2, title="Mine") == [str(seen.id)]
    assert edit_as_mel(3, text=tom_and_more.replace("loss", "scale")) == [str(seen.id)]
    assert edit_as_mel(4, text=PANEL.format(seen.id, "loss")) == []  # no panel has both
    assert edit_as_mel(5) == [str(seen.id), str(hidden.id)]  # mel's choice now
    assert tom.put(path, json=change | {"title": "Typo", "version": 6}).status_code == 200
    assert list_shown() == [str(seen.id), str(hidden.id)]  # tom chose no run


def test_the_form_appends_panels_and_the_editor_keeps_what_was_typed(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """Selected runs are added to a new or existing report; an editing conflict shows the other
    version and preserves the input.
    """
    run = start_run(database, ada)
    assert (
        f'href="/reports/new?runs={run.id}&amp;metrics=loss'
        in browser.get(f"/compare?runs={run.id}").text
    )
    form = browser.get(f"/reports/new?runs={run.id}&metrics=loss&metrics=scale&smoothing=0.5").text
    assert re.search('name="panel_metrics".*? value="loss, scale"', form)
    panel = {"panel_runs": str(run.id), "panel_metrics": "loss, scale", "panel_smoothing": "0.5"}
    created = browser.post("/reports", data={"title": "Two", **panel})
    assert created.headers["location"] == "/reports/1/edit"
    table = {"report": "1", "kind": "runs", "panel_runs": str(run.id), "panel_metrics": "loss"}
    assert browser.post("/reports", data=table).headers["location"] == "/reports/1"
    wrong = browser.post("/reports", data={**table, "kind": "panel", "panel_metrics": ""})
    assert (wrong.status_code, "none is given" in wrong.text) == (422, True)
    with database.reading() as session:
        report = session.get_one(Report, 1)
        text, version = report.text, report.version
        assert [panel["kind"] for panel in report.panels] == ["panel", "runs"]
    assert "smoothing: 0.5" in text
    many = "\n\n".join(["```runs\nruns: 1\n```"] * 50)
    data = {"title": "Two", "text": many, "version": "1", "action": "preview"}
    assert browser.post("/reports/1/preview", data=data).text.count("data-report-table") == 10
    added = browser.post(
        "/reports/1/preview",
        data={"title": "Two", "text": "typed", "version": "1", "action": "add", **panel},
    )
    assert "typed\n\n```panel\nruns: 1\nmetrics: loss, scale" in added.text
    late = browser.post("/reports/1", data={"title": "Two", "text": "typed", "version": "1"})
    assert late.status_code == 422
    assert "This was changed in the meantime" in late.text
    assert f'name="version" value="{version}"' in late.text
    assert ">\ntyped</textarea>" in late.text
    again = {"title": "Two", "text": "typed", "version": str(version)}
    assert browser.post("/reports/1", data=again).headers["location"] == "/reports/1"


@pytest.mark.sql
def test_a_report_goes_from_the_trash_with_its_images_and_links(
    settings: Settings, database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """A deleted report is listed in the trash, and its project cannot be deleted until it
    is erased.
    """
    with database.writing() as session:
        projects.make(session, "old")
    report_id = made(browser, project="old")
    image = browser.post(f"/api/v1/reports/{report_id}/images", content=PNG).json()
    assert (image["media_type"], image["size_bytes"]) == ("image/png", len(PNG))
    browser.post(f"/api/v1/reports/{report_id}/images", content=PNG)  # recorded once
    file = settings.data / "reports" / str(report_id) / image["sha256"]
    assert file.read_bytes() == PNG
    store = open_store(settings)
    stray = settings.data / "reports" / "7" / "stray"
    stray.parent.mkdir()
    stray.write_bytes(PNG)
    os.utime(stray, (1.0, 1.0))  # not an upload that is under way
    with database.reading() as session:
        found = mismatches(session, store, deep=True)
    assert [(each.key, each.row) for each in found] == [("reports/7/stray", None)]
    mend(database, store, found)
    assert (stray.exists(), file.exists()) == (False, True)
    file.write_bytes(PNG[:-1])
    with database.reading() as session:
        assert [each.key for each in mismatches(session, store)] == [f"reports/1/{image['sha256']}"]
    file.write_bytes(PNG)
    link_to(browser, report_id)
    browser.post(f"/reports/{report_id}/deletion")
    assert "Findings" in browser.get("/trash").text
    assert "has reports" in browser.post("/projects/deletion", data={"project": "old"}).text
    purge = Purge(settings, database, Event())
    purge.erase_due()  # not due yet
    assert file.exists()
    assert browser.post(f"/reports/{report_id}/erasure").status_code == 303
    assert browser.post(f"/api/v1/reports/{report_id}/restoration").status_code == 409
    purge.erase_due()
    assert not file.exists()
    with database.reading() as session:
        for table in (Report, ReportImage, SharedLink):
            assert session.scalars(select(table)).all() == []


def test_an_image_is_one_by_its_content_and_is_sent_as_nothing_else(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """An image in the note of a run is an artifact that counts as stored; scripts in it
    never run.
    """
    run = start_run(database, ada)
    for wrong in (b"<svg onload=alert(1)>", b"", b"RIFF1234WAVE"):
        answer = browser.post(f"/api/v1/runs/{run.id}/images", content=wrong)
        assert (answer.status_code, list(answer.json()["errors"])) == (422, ["body"])
    large = browser.post(f"/api/v1/runs/{run.id}/images", content=PNG + b"\0" * (4 << 20))
    assert large.status_code == 413
    address = browser.post(f"/api/v1/runs/{run.id}/images", content=PNG).json()["address"]
    with database.writing() as session:
        queue.end(session, run.id, 1, Status.FINISHED)
        assert session.get_one(Run, run.id).stored_bytes == len(PNG)
    browser.patch(f"/api/v1/runs/{run.id}", json={"note": f"![plot]({address})"})
    assert f'<img src="{address}" alt="plot"' in browser.get(f"/runs/{run.id}").text
    report_id = made(browser, project="")
    own = browser.post(f"/api/v1/reports/{report_id}/images", content=PNG).json()["address"]
    for path in (address, own):
        sent = browser.get(path)
        assert sent.content == PNG
        assert sent.headers["content-type"] == "image/png"
        assert sent.headers["x-content-type-options"] == "nosniff"
        assert sent.headers["content-security-policy"] == "default-src 'none'; sandbox"


def test_an_image_above_the_limit_is_not_stored(
    settings: Settings,
    database: Database,
    ada: User,
    offered: None,
    browser: TestClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An image above the limit is not stored, and can be sent again."""
    monkeypatch.setattr(report_images, "MOST", 1)
    report_id = made(browser, project="")
    path = f"/api/v1/reports/{report_id}/images"
    first = browser.post(path, content=PNG).json()
    assert browser.post(path, content=PNG).json() == first
    refused = browser.post(path, content=OTHER_PNG)
    assert (refused.status_code, list(refused.json()["errors"])) == (422, ["image"])
    files = (settings.data / "reports" / str(report_id)).iterdir()
    assert [file.name for file in files] == [first["sha256"]]


@pytest.mark.only_on("postgresql")
@pytest.mark.parametrize(
    ("content", "status"), [(PNG, 201), (OTHER_PNG, 422)], ids=["same", "other"]
)
def test_concurrent_images_are_recorded_once_and_up_to_the_limit(
    settings: Settings,
    database: Database,
    ada: User,
    offered: None,
    browser: TestClient,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    status: int,
) -> None:
    """Concurrent uploads store an equal image once, and delete one beyond the limit."""
    monkeypatch.setattr(report_images, "MOST", 1)
    report_id = made(browser, project="")
    sha256 = hashlib.sha256(PNG).hexdigest()
    path = f"/api/v1/reports/{report_id}/images"
    with ThreadPoolExecutor() as pool:
        with database.writing() as session:
            image = {"sha256": sha256, "media_type": "image/png", "size_bytes": len(PNG)}
            report_images.record(session, session.get_one(User, ada.id), report_id, **image)
            posting = pool.submit(browser.post, path, content=content)
            while not is_blocked(database) and not posting.done():
                pass
        assert posting.result().status_code == status
    files = [file.name for file in (settings.data / "reports" / str(report_id)).iterdir()]
    assert files == ([sha256] if status == 201 else [])


def test_images_count_as_stored_and_towards_the_limit_of_a_project(
    settings: Settings, database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """An image above the limit is refused and not stored."""
    report_id = made(browser, project="")
    path = f"/api/v1/reports/{report_id}/images"
    assert browser.post(path, content=PNG).status_code == 201
    with database.writing() as session:
        assert quotas.read_usage(session, [""])[""]["stored_bytes"] == len(PNG)
        session.get_one(Project, "").stored_gib = len(PNG) / quotas.GIB
    refused = browser.post(path, content=OTHER_PNG)
    assert (refused.status_code, refused.json()["code"]) == (409, "over_quota")
    assert len(list((settings.data / "reports" / str(report_id)).iterdir())) == 1
    assert browser.post(path, content=PNG).status_code == 201
