"""The trash, its buttons, and notes and tags of a run."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from app.live.run_updates import labels_mark
from app.trash import disk, trash_routes
from app.trash.disk import Disk
from db.database import Database
from db.files import checkpoints
from db.queue import queue, run_control
from db.runs import run_metadata, runs, trash
from db.settings import Settings
from db.tables import Run, Status, User
from tests.app.conftest import submit
from tests.db.files.checkpoints_made import make_saved
from tests.spool_made import checkpoint_of


@pytest.fixture
def ended(database: Database, running: Run) -> int:
    with database.writing() as session:
        checkpoints.publish(session, running.id, 1, checkpoint_of(make_saved(10)), ["key"])
        queue.end(session, running.id, 1, Status.FINISHED)
    return running.id


def test_deleted_on_its_page_and_undone(ended: int, browser: TestClient) -> None:
    """A deleted run is in the trash, and the list offers to undo the deletion."""
    assert f'action="/runs/{ended}/deletion"' in browser.get(f"/runs/{ended}").text
    answer = browser.post(f"/runs/{ended}/deletion")
    assert answer.headers["location"] == f"/runs?deleted={ended}"
    undo = f'action="/runs/{ended}/restoration"'
    assert undo in browser.get(f"/runs?deleted={ended}").text
    assert f'data-key="{ended}"' in browser.get("/trash").text
    gone = browser.get(f"/runs/{ended}")
    assert (gone.status_code, "It is in the trash" in gone.text) == (404, True)
    assert '<a class="button primary" href="/trash">Open trash</a>' in gone.text
    answer = browser.post(f"/runs/{ended}/restoration")
    assert answer.headers["location"] == f"/runs/{ended}"
    assert undo not in browser.get(f"/runs?deleted={ended}").text
    assert "The trash is empty." in browser.get("/trash").text


def test_restored_from_a_form_it_leads_back_there(ended: int, browser: TestClient) -> None:
    """A restoration redirects to the page of the form, and never to another server."""
    for back, place in (("/trash", "/trash"), ("//elsewhere.example", "/")):
        browser.post(f"/runs/{ended}/deletion")
        answer = browser.post(f"/runs/{ended}/restoration", data={"back": back})
        assert answer.headers["location"] == place


def test_deleted_for_good_it_is_only_waited_for(ended: int, browser: TestClient) -> None:
    """The row of a run that is being erased offers no action any more."""
    browser.post(f"/runs/{ended}/deletion")
    assert browser.post(f"/runs/{ended}/erasure").headers["location"] == "/trash"
    page = browser.get("/trash").text
    assert "being deleted permanently" in page
    assert 'data-one="restore"' not in page
    assert f'data-key="{ended}"' not in browser.get(f"/runs?deleted={ended}").text


def test_the_trash_is_shown_page_by_page(
    database: Database, ada: User, browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trash is shown page by page, with the newest deletion first."""
    monkeypatch.setattr(trash_routes, "PAGE_SIZE", 2)
    for _ in range(3):
        run_id = submit(database, ada, name="<b>" + "x" * 97).id
        with database.writing() as session:
            run_control.cancel(session, run_id, ada)
            trash.delete(session, run_id, ada)
    page = browser.get("/trash").text
    assert "<b>xx" not in page
    assert [page.count(f'data-key="{run_id}"') for run_id in (1, 2, 3)] == [0, 1, 1]
    assert 'href="/trash?after=2"' in page
    assert 'data-key="1"' in browser.get("/trash?after=2").text
    assert browser.get("/trash?after=x").status_code == 422
    assert "3 runs, 0 B" in browser.get("/runs").text


def test_a_full_disk_is_reported(
    settings: Settings, ended: int, browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list has a gauge of a local disk with the files, and warns before it is full."""
    usage = {"total": 10**12, "used": 0, "free": 5 * 10**11}
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _path: type("Usage", (), usage))
    settings.data.mkdir(exist_ok=True)
    page = browser.get("/runs").text
    assert "466 GiB of 931 GiB free" in page
    assert 'class="gauge"' in page
    usage["free"] = 10**10
    assert 'class="gauge short"' in browser.get("/runs").text
    bucket = settings.model_copy(update={"storage_url": "s3://bucket"})
    assert disk.disk(bucket) is None
    assert disk.disk(settings) == Disk(10**12, 10**10)


def test_an_unresponsive_disk_is_not_reported(tmp_path: Path) -> None:
    """If the disk does not respond, the list of runs is shown without its usage."""
    assert disk.disk(Settings(data=tmp_path / "nowhere")) is None


def test_a_page_shows_notes_tags_and_sizes(
    database: Database, ended: int, ada: User, browser: TestClient
) -> None:
    """A page shows notes as safe HTML, tags as links, and file sizes, and is updated live."""
    with database.writing() as session:
        before = labels_mark(runs.get(session, ended))
        note = {"note": "**why** <script>x</script>", "tags": ["a&b"]}
        assert labels_mark(run_metadata.edit(session, ended, ada, note)) != before
    page = browser.get(f"/runs/{ended}").text
    assert "<strong>why</strong> &lt;script&gt;x" in page
    assert 'href="/runs?filter=tag%3Aa%26b"' in page
    assert "data-stored>10 B</b>" in page
