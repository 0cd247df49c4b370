"""The list of runs in a real browser: autocomplete, order, columns and views."""

import re

from playwright.sync_api import Page, expect

from db.database import Database
from db.queue import queue, run_control
from db.tables import Run, Status, User
from tests.app.conftest import CONFIG, submit
from tests.browser import wait_until
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record


def names(page: Page) -> list[str]:
    return page.locator("tbody .name a").all_inner_texts()


def test_losses_stand_in_a_column(database: Database, ada: User, running: Run, page: Page) -> None:
    """Losses are right-aligned, with and without a sparkline."""
    record(database, running, make_steps([1.0, 0.5, 0.25]))
    submit(database, ada, name="queued")
    page.goto("/runs")
    cells = page.locator("td.loss > span")
    expect(cells).to_have_count(2)
    boxes = [cell.bounding_box() for cell in cells.all()]
    first, second = [box["x"] + box["width"] for box in boxes if box]
    assert first == second


def test_a_live_change_of_a_row_keeps_its_elements(
    database: Database, running: Run, page: Page
) -> None:
    """Live updates change texts and attributes in place, and replace cells of another structure."""
    record(database, running, make_steps([1.0]))
    page.goto("/runs")
    wait_until(page, "document.readyState === 'complete'")
    row = page.locator("tr[data-active]")
    row.locator("[data-column=step]").evaluate("cell => { window.kept = cell.lastElementChild }")
    record(database, running, make_steps([0.5, 0.25], first=2, skipped=[3]))
    expect(row.locator("[data-column=skipped]")).to_have_text("1")
    expect(row.locator(".loss > span")).to_have_text("0.25")
    assert page.evaluate("window.kept.isConnected")
    with database.writing() as session:
        queue.end(session, 1, 1, Status.FINISHED)
    expect(page.locator("tr[data-active]")).to_have_count(0)
    expect(page.locator("[data-column=step]").last).to_have_text("3 of 400")
    assert not page.evaluate("window.kept.isConnected")


def test_the_list_is_filtered_sorted_and_configured_by_keyboard(
    database: Database, ada: User, running: Run, page: Page
) -> None:
    """The list is filtered with autocomplete, sorted and configured by keyboard, and stays live."""
    record(database, running, make_steps([1.0]), events=[make_metric(1, 0.5)])
    training = CONFIG["training"] | {"batch_size": 7}
    submit(database, ada, name="small", tags="two words", config=CONFIG | {"training": training})
    page.goto("/runs")
    box = page.get_by_role("combobox", name="Filter the runs")
    box.press_sequentially("step")
    expect(page.get_by_role("option").first).to_have_text("stepnumber")
    box.fill("")
    box.press_sequentially("-sta")
    expect(page.get_by_role("option").first).to_have_text(re.compile("^-status:"))
    box.press("ArrowDown")
    expect(page.get_by_role("option", selected=True)).to_contain_text("-status:")
    box.press("Tab")
    expect(box).to_have_value("-status:")
    box.press_sequentially("fail")
    expect(page.get_by_role("option", selected=True)).to_have_text("-status:failed")
    box.press("Enter")  # finishes the word: as it is, it would be refused
    expect(box).to_have_value("-status:failed ")
    box.press_sequentially("batch_s")
    page.get_by_role("option", name="batch_size setting").click()
    box.press_sequentially(">1")
    box.press("Enter")
    page.wait_for_url("**/runs?filter=-status%3Afailed+batch_size%3E1")
    expect(page.locator("[data-total]")).to_have_text("2 runs match")

    page.get_by_role("columnheader", name="Name").get_by_role("link").press("Enter")
    expect(page.get_by_role("columnheader", name="Name")).to_have_attribute(
        "aria-sort", "descending"
    )
    assert names(page) == ["small", "digits-fp16"]
    page.get_by_role("button", name="Columns").click()
    own = page.get_by_label("Setting or metric")
    for name in ("batch_size", "val/accuracy"):
        own.fill(name)
        own.press("Enter")
    page.get_by_label("Tags", exact=True).uncheck()
    page.get_by_label("Steps/s", exact=True).check()
    page.get_by_role("button", name="val/accuracy further left").click()
    page.get_by_role("button", name="Apply", exact=True).click()
    page.wait_for_url("**columns=*")
    heads = page.locator("thead th").all_inner_texts()
    names_of = [head.strip() for head in heads]
    assert (
        names_of.index("val/accuracy") + 1
        == names_of.index("batch_size")
        > names_of.index("Steps/s")
    )
    assert "Tags" not in heads
    row = page.locator('[data-key="1"]')
    expect(row.locator('[data-column="val/accuracy"]')).to_have_text("0.5")
    record(database, running, events=[make_metric(2, 0.75)])
    expect(row.locator('[data-column="val/accuracy"]')).to_have_text("0.75")
    with database.writing() as session:
        error = "Traceback\n  line\nValueError: no such file"
        queue.end(session, 1, 1, Status.FAILED, error=error)
    expect(row.locator(".waiting")).to_have_text("ValueError: no such file")

    page.get_by_role("button", name="Save view").click()
    expect(page.get_by_label("Save this filter")).to_be_focused()
    page.get_by_label("Save this filter").fill("mine")
    page.get_by_role("button", name="Save", exact=True).click()
    tab = page.get_by_role("navigation", name="Saved views").get_by_text("mine", exact=True)
    expect(tab.locator("..")).to_have_attribute("aria-current", "page")
    assert names(page) == ["small"]
    page.get_by_role("button", name="Group").press("Enter")
    page.get_by_label("or any setting").fill("batch_size")
    page.keyboard.press("Enter")
    page.wait_for_url("**group=batch_size")
    assert names(page) == ["7"]  # the filter stays
    page.get_by_role("link", name="Steps/s").press("Enter")
    page.wait_for_url("**sort=-steps_per_second*group=batch_size")
    expect(page.locator("[data-groups]")).to_contain_text("1 Queued")
    with database.writing() as session:
        run_control.cancel(session, 2, ada)
    expect(page.locator("[data-groups]")).to_contain_text("1 Cancelled")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**training.batch_size%3D7*")
    assert names(page) == ["small"]
    box = page.get_by_role("combobox", name="Filter the runs")
    box.fill("status:fialed")
    box.press("Enter")
    expect(page.locator("mark")).to_have_text("status:fialed")
    expect(page.get_by_role("combobox", name="Filter the runs")).to_have_value("status:fialed")
