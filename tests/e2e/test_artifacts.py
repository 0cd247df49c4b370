"""What a recipe left after an evaluation, in a real browser."""

import base64
import hashlib

from playwright.sync_api import Page, expect

from db import artifacts
from db.database import Database
from db.settings import Settings
from db.tables import Run
from halfstep.logged import Audio, Histogram, as_file

#: One red pixel.
PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
FILES = {"samples.txt": b"ROMEO: <b>What light?</b>", "grid.png": PICTURE}


def publish(
    settings: Settings, database: Database, run: Run, name: str, body: bytes, *, step: int = 100
) -> None:
    """Leave a file as a training does, and record it."""
    key = f"runs/{run.id}/artifacts/step-{step:08}/{name}"
    path = settings.data / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    sha256 = hashlib.sha256(body).hexdigest()
    event = {"step": step, "name": name, "size_bytes": len(body), "sha256": sha256}
    with database.writing() as session:
        artifacts.publish(session, run.id, run.attempt, event, key)


def test_artifacts_come_onto_the_page_and_are_downloaded(
    settings: Settings, database: Database, running: Run, page: Page
) -> None:
    """A text is shown as text and a picture as a picture, while one watches; both download."""
    page.goto("/runs/1#artifacts")
    expect(page.locator("[data-fragment=artifacts]")).to_contain_text("None")
    for name, body in FILES.items():
        publish(settings, database, running, name, body)
    rows = page.locator(".artifacts tbody tr")
    expect(rows.locator("figure")).to_have_count(2)
    rows.first.scroll_into_view_if_needed()
    expect(rows.locator("pre")).to_have_text("ROMEO: <b>What light?</b>")
    page.wait_for_function("document.querySelector('.artifacts img')?.naturalWidth === 1")
    for name, body in FILES.items():
        with page.expect_download() as started:
            page.get_by_role("link", name=name).click()
        assert started.value.suggested_filename.endswith(name)
        assert started.value.path().read_bytes() == body


def test_histograms_are_drawn_and_sounds_can_be_heard(
    settings: Settings, database: Database, running: Run, page: Page
) -> None:
    """As a script logs them: bars between the lowest and the highest, and a player."""
    logged = {"sizes": Histogram([0.0, 1.0, 1.0], bins=2), "tone": Audio([0.0], 8000)}
    for name, value in logged.items():
        suffix, body = as_file(value)
        publish(settings, database, running, f"{name}.{suffix}", body)
    page.goto("/runs/1?tab=artifacts")
    page.locator(".artifacts tbody tr").first.scroll_into_view_if_needed()
    expect(page.locator(".artifacts rect")).to_have_count(2)
    heights = "bars => bars.map(bar => bar.height.baseVal.value)"
    assert page.locator(".artifacts rect").evaluate_all(heights) == [50, 100]
    expect(page.locator(".artifacts .bars")).to_contain_text("from 0.000 to 1.000")
    page.locator(".artifacts audio").evaluate("sound => sound.load()")
    page.wait_for_function("(document.querySelector('.artifacts audio')?.networkState ?? 3) !== 3")
