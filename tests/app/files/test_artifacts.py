"""Artifacts are shown on the page, and sent so that no script in them can run."""

import hashlib
import json
import re
from html import unescape

import pytest
from starlette.testclient import TestClient

from app.live import run_updates
from app.runs import run_pages
from db.database import Database
from db.files import artifacts
from db.settings import Settings
from db.tables import Run
from tests.spool_made import artifact_of

FILES = {"samples.txt": b"<script>", "grid.png": b"\x89PNG", "page.html": b"<script>"}


@pytest.fixture
def saved(settings: Settings, database: Database, running: Run) -> None:
    """Three files of one step."""
    for name, body in FILES.items():
        path = settings.run_folder(running.id) / "artifacts" / "step-00000100" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        sha256 = hashlib.sha256(body).hexdigest()
        event = {"step": 100, "name": name, "size_bytes": len(body), "sha256": sha256}
        with database.writing() as session:
            key = path.relative_to(settings.data).as_posix()
            artifacts.publish(session, running.id, running.attempt, artifact_of(event), key)


@pytest.mark.parametrize(
    ("name", "media_type"),
    [
        ("samples.txt", "text/plain; charset=utf-8"),
        ("grid.png", "image/png"),
        ("page.html", "application/octet-stream"),
    ],
)
def test_file_is_sent_as_nothing_that_runs(
    saved: None, script: TestClient, name: str, media_type: str
) -> None:
    """Media types come from a short list, and sandbox and nosniff apply to any file."""
    files = {
        each["name"]: each["id"]
        for each in script.get("/api/v1/runs/1/artifacts").json()["artifacts"]
    }
    answer = script.get(f"/runs/1/artifacts/{files[name]}/download")
    assert answer.content == FILES[name]
    assert answer.headers["content-type"] == media_type
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
    disposition = f'attachment; filename="digits-fp16-run1-step100-{name}"'
    assert answer.headers["content-disposition"] == disposition


def test_a_document_is_shown_in_a_frame_that_runs_nothing(saved: None, script: TestClient) -> None:
    """A document is displayed in a sandboxed frame without origin, scripts, forms and requests."""
    listed = script.get("/api/v1/runs/1/artifacts").json()["artifacts"]
    [number] = [each["id"] for each in listed if each["name"] == "page.html"]
    address = f"/runs/1/artifacts/{number}/download"
    answer = script.get(address, headers={"sec-fetch-dest": "iframe"})
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-disposition"] == "inline"
    policy = answer.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "sandbox", "frame-ancestors 'self'"} < set(policy)
    top = script.get(address, headers={"sec-fetch-dest": "document"})
    assert top.headers["content-disposition"].startswith("attachment")


def test_part_of_a_file_is_enough_for_a_preview(saved: None, script: TestClient) -> None:
    """An artifact is sent by ranges, as a checkpoint is."""
    answer = script.get("/runs/1/artifacts/1/download", headers={"Range": "bytes=0-3"})
    assert (answer.status_code, answer.content) == (206, b"<scr")
    assert answer.headers["content-range"] == "bytes 0-3/8"


def test_page_shows_pictures_and_texts(saved: None, browser: TestClient) -> None:
    """Each key has a row with its kind and files, shown by media.js, and a link to the last."""
    page = browser.get("/runs/1?tab=media").text
    for key, kind, number in (("grid", "image", 2), ("samples.txt", "text", 1)):
        assert f'data-key="{key}" data-kind="{kind}" data-files="[[100,{number},' in page
    assert 'href="/runs/1/artifacts/3/download"' in page
    assert 'data-panel="media" data-shown' in page


def test_strangers_get_nothing(saved: None, stranger: TestClient) -> None:
    """An artifact requires a sign-in."""
    answer = stranger.get("/runs/1/artifacts/1/download")
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/sign-in")


def test_artifact_of_another_run_is_not_there(saved: None, script: TestClient) -> None:
    """An artifact cannot be downloaded by the address of another run."""
    assert script.get("/runs/2/artifacts/1/download").status_code == 404
    assert script.get("/runs/1/artifacts/9/download").status_code == 404


@pytest.mark.parametrize("linked", ["samples.txt", "..", "../.."])
def test_a_link_that_a_recipe_made_is_not_followed(
    saved: None, settings: Settings, script: TestClient, linked: str
) -> None:
    """Files and folders of a run may not be links; the folder of all runs may be one."""
    place = settings.run_folder(1) / "artifacts" / "step-00000100"
    runs_folder = settings.data / "runs"
    runs_folder.rename(settings.data / "elsewhere")
    runs_folder.symlink_to(settings.data / "elsewhere")  # as an operator may
    assert script.get("/runs/1/artifacts/1/download").content == FILES["samples.txt"]
    inside = (place / linked).resolve()
    outside = settings.data / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)
    assert (place / "samples.txt").read_bytes() == FILES["samples.txt"]
    answer = script.get("/runs/1/artifacts/1/download")
    assert answer.status_code == 404
    assert "<script>" not in answer.text


def test_the_page_shows_the_last_of_many_files(
    running: Run,
    database: Database,
    browser: TestClient,
    script: TestClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of many files the page shows the newest and the total; the API has all of them."""
    shown = 50
    for module in (run_pages, run_updates):
        monkeypatch.setattr(module, "ARTIFACTS_SHOWN", shown)
    with database.writing() as session:
        for step in range(1, shown + 11):
            event = {"step": step, "name": "a.txt", "size_bytes": 1, "sha256": f"{step:064x}"}
            artifacts.publish(
                session, running.id, running.attempt, artifact_of(event), f"runs/1/{step}"
            )
    page = browser.get("/runs/1?tab=artifacts").text
    [files] = re.findall(r'<tr data-key="a.txt" .*? data-files="(.*?)"', page)
    steps = [step for step, _id, _name in json.loads(unescape(files))]
    assert steps == list(range(11, shown + 11))
    assert f"The last {shown} of {shown + 10}" in page
    listed = script.get("/api/v1/runs/1/artifacts", params={"limit": 200}).json()
    assert listed["total"] == shown + 10
