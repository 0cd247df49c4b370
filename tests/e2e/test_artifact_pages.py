"""The pages of named artifacts in a real browser."""

import hashlib

from playwright.sync_api import Page, expect

from db.database import Database
from db.files import artifact_versions
from db.tables import Run, User
from halfstep.artifacts.manifest import Entry, digest_of
from halfstep.telemetry import events
from tests.db.conftest import make_watched


def _save(database: Database, ada: User, number: int, name: str, **files: bytes) -> int:
    """Save an artifact version by a new run; return the version's id."""
    hashes = {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
    entries = [Entry(path, len(content), hashes[path]) for path, content in files.items()]
    saved = events.SavedArtifact(
        name=name,
        type="dataset",
        digest=digest_of(entries),
        is_file=False,
        files=[
            events.ArtifactFile(
                name=path,
                path=f"blobs/{hashes[path]}",
                size_bytes=len(content),
                sha256=hashes[path],
            )
            for path, content in files.items()
        ],
    )
    with database.writing() as session:
        watched = make_watched(session, ada, f"{number:032}", name=f"run of {name} {number}")
        version = artifact_versions.save_of_run(
            session, session.get_one(Run, watched.run_id), saved
        )
        for path, content in files.items():
            artifact_versions.store_blob(
                session, hashes[path], len(content), f"blobs/{path}", version_id=version.id
            )
        return version.id


def test_versions_are_found_compared_and_traced(database: Database, ada: User, page: Page) -> None:
    """The list links to a version, its differences from another, and the run that made it."""
    _save(database, ada, 1, "data", same=b"1", old=b"old", changed=b"a")
    _save(database, ada, 2, "data", same=b"1", new=b"new", changed=b"bb")
    page.goto("/runs")
    page.get_by_role("button", name="Account menu").click()
    page.get_by_role("link", name="Artifacts").click()
    row = page.locator("tbody tr")
    expect(row).to_contain_text("v1")
    row.get_by_role("link", name="data").click()
    expect(page.locator("h1")).to_have_text("data:v1")
    page.get_by_role("link", name="v1 against v0").click()
    changes = page.get_by_role("region", name="Table of differences").locator("tbody tr")
    expect(changes).to_have_count(3)
    for path, change in (("old", "removed"), ("new", "added"), ("changed", "changed")):
        expect(changes.filter(has=page.get_by_role("cell", name=path, exact=True))).to_contain_text(
            change
        )
    lineage = page.get_by_role("region", name="Graph of the lineage")
    lineage.get_by_role("link", name="run of data 2").click()
    page.wait_for_url("**/runs/2")


def test_a_version_gets_an_alias_and_is_deleted(database: Database, ada: User, page: Page) -> None:
    """A new alias is shown at once; after a confirmed deletion the other version is shown."""
    _save(database, ada, 1, "data", old=b"old")
    second = _save(database, ada, 2, "data", new=b"new")
    page.goto(f"/artifact-versions/{second}")
    page.get_by_label("Alias").fill("v7")
    page.get_by_role("button", name="Set alias").click()
    expect(page.get_by_role("alert")).to_contain_text("not v and a number")
    page.get_by_label("Alias").fill("best")
    page.get_by_role("button", name="Set alias").click()
    expect(page.locator(".identity")).to_contain_text("best")
    page.get_by_role("button", name="Delete version").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Cancel").click()
    expect(page.locator("h1")).to_have_text("data:v1")
    page.get_by_role("button", name="Delete version").click()
    dialog.get_by_role("button", name="Delete").click()
    expect(page.locator("h1")).to_have_text("data:v0")
