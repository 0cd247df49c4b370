"""The list of runs: layout, filters, pages, charts and the first run."""

import re
from copy import deepcopy

import pytest
from playwright.sync_api import Page, ViewportSize, expect

from app.submission import config_schema
from db.database import Database
from db.queue import queue, run_control
from db.tables import Run, Status, User
from tests.app.conftest import CONFIG, offer_digits, submit
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record
from tests.e2e.test_still import WATCH_SHIFTS

DESK: ViewportSize = {"width": 1440, "height": 900}
WIDTHS = [320, 360, 390, 640, 700, 768, 900, 1024, 1280, 1440, 1600, 1920, 2560]


@pytest.fixture
def many(database: Database, ada: User, running: Run) -> Run:
    """A running run, a queued one and 58 cancelled ones."""
    record(database, running, make_steps([3.0, 2.0, 1.5]), events=[make_metric(2, 0.5)])
    for n in range(59):
        config = deepcopy(CONFIG)
        config_schema.put(config, "training.batch_size", 8 * (1 + n % 2))
        submit(database, ada, name=f"digits-with-a-rather-long-common-name-lr{n}", config=config)
    with database.writing() as session:
        for run_id in range(2, 60):
            run_control.cancel(session, run_id, ada)
    return running


def test_nineteen_rows_stand_in_the_first_screen(many: Run, page: Page) -> None:
    """Nineteen rows fit the first screen below two rows of controls, with the ends of names
    visible.
    """
    page.set_viewport_size(DESK)
    page.goto("/runs")
    rows = page.locator("tr[data-status]")
    boxes = [row.bounding_box() for row in rows.all()]
    tops = [box["y"] for box in boxes if box]
    assert tops[0] <= 225
    assert sum(1 for box in boxes if box and box["y"] + box["height"] <= 900) >= 19
    expect(page.locator(".primary:visible")).to_have_text(["New run"])
    expect(page.locator(".band")).to_have_text(["Active · 2", "Ended · 58"])
    for row in rows.all()[:5]:
        inner = row.locator("td.name .run-name > span").last.bounding_box()
        outer = row.locator("td.name .run-name").bounding_box()
        assert inner
        assert outer
        assert inner["x"] + inner["width"] <= outer["x"] + outer["width"] + 1


def test_columns_without_room_are_named(many: Run, page: Page) -> None:
    """Columns that do not fit are named, and a click scrolls to chosen ones."""
    page.set_viewport_size(DESK)
    page.goto("/runs")
    out = page.locator("[data-columns-out]")
    expect(out).to_have_text("4 more columns")
    page.get_by_role("button", name="Columns").click()
    expect(page.locator("[data-no-room] label")).to_have_text(
        ["Duration", "Steps/s", "Owner", "Tags"]
    )
    expect(page.locator("[data-no-room] input:checked")).to_have_count(0)
    page.get_by_role("checkbox", name="Duration").check()
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_role("columnheader", name="Duration")).to_have_count(1)
    expect(page.get_by_role("columnheader", name="Owner")).to_have_count(0)
    page.goto("/runs")
    out.click()
    table = page.get_by_role("region", name="Table of runs")
    expect(table).to_have_css("mask-image", re.compile("gradient"))
    expect(out).to_have_text(re.compile("[1-9] more columns? →"))
    name = page.locator("tr[data-status] td.name").first
    before = name.bounding_box()
    while out.is_visible():
        out.click()
        page.wait_for_timeout(400)
    edges = [each.bounding_box() for each in (page.locator("th[data-column=created]"), table, name)]
    assert all(edges)
    ends = [box["x"] + box["width"] for box in edges if box]
    assert ends[0] <= ends[1] + 1
    assert before
    assert edges[2]["x"] == before["x"]
    expect(table).to_have_css("mask-image", "none")
    head = page.locator("th[data-column=name]")
    assert head.evaluate(
        "th => { scrollTo(0, 0); const { x, y } = th.getBoundingClientRect();"
        " return document.elementFromPoint(x + 12, y + 12).closest('th') === th }"
    )
    expect(page.locator(".band div").first).to_be_in_viewport()


def test_every_table_that_goes_on_fades_at_its_edge(many: Run, page: Page) -> None:
    """A table that continues beyond its edge fades there, the table of groups too."""
    page.set_viewport_size({"width": 700, "height": 900})
    page.goto("/runs?group=batch_size")
    table = page.get_by_role("region", name="Table of groups")
    expect(table).to_have_css("mask-image", re.compile("gradient"))
    expect(table.locator("td").last).to_have_css("padding-top", "4px")
    table.evaluate("box => { box.scrollLeft = box.scrollWidth }")
    expect(table).to_have_css("mask-image", "none")
    expect(table.get_by_role("columnheader", name="batch_size").first).to_be_in_viewport(ratio=1)


def test_names_have_the_room_of_bars_that_no_run_has(
    database: Database, ada: User, offered: None, page: Page
) -> None:
    """Names of ended runs use the space of the progress bars."""
    name = "batch_size=64, learning_rate=0.001"
    with database.writing() as session:
        run_control.cancel(session, submit(database, ada, name=name).id, ada)
    page.set_viewport_size(DESK)
    page.goto("/runs")
    step = page.locator("th[data-column=step]").bounding_box()
    assert step
    assert step["width"] <= 100
    parts = page.locator("td.name .run-name span")
    assert page.locator("td.name .run-name").text_content() == name
    assert parts.evaluate_all("all => all.every((one) => one.scrollWidth <= one.clientWidth + 1)")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_list_never_scrolls_sideways(many: Run, page: Page, width: int) -> None:
    """Neither page nor table with default columns scrolls sideways, and nothing is cut."""
    page.set_viewport_size({"width": width, "height": 900})
    for address in ("/runs", "/runs?view=charts", "/runs?filter=digits"):
        page.goto(address)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, address
        inner, outer = page.evaluate(
            "[document.querySelector('.runs'), document.querySelector('.list-card')]"
            ".map((each) => each.getBoundingClientRect().right)"
        )
        assert inner <= outer, address


def test_five_runs_stand_on_a_phone(many: Run, page: Page) -> None:
    """On a phone five runs fit as cards above the figures."""
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto("/runs")
    rail = page.locator(".rail").bounding_box()
    boxes = [row.bounding_box() for row in page.locator("tr[data-status]").all()]
    assert rail
    assert sum(1 for box in boxes if box and box["y"] + box["height"] <= rail["y"]) >= 5
    name, status = (
        page.locator(f"tr[data-status] {cell}").first.bounding_box()
        for cell in ("td.name a", ".status")
    )
    assert name
    assert status
    assert name["x"] + name["width"] <= status["x"]


@pytest.mark.journey
def test_facts_of_the_header_are_filters_and_live(
    database: Database, ada: User, many: Run, page: Page
) -> None:
    """The header counts running, queued and failed runs live."""
    page.goto("/runs")
    facts = page.get_by_role("navigation", name="Quick filters")
    expect(facts).to_contain_text("1 running")
    expect(facts).to_contain_text("1 queued")
    expect(facts).to_contain_text("1 of 1 device in use")
    page.evaluate(WATCH_SHIFTS)
    record(database, many, make_steps([1.0], first=4))
    expect(page.locator("tr[data-key='1'] .loss")).to_contain_text("1")
    shifts = page.evaluate("window.shifts")
    assert shifts == [], "\n".join(map(str, shifts))
    with database.writing() as session:
        queue.end(session, 1, 1, Status.FAILED, error="ValueError: no")
    expect(facts).to_contain_text("1 need attention")
    expect(page.locator(".band")).to_have_text(["Active · 1", "Ended · 59"])
    facts.get_by_role("link", name="need attention").click()
    expect(page.locator("tr[data-status]")).to_have_count(1)
    expect(page.locator(".chip")).to_have_text(["status attention", "since 7d"])


def test_words_of_the_filter_are_chips(many: Run, page: Page) -> None:
    """A chip's × or Backspace removes a filter term; an invalid one stays in the box."""
    page.goto("/runs?filter=recipe:digits+-status:queued")
    chips = page.locator(".chip")
    expect(chips).to_have_text(["recipe digits", "not status queued"])
    page.get_by_role("link", name="Remove recipe:digits").click()
    page.wait_for_url("**/runs?filter=-status%3Aqueued")
    box = page.get_by_role("combobox", name="Filter the runs")
    box.fill("nonsense:1")
    box.press("Enter")
    expect(page.locator("mark")).to_have_text("nonsense:1")
    expect(box).to_have_value("nonsense:1")
    expect(chips).to_have_text(["not status queued"])
    box.fill("")
    box.press("Backspace")
    page.wait_for_url(re.compile(r"/runs\?*$"))
    expect(chips).to_have_count(0)
    expect(box).to_be_focused()


def test_pages_lead_on_and_back(many: Run, page: Page) -> None:
    """Each page of the list has its rows and the total."""
    page.goto("/runs")
    expect(page.locator("[data-range]")).to_have_text("1–50 of 60")
    page.get_by_role("link", name="Next").click()
    expect(page.locator("[data-range]")).to_have_text("51–60 of 60")
    expect(page.locator("tr[data-status]")).to_have_count(10)
    page.get_by_role("link", name="Previous").click()
    expect(page.locator("[data-range]")).to_have_text("1–50 of 60")
    expect(page.locator(".band")).to_have_text(["Active · 2", "Ended · 58"])


def test_all_that_match_are_selected(many: Run, page: Page) -> None:
    """Selecting all matches includes other pages; Cancel is offered only where it has an effect."""
    page.goto("/runs?filter=status:ended")
    page.get_by_label("Select all runs on this page").check()
    expect(page.locator("[data-ticked]")).to_have_text("50 selected")
    expect(page.get_by_role("button", name="Cancel selected")).to_be_hidden()
    page.get_by_role("button", name="Select all 58 that match").click()
    expect(page.locator("[data-ticked]")).to_have_text("58 selected")
    page.get_by_role("button", name="Tag", exact=True).click()
    page.get_by_label("Tag", exact=True).fill("old")
    page.get_by_role("button", name="Add tag").click()
    expect(page.get_by_text("Tag old added to 58 runs.")).to_be_visible()
    assert page.evaluate("scrollY") == 0  # what had the focus is gone, and the page stays
    page.get_by_role("button", name="Clear selection").click()
    expect(page.locator("[data-selection]")).to_be_hidden()
    page.goto("/runs?filter=tag:old")
    expect(page.locator("[data-range]")).to_have_text("1–50 of 58")
    page.goto("/runs?filter=status:active")
    page.get_by_label("Select all runs on this page").check()
    expect(page.get_by_role("button", name="Cancel selected")).to_be_visible()


def test_a_queued_run_is_moved_from_the_selection_bar(
    database: Database, ada: User, running: Run, page: Page
) -> None:
    """The selection bar moves a queued run if it is the only selected one."""
    for _ in range(2):
        submit(database, ada)
    page.goto("/runs")
    bar = page.locator("[data-selection]")
    page.get_by_label("Select digits-fp16, run 1", exact=True).check()
    expect(bar.get_by_role("button", name="To the front")).to_be_hidden()
    page.get_by_role("button", name="Clear selection").click()
    page.get_by_label("Select digits-fp16, run 3", exact=True).check()
    bar.get_by_role("button", name="Sooner").click()
    expect(page.locator("tr[data-key='3']")).to_contain_text("next in queue, priority 1")
    page.get_by_label("Select digits-fp16, run 2", exact=True).check()
    bar.get_by_role("button", name="To the front").click()
    expect(page.locator("tr[data-key='2']")).to_contain_text("next in queue")


def test_an_unknown_name_groups_nothing(many: Run, page: Page) -> None:
    """An unknown setting to group by is reported, and the list stays ungrouped."""
    page.goto("/runs?group=no_such_setting")
    expect(page.get_by_text("There is no setting no_such_setting")).to_be_visible()
    expect(page.locator("[data-groups]")).to_have_count(0)
    expect(page.locator("tr[data-status]")).to_have_count(50)


def color_of(page: Page, selector: str, name: str) -> str:
    """Return an element's colour, as the browser computes it."""
    script = f"(element) => getComputedStyle(element).{name}"
    return str(page.locator(selector).first.evaluate(script))


def test_the_charts_view_draws_the_selected_runs(
    database: Database, ada: User, running: Run, page: Page
) -> None:
    """Charts next to the list have the colours of list and comparison."""
    submit(database, ada)
    with database.writing() as session:
        run_control.cancel(session, 2, ada)
    for _ in range(9):
        submit(database, ada)
    record(database, running, make_steps([3.0, 2.0, 1.5]), events=[make_metric(2, 0.5)])
    page.set_viewport_size(DESK)
    page.goto("/runs")
    own = color_of(page, "tr[data-key='1'] .swatch", "backgroundColor")
    page.get_by_role("link", name="Charts").click()
    page.wait_for_url("**view=charts")
    expect(page.locator("[data-shown]")).to_have_text("10 of 11 runs")
    legend = page.locator("[data-chart-legend] li")
    expect(legend).to_have_count(10)
    page.get_by_label("Select digits-fp16, run 1", exact=True).check()
    expect(legend).to_have_count(1)
    page.wait_for_selector("[data-row=loss] .plot[data-drawn='3']")
    page.get_by_label("Select digits-fp16, run 11", exact=True).check()
    expect(legend).to_have_count(2)  # 1 and 11 have the same own colour, so that one takes another
    lines = [
        color_of(page, f"[data-chart-legend] li:nth-child({n}) .stroke", "stroke") for n in (1, 2)
    ]
    swatches = [color_of(page, f"tr[data-key='{n}'] .swatch", "backgroundColor") for n in (11, 1)]
    assert lines == swatches
    assert len({*lines}) == 2
    assert swatches[1] == own
    drawn = page.locator("[data-row=loss] .plot").evaluate("(plot) => plot.data[0].line.color")
    assert drawn == own
    left = page.locator(".list-card").bounding_box()
    assert left
    assert left["width"] == 404
    page.goto("/compare?runs=11,1")
    assert color_of(page, "svg[data-swatch='1']", "stroke") == own
    assert color_of(page, "svg[data-swatch='11']", "stroke") == swatches[0]


def test_a_sample_run_takes_one_press(database: Database, offered: None, page: Page) -> None:
    """With a worker the empty list has a button for a sample run."""
    page.goto("/runs")
    expect(page.locator(".primary:visible")).to_have_count(1)
    page.get_by_role("button", name="Start sample run").click()
    page.wait_for_url("**/runs/1")
    with database.reading() as session:
        assert session.get_one(Run, 1).precision == "fp16"


def test_the_empty_list_leads_to_a_worker_and_to_a_script(database: Database, page: Page) -> None:
    """Without a worker the empty list shows commands and creates a token in place."""
    page.goto("/runs")
    expect(page.get_by_role("button", name="Start sample run")).to_be_hidden()
    expect(page.get_by_text("halfstep worker", exact=True)).to_be_visible()
    page.get_by_role("button", name="Create token").click()
    expect(page.locator("[data-token]")).to_have_text(re.compile("^hs_"))
    expect(page.get_by_role("button", name="Copy token")).to_be_focused()
    offer_digits(database)
    expect(page.get_by_role("button", name="Start sample run")).to_be_visible()


def test_a_watched_run_opens_from_the_empty_list(database: Database, ada: User, page: Page) -> None:
    """The empty list opens a watched run as soon as it arrives."""
    page.goto("/runs")
    expect(page.get_by_text("Waiting for the first step")).to_be_visible()
    with database.writing() as session:
        run = Run(
            name="mine",
            source="watch",
            recipe="",
            config={},
            precision="fp16",
            owner_id=ada.id,
            position=1.0,
            status=Status.RUNNING,
            attempt=1,
            steps_total=0,
        )
        session.add(run)
    page.wait_for_url("**/runs/1")
