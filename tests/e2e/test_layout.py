"""The layout of a run's page for common screen sizes."""

import math
import re

import pytest
from playwright.sync_api import Page, ViewportSize, expect

from db.access import shared_links
from db.database import Database
from db.queue import queue
from db.runs import reports
from db.tables import Run, Status, User
from tests.app.conftest import CONFIG, submit
from tests.db.conftest import make_watched
from tests.db.telemetry.telemetry_made import make_events, make_metric, make_steps, record

DESK: ViewportSize = {"width": 1440, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}
GOES_ON = "all => all.filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.ariaLabel)"
SETTINGS = ("/account", "/projects", "/people", "/secrets", "/retention", "/audit", "/trash")


@pytest.fixture
def trained(database: Database, running: Run) -> Run:
    """A run in fp16 with skipped steps and a metric."""
    events = [*make_events([3, 40]), make_metric(50, 0.5, "val/loss")]
    record(database, running, make_steps([1.0] * 60, skipped=[3, 40]), events=events)
    return running


def _box(page: Page, selector: str) -> dict[str, float]:
    box = page.locator(selector).bounding_box()
    assert box is not None
    return {**box, "bottom": box["y"] + box["height"]}


@pytest.mark.parametrize(
    ("width", "height", "least"),
    [(1440, 900, 240), (1366, 768, 185), (1440, 1080, 330), (1920, 1080, 330)],
)
def test_loss_and_scale_stand_whole_in_the_first_screen(
    trained: Run, page: Page, width: int, height: int, least: int
) -> None:
    """Loss and scale charts end above the fold, and grow to fill the screen."""
    page.set_viewport_size({"width": width, "height": height})
    page.goto("/runs/1")
    page.wait_for_selector("[data-plot=scale][data-drawn]")
    loss, scale = _box(page, "[data-row=loss]"), _box(page, "[data-row=scale]")
    assert loss["y"] <= 260
    assert scale["bottom"] <= height - 40
    assert min(_box(page, f"[data-plot={row}]")["height"] for row in ("loss", "scale")) >= least
    card = _box(page, ".scaler-card")
    assert card["x"] > loss["x"] + loss["width"]
    assert card["bottom"] == pytest.approx(scale["bottom"], abs=1)


def test_a_run_has_one_filled_button_and_six_tabs(
    database: Database, trained: Run, page: Page
) -> None:
    """Only the main action of the run's state is a filled button."""
    page.goto("/runs/1")
    filled = page.locator("header .primary:visible")
    expect(filled).to_have_text(["Pause"])
    expect(page.get_by_role("tab")).to_have_count(6)  # and a seventh with media
    with database.writing() as session:
        queue.end(session, 1, 1, Status.FINISHED)
    expect(filled).to_have_text(["Clone"])
    for anchor, tab in (
        ("checkpoints", "Files"),
        ("spikes", "Skipped steps"),
        ("metrics", "Charts"),
    ):
        page.goto(f"/runs/1#{anchor}")
        expect(page.locator(f"#{anchor}")).to_be_in_viewport()
        expect(page.locator("[role=tab][aria-selected=true]")).to_contain_text(tab)


@pytest.mark.journey
def test_a_phone_shows_health_and_the_loss_first(trained: Run, page: Page) -> None:
    """On a phone name, six figures, health and the whole loss panel need no scrolling."""
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto("/runs/1")
    page.wait_for_selector("[data-plot=loss][data-drawn]")
    rail = _box(page, ".rail")
    assert rail["bottom"] == 844
    assert _box(page, "[data-row=loss]")["bottom"] <= rail["y"]
    for text in ("Training loss", "Loss scale", "Skipped steps", "Gradient norm", "Throughput"):
        expect(page.locator(".facts").get_by_text(text)).to_be_in_viewport()
    page.get_by_role("button", name="More actions").click()
    expect(page.get_by_role("button", name="Cancel run")).to_be_in_viewport()


def test_a_diagnosis_comes_first(database: Database, running: Run, page: Page) -> None:
    """A failed run's cause and first remedy are above everything else."""
    losses = [1.0] * 5 + [float("nan")] * 55
    skipped = range(6, 61)
    events = make_events(list(skipped))
    record(database, running, make_steps(losses, skipped=skipped), events=events)
    with database.writing() as session:
        queue.end(session, 1, 1, Status.FINISHED)
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/runs/1")
    page.wait_for_selector("[data-plot=scale][data-drawn]")
    assert _box(page, ".diagnosis")["bottom"] <= 420
    parts = page.locator(".diagnosis > div").evaluate_all("all => all.map((one) => one.innerText)")
    assert len(parts) == 2
    assert all(parts)
    loss, scale = _box(page, "[data-row=loss]"), _box(page, "[data-row=scale]")
    assert loss["y"] == scale["y"]
    assert max(loss["bottom"], scale["bottom"]) <= 880
    expect(page.locator(".primary:visible")).to_have_count(1)
    page.set_viewport_size({"width": 320, "height": 844})
    label = "Start again with recipe.learning_rate 0.001, and scaler.init_scale 65536"
    add = "(card, label) => card.insertAdjacentHTML('beforeend', `<a class=button>${label}</a>`)"
    page.locator(".diagnosis").evaluate(add, label)
    card, button = _box(page, ".diagnosis"), _box(page, f".button:text('{label}')")
    assert button["x"] + button["width"] <= card["x"] + card["width"]


@pytest.mark.parametrize("width", [320, 360, 640, 768, 900, 1024, 1440, 1920, 2560])
def test_a_run_never_scrolls_sideways(trained: Run, page: Page, width: int) -> None:
    """No tab of a run scrolls sideways at any width."""
    page.set_viewport_size({"width": width, "height": 900})
    for tab in ("charts", "skips", "gradients", "media", "files", "log", "configuration"):
        page.goto(f"/runs/1?tab={tab}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, tab


def test_settings_pages_share_a_layout(page: Page) -> None:
    """Settings pages have the navigation at the left, 60 rem of content and one primary button."""
    page.set_viewport_size(DESK)
    boxes = set()
    for address in SETTINGS:
        page.goto(address)
        content = _box(page, ".settings-content")
        boxes.add((_box(page, ".settings-page > nav")["x"], content["x"], content["width"]))
        expect(page.locator(".settings-page [aria-current]")).to_have_attribute("href", address)
        assert page.locator(".primary:visible").count() <= 1, address
    assert len(boxes) == 1
    assert boxes.pop()[2] <= 960
    page.goto("/account")
    page.get_by_label("Name", exact=True).fill("laptop")
    page.get_by_role("button", name="Create token").click()
    expect(page.get_by_role("button", name="Revoke")).to_be_visible()
    for width in (PHONE["width"], 1024):
        page.set_viewport_size({"width": width, "height": 844})
        for address in SETTINGS:
            page.goto(address)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, address
            assert page.locator(".table-scroll").evaluate_all(GOES_ON) == [], address


@pytest.mark.parametrize(("loss", "colour"), [(1.0, "--good"), (math.nan, "--bad")])
def test_the_progress_bar_of_a_diverged_run_is_not_green(
    database: Database, running: Run, page: Page, loss: float, colour: str
) -> None:
    """A diverged run's progress bar is not green, although the run has finished."""
    record(database, running, make_steps([1.0, loss]))
    with database.writing() as session:
        queue.end(session, 1, 1, Status.FINISHED)
    page.goto("/runs/1")
    value = "getComputedStyle(document.querySelector('.fact progress')).getPropertyValue('{}')"
    assert page.evaluate(value.format("--bar")) == page.evaluate(value.format(colour)) != ""


@pytest.mark.journey
def test_a_phone_shows_skips_and_tiles_whole(trained: Run, page: Page) -> None:
    """On a phone a skipped step is a card with its culprit, and no tile's value is cut."""
    page.set_viewport_size(PHONE)
    page.goto("/runs/1#skips")
    row = page.locator(".skips tbody tr").first
    expect(row.locator("[data-called=culprit]")).to_be_in_viewport(ratio=1)
    is_cut = "cells => cells.filter((cell) => cell.scrollWidth > cell.clientWidth)"
    for cells in (".facts .fact > *", "[data-fragment=skips]"):
        assert page.locator(cells).evaluate_all(f"{is_cut}.map((cell) => cell.textContent)") == []


def test_heads_and_controls_have_room(
    database: Database, ada: User, trained: Run, page: Page
) -> None:
    """Headings and controls fit: skipped steps, a narrow comparison, a report's editor and
    preview, and on a phone the sentence and the status of a run's health.
    """
    with database.writing() as session:
        session.get_one(Run, 1).tags = "trial"
        report = reports.create(session, ada, "", reports.Content("One", "# Words", []))
    page.set_viewport_size(DESK)
    page.goto("/runs/1?tab=skips")
    assert _box(page, "#skipped .section-head")["height"] < 45
    assert _box(page, ".tags")["y"] >= _box(page, ".health")["bottom"] + 6
    page.set_viewport_size({"width": 1024, "height": 768})
    page.goto("/compare?runs=1")
    toolbar = page.locator(".tab-line .toolbar")
    assert toolbar.evaluate("box => box.scrollWidth <= box.clientWidth")
    page.goto(f"/reports/{report.id}/edit")
    assert _box(page, "#preview")["y"] == _box(page, "form.card")["y"]
    page.set_viewport_size(PHONE)
    page.goto("/runs/1")
    assert _box(page, ".health p")["width"] > 300
    expect(page.locator("header .pill .status")).to_have_css("font-size", "0px")
    submit(database, ada, config={**CONFIG, "lab": {"task": "precision_plan"}})
    page.goto("/runs/2")
    expect(page.locator("header .pill .status")).to_have_css("font-size", "12px")


def test_the_time_of_a_run_is_whole_beside_a_long_name(
    database: Database, ada: User, offered: None, page: Page
) -> None:
    """A run's time is complete next to a long name, which shares the rest of the header."""
    submit(database, ada, name="a long name " * 16)
    for width in (1440, 1024):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto("/runs/1")
        time, header = _box(page, ".identity small"), _box(page, ".identity")
        assert time["width"] > 30
        assert time["x"] + time["width"] <= header["x"] + header["width"] + 1


def test_a_column_of_replays_without_any_is_narrow(
    database: Database, trained: Run, page: Page
) -> None:
    """Without replays their column is as wide as the culprits', and nothing scrolls sideways."""
    with database.writing() as session:
        queue.end(session, 1, 1, Status.FINISHED)
    page.set_viewport_size({"width": 1024, "height": 768})
    page.goto("/runs/1?tab=skips")
    assert _box(page, ".skips tr:first-child > .replay")["width"] <= 100
    table = page.locator("[data-fragment=skips]")
    assert table.evaluate("box => box.scrollWidth <= box.clientWidth")


def test_the_scaler_card_shows_whole_rows(database: Database, running: Run, page: Page) -> None:
    """The scaler card leaves out skipped steps that do not fit."""
    skipped = range(3, 90, 2)
    record(database, running, make_steps([1.0] * 90, skipped=skipped), events=make_events(skipped))
    page.set_viewport_size(DESK)
    page.goto("/runs/1")
    page.wait_for_selector("[data-plot=scale][data-drawn]")
    low = _box(page, ".scaler-card")["bottom"]
    right = _box(page, ".skip-list")["x"] + _box(page, ".skip-list")["width"]
    rows = page.locator(".skip-list li").evaluate_all(
        "rows => rows.map((row) => row.getBoundingClientRect()).map(({ x, bottom }) => [x, bottom])"
    )
    shown = [bottom for x, bottom in rows if x < right]
    assert 5 < len(shown) < len(rows)
    assert max(shown) <= low


def test_nothing_is_cut_on_a_phone(database: Database, ada: User, page: Page) -> None:
    """On a phone the loss legend, the audit log and a run's shares are not cut."""
    page.set_viewport_size(PHONE)
    with database.writing() as session:
        watched = make_watched(session, ada, "phone", name="phone")
        run = session.get_one(Run, watched.run_id)
    events = [make_metric(step, 0.125, "val/loss") for step in (10, 20)]
    record(database, run, make_steps([1.5] * 20), events=events)
    page.goto("/runs/1")
    legend = page.locator("[data-row=loss] .panel-lines button")
    expect(legend).to_have_text([re.compile("^loss"), re.compile("^val/loss")])
    inside = """(buttons) => buttons.every((each) => {
        const [own, list] = [each, each.parentElement].map((part) => part.getBoundingClientRect())
        return own.right <= list.right + 1 && own.bottom <= list.bottom + 1
    })"""
    assert legend.evaluate_all(inside)
    page.goto("/audit")
    box = page.get_by_role("region", name="Table of events").bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= PHONE["width"]
    assert page.locator("thead:visible").count() == 0
    page.goto("/runs/1?tab=configuration")
    assert page.locator(".table-scroll:visible").evaluate_all(GOES_ON) == []
    with database.writing() as session:
        secret = shared_links.make(session, ada, [1], 1)[0]
    page.goto(f"/shared#{secret}")
    expect(page.locator("main").get_by_text("Shared by ada until")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
