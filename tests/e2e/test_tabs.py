"""Tabs of a run's page: pointer, keys, URL and links, and the requests that they save."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from db.database import Database
from db.queue import claims, queue
from db.runs import environments
from db.tables import Run, Status, User
from db.telemetry import telemetry
from db.telemetry.telemetry import LogRow
from halfstep.telemetry.events import Sample
from tests.app.conftest import submit
from tests.browser import open_tab
from tests.db.telemetry.telemetry_made import make_events, make_headroom, make_steps, record
from tests.e2e.test_streams import collect_requests


@pytest.mark.journey
def test_only_the_open_tab_is_shown_and_fetched(
    database: Database, running: Run, page: Page
) -> None:
    """A tab is in the URL, opens by keys and links, and is remembered; hidden parts are fetched
    once shown, without gaps; without scripts all tabs are visible.
    """
    looks = [make_headroom(50, body=(1.0, 2.0))]
    record(
        database, running, make_steps([1.0] * 3, skipped=[2]), events=[*make_events([2]), *looks]
    )
    series, headroom, streams = (
        collect_requests(page, part) for part in ("/1/series", "/1/headroom", "/live?")
    )
    page.goto("/runs/1?tab=log&x=time")
    panels = page.get_by_role("tabpanel")
    expect(panels).to_have_accessible_name("Log")
    assert not any("steps" in address for address in streams)
    record(database, running, make_steps([1.0], first=4))
    expect(page.locator('[data-fact="step"]')).to_have_text("4")
    assert (series, headroom) == ([], [])

    selected = page.locator("[role=tab][aria-selected=true]")
    selected.focus()
    for key, name in (
        ("End", "Configuration"),
        ("ArrowRight", "Charts"),
        ("ArrowLeft", "Configuration"),
    ):
        page.keyboard.press(key)
        expect(selected).to_have_text(name)
        expect(selected).to_be_focused()
        expect(panels).to_have_accessible_name(name)
    page.keyboard.press("Home")
    page.wait_for_url("**/runs/1?x=time")
    page.wait_for_selector("[data-plot][data-drawn='4']")
    record(database, running, make_steps([1.0], first=5))
    page.wait_for_selector("[data-plot][data-drawn='5']")
    assert (len(series), headroom) == (1, [])
    assert "steps" in streams[-1]

    page.evaluate("location.hash = '#headroom'")
    expect(panels).to_have_accessible_name("Gradients")
    page.wait_for_selector("[data-headroom-plot][data-drawn='1']")
    page.wait_for_url("**/runs/1?x=time&tab=gradients#headroom")
    page.reload()
    page.wait_for_selector("[data-headroom-plot][data-drawn='1']")
    open_tab(page, "Charts")
    page.wait_for_selector("[data-plot][data-drawn='5']")
    page.set_viewport_size({"width": 390, "height": 700})
    page.wait_for_url("**/runs/1?x=time")
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    open_tab(page, "Configuration")
    expect(selected).to_be_in_viewport()
    box = selected.bounding_box()
    assert box is not None
    assert box["y"] < 52  # below the header, where it was pressed
    assert page.evaluate("document.documentElement.scrollWidth") <= 390

    plain = page.context.browser.new_context(  # type: ignore[union-attr]
        java_script_enabled=False, storage_state=page.context.storage_state()
    )
    without = plain.new_page()
    without.goto(page.url)
    for part in ("#skipped", "#headroom", "#history", "#charts"):
        expect(without.locator(part)).to_be_visible()
    plain.close()


def test_the_environment_appears_while_the_page_is_open(
    database: Database, ada: User, offered: None, page: Page
) -> None:
    """The environment of the next attempt appears live, and expanded sections stay expanded."""
    submit(database, ada)
    page.goto("/runs/1?tab=configuration")
    noted = page.locator("#environment")
    expect(noted).to_contain_text("It is recorded when the run starts")
    content = {"worker": "w1", "host": "host", "platform": "Linux", "devices": [], "versions": {}}
    git = {"commit": "c0ffee", "is_dirty": True, "untracked": [], "untracked_count": 0}
    content |= {"command": ["python"], "folder": "/", "file": None, "git": git | {"is_cut": False}}
    for attempt, status in ((1, Status.QUEUED), (2, Status.FINISHED)):
        claimed: dict[str, Any] = {
            "recipes": ["digits"],
            "precisions": ["fp16"],
            "free_devices": [0],
        }
        with database.writing() as session:
            claims.claim(session, 1, **claimed, lease_seconds=60.0)
        with database.writing() as session:
            texts = environments.Texts(None, f"+line {attempt}")
            environments.record(session, 1, attempt, content, texts)
            queue.end(session, 1, attempt, status)
        expect(noted).to_contain_text(f"Of attempt {attempt}")
        if attempt == 1:
            noted.get_by_text("Changes since the commit").click()
        expect(noted.locator("pre .added")).to_have_text(f"+line {attempt}")


def test_the_log_is_narrowed_to_a_rank(database: Database, running: Run, page: Page) -> None:
    """The choice of a rank appears with a further rank's first line, and combines with the
    search.
    """
    page.goto("/runs/1?tab=log")
    ranks = page.get_by_label("Rank", exact=True)
    _print(database, 1, "step 1")
    shown = page.locator("[data-log-lines] > :not([hidden])")
    expect(shown).to_have_text(["step 1"])
    expect(ranks).to_be_hidden()
    _print(database, 2, "[rank 2] step 1", "[rank 1] step 1", "[rank 1] done")
    expect(ranks.locator("option")).to_have_text(["All ranks", "Rank 0", "Rank 1", "Rank 2"])
    ranks.select_option("Rank 1")
    expect(shown).to_have_text(["[rank 1] step 1", "[rank 1] done"])
    expect(page.locator("[data-log-found]")).to_have_text("2 of 4 lines")
    page.locator("[data-log-search]").fill("step")
    expect(shown).to_have_text(["[rank 1] step 1"])
    _print(database, 5, "[rank 1] step 2", "[rank 2] step 2")
    expect(shown).to_have_text(["[rank 1] step 1", "[rank 1] step 2"])
    ranks.select_option("Rank 0")
    expect(shown).to_have_text(["step 1"])


def _print(database: Database, first: int, *texts: str) -> None:
    """Record log lines, the first with this number."""
    rows = [
        LogRow(number=number, attempt=1, time=1.0, stream="stdout", text=text)
        for number, text in enumerate(texts, first)
    ]
    with database.writing() as session:
        telemetry.record(session, 1, 1, telemetry.Flush(log_lines=rows))


def test_the_system_group_has_a_line_for_each_rank(
    database: Database, running: Run, page: Page
) -> None:
    """The system charts have a line for each further rank's memory."""
    samples = [
        Sample(
            device=device,
            elapsed_ms=1000 * second,
            utilization=None,
            memory_bytes=None,
            power_watts=None,
            temperature_celsius=None,
            process_memory_bytes=2**30,
        )
        for second in range(4)
        for device in (-3, -2, -1)
    ]
    with database.writing() as session:
        telemetry.record(session, 1, 1, telemetry.Flush(samples=samples))
    page.goto("/runs/1#system")
    page.wait_for_selector("[data-system-plot][data-drawn]")
    names = "document.querySelector('[data-system-plot]').data.map((line) => line.name)"
    assert sorted(page.evaluate(names)) == ["host", "rank 1", "rank 2"]
