"""First steps of a newcomer: search, full screen, menus by keyboard, a clone, a column."""

from playwright.sync_api import Page, expect

from db.database import Database
from db.tables import Run, User
from tests.app.conftest import start_run
from tests.browser import wait_until
from tests.db.telemetry.telemetry_made import make_metric, make_skip, make_steps, record

#: Whether the middle of an element is not covered.
IS_ON_TOP = """(element) => { const { x, y, width, height } = element.getBoundingClientRect()
    return element.contains(document.elementFromPoint(x + width / 2, y + height / 2)) }"""


def test_a_panel_in_full_screen_has_its_menu(database: Database, running: Run, page: Page) -> None:
    """In full screen a panel's menu and dialogs work by pointer and arrow keys."""
    record(database, running, make_steps([1.0] * 20))
    page.goto("/runs/1")
    page.locator("[data-plot=loss][data-drawn]").wait_for()
    full = page.get_by_role("button", name="Loss: full screen")
    full.click()
    expect(full).to_have_attribute("aria-pressed", "true")
    more = page.get_by_role("button", name="Loss: more")
    more.click()
    table = page.get_by_role("button", name="Show as table")
    assert table.evaluate(IS_ON_TOP)
    page.keyboard.press("ArrowUp")
    expect(page.get_by_role("button", name="Save as CSV")).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("button", name="Log axis")).to_be_focused()
    table.click()
    close = page.get_by_role("button", name="Close")
    assert close.evaluate(IS_ON_TOP)
    close.click()
    more.click()
    page.get_by_role("button", name="Leave full screen").click()
    expect(full).to_have_attribute("aria-pressed", "false")
    more.click()
    expect(page.get_by_role("button", name="Full screen", exact=True)).to_be_visible()
    page.keyboard.press("Escape")
    for place in ("[data-row=loss]", "[data-row=loss] [data-full]"):
        page.locator(place).focus()
        page.keyboard.press("f")
        wait_until(page, "document.fullscreenElement?.dataset.row === 'loss'")
        page.keyboard.press("f")
        wait_until(page, "document.fullscreenElement === null")


def test_the_search_finds_a_run_by_its_label_and_its_exact_name(
    database: Database, ada: User, running: Run, page: Page
) -> None:
    """A run with the exact name comes first in the search, which shows the number of matches."""
    start_run(database, ada, name="base")
    for number in range(9):
        start_run(database, ada, name=f"base {number}")
    page.goto("/runs")
    page.wait_for_selector("[role=combobox]")
    page.keyboard.press("Control+k")
    palette = page.get_by_role("dialog", name="Go to a page or a run")
    page.keyboard.type("Run 3")
    expect(palette.get_by_role("option")).to_contain_text(["base 0run 3"])
    palette.get_by_role("combobox").fill("BASE")
    expect(palette.get_by_role("option")).to_have_count(8)
    expect(palette.get_by_role("option").first).to_contain_text("baserun 2,")
    expect(palette).to_contain_text("8 of 10 found")
    page.goto("/compare?runs=1,2")  # the menu that adds runs offers others
    page.keyboard.press("Control+k")
    page.keyboard.type("base 4")
    expect(palette.get_by_role("option")).to_have_text(["base 4run 7, running"])


def test_a_filter_keeps_the_focus_and_an_added_column_is_in_sight(running: Run, page: Page) -> None:
    """An added column is scrolled into view at any width; an unknown one is refused."""
    page.set_viewport_size({"width": 1024, "height": 768})
    page.goto("/runs")
    page.wait_for_selector("[role=combobox]")
    page.keyboard.press("/")
    page.keyboard.type("status:running")
    page.keyboard.press("Enter")
    page.wait_for_url("**filter=**")
    expect(page.locator("#filter")).to_be_focused()
    page.get_by_role("button", name="Columns").click()
    own = page.get_by_role("combobox", name="Setting or metric")
    own.fill("batchsize")
    page.get_by_role("button", name="Apply", exact=True).click()
    expect(page.get_by_role("alert").last).to_contain_text("did you mean batch_size?")
    own.fill("batch_size")
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.get_by_label("batch_size", exact=True)).to_be_checked()
    page.get_by_role("button", name="Apply", exact=True).click()
    head = page.locator("thead [data-column]", has_text="batch_size")
    expect(head).to_be_in_viewport(ratio=0.98)  # but for a fraction of a pixel


def test_a_clone_is_named_for_what_was_changed(offered: None, running: Run, page: Page) -> None:
    """A clone's name follows its changed settings until the user edits it."""
    page.goto("/runs/new?from=1")
    name, rate = page.get_by_label("Name", exact=True), page.locator('[name="training.steps"]')
    own = name.input_value()
    rate.fill("7")
    expect(name).to_have_value(f"{own}, steps=7")
    name.fill("mine")
    rate.fill("8")
    expect(name).to_have_value("mine")


def test_a_skipped_step_stays_under_the_pointer(
    database: Database, running: Run, page: Page
) -> None:
    """New rows are added above a skipped step under the pointer, which does not move."""
    skips = list(range(10, 60))
    steps = make_steps([1.0] * 100, skipped=skips)
    record(database, running, steps, events=[make_skip(step) for step in skips])
    page.goto("/runs/1#skips")
    row = page.locator("tr[data-step='57']")
    row.hover()
    before = row.bounding_box()
    steps = make_steps([1.0] * 5, first=101, skipped=[102, 103])
    record(database, running, steps, events=[make_skip(step) for step in (102, 103)])
    expect(page.locator("tr[data-step='103']")).to_have_count(1)
    after = row.bounding_box()
    assert before is not None
    assert after is not None
    assert abs(after["y"] - before["y"]) < 1
    page.locator("h1").hover()
    expect(page.locator("tr[data-step='103']")).to_be_in_viewport()


def test_a_searched_metric_is_scrolled_to(database: Database, running: Run, page: Page) -> None:
    """A search scrolls to the matching panels, below the search field."""
    events = [make_metric(1, 0.5, f"unit/{number}") for number in range(20)]
    record(database, running, make_steps([1.0] * 5), events=events)
    page.set_viewport_size({"width": 1280, "height": 600})
    page.goto("/runs/1")
    page.locator("#metric-search").fill("unit/17")
    expect(page.get_by_role("region", name="unit/17")).to_be_in_viewport(ratio=0.3)


def test_a_sweep_asks_for_a_first_check_only_to_end_runs(offered: None, page: Page) -> None:
    """A sweep's field "First check" appears only with a pruner, and its settings can be
    searched.
    """
    page.goto("/sweeps/new?recipe=digits")
    expect(page.get_by_label("First check")).to_be_hidden()
    page.get_by_label("End weak runs").select_option(index=1)
    expect(page.get_by_label("First check")).to_be_visible()
    page.get_by_label("Find a setting").fill("batch")
    expect(page.locator('[name="training.batch_size"]')).to_be_visible()
    expect(page.locator('[name="training.steps"]')).to_be_hidden()


def test_a_phone_says_the_status_in_words(database: Database, running: Run, page: Page) -> None:
    """A phone shows the status as a word, and skipped steps without an inner scroll area."""
    skip = make_skip(2, "model.head.bias", optimizer="adamw")
    record(database, running, make_steps([1.0] * 60, skipped=[2]), events=[skip])
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto("/runs/1#skips")
    expect(page.locator(".fact.lead .on-a-phone")).to_be_visible()
    origin = page.locator("[data-called=origin]")
    assert origin.evaluate("(cell) => cell.scrollWidth <= cell.clientWidth")
    box = origin.bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 390
