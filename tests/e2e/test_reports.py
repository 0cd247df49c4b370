"""Reports in a browser: written with panels and an image, live, and shared by a link."""

import base64
import re

import pytest
from playwright.sync_api import Browser, Page, expect

from db.database import Database
from db.queue import queue
from db.tables import Run, Status, User
from tests.app.conftest import start_run
from tests.browser import wait_until
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record
from tests.e2e.test_access import found_on
from tests.site import until

#: One red pixel.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
PASTE = """([type, area, content]) => {
    const bytes = Uint8Array.from(atob(content), (each) => each.charCodeAt(0))
    const transfer = new DataTransfer()
    transfer.items.add(new File([bytes], `${type}.png`, { type: 'image/png' }))
    const field = type === 'paste' ? 'clipboardData' : 'dataTransfer'
    const event = type === 'paste' ? ClipboardEvent : DragEvent
    area.dispatchEvent(new event(type, { [field]: transfer, bubbles: true, cancelable: true }))
}"""


@pytest.mark.journey
def test_a_report_is_written_drawn_live_and_shared(
    page: Page, chromium: Browser, database: Database, ada: User, offered: None
) -> None:
    """Selected runs become a panel, images are added by button, paste and drop, and a guest sees
    the same.
    """
    ended, live = (start_run(database, ada, name=name) for name in ("first", "second"))
    for run in (ended, live):
        events = [make_metric(step, step / 20, "val/accuracy") for step in (10, 20)]
        record(database, run, make_steps([2.0] * 20), events=events)
    with database.writing() as session:
        queue.end(session, ended.id, 1, Status.FINISHED)

    page.goto("/runs")
    for name in ("first", "second"):
        page.get_by_role("checkbox", name=re.compile(f"Select {name}")).check()
    page.get_by_role("link", name="Add to report").click()
    page.get_by_label("Title").first.fill("Two runs")
    page.get_by_label("Metrics or columns").fill("loss, val/accuracy")
    page.get_by_role("button", name="Add panel").click()
    page.wait_for_url("**/reports/1/edit")

    text = page.get_by_label("Text")
    expect(text).to_have_value(re.compile("^```panel\nruns: .*\nmetrics: loss, val/accuracy\n```"))
    text.press("Control+Home")
    for way in ("paste", "drop"):
        page.evaluate(PASTE, [way, text.element_handle(), PNG])
        expect(text).to_have_value(re.compile(rf"!\[{way}\]\(/reports/1/images/1\)"))
    wrong = {"name": "a.svg", "mimeType": "image/svg+xml", "buffer": b"<svg/>"}
    page.locator("input[type=file]").set_input_files([wrong])  # type: ignore[list-item]
    expect(page.get_by_role("status").get_by_text("allowed: PNG, JPEG")).to_be_visible()
    right = {"name": "b.png", "mimeType": "image/png", "buffer": base64.b64decode(PNG)}
    page.locator("input[type=file]").set_input_files([right])  # type: ignore[list-item]
    expect(text).to_have_value(re.compile(r"!\[b\]\(/reports/1/images/1\)"))
    assert "\n".join(found_on(page)) == ""
    page.get_by_role("radio", name="Table of runs").check()
    page.get_by_label("Run IDs").fill(f"{ended.id}, {live.id}")
    page.get_by_label("Metrics or columns").fill("loss, step")
    page.get_by_role("button", name="Insert panel").click()
    preview = page.get_by_role("region", name="Preview")
    expect(preview.get_by_role("table")).to_be_visible()
    expect(text).to_be_focused()
    page.keyboard.type("\n**bold words** <i>not</i>")
    expect(preview.locator("strong")).to_have_text("bold words")
    expect(preview.get_by_text("<i>not</i>")).to_be_visible()
    expect(text).to_be_focused()
    chart = preview.locator("[data-row=loss] .plot")
    expect(chart).to_have_attribute("data-drawn", "40")
    expect(chart.locator("[data-static-chart]")).to_have_count(0)
    table = preview.get_by_role("table").element_handle()
    page.keyboard.type(" more")
    expect(preview.get_by_text("not</i> more")).to_be_visible()
    assert table.evaluate("e => e.isConnected"), "what did not change stays"
    expect(chart).to_have_attribute("data-drawn", "40")
    for width in (1440, 1024, 390):
        page.set_viewport_size({"width": width, "height": 900})
        boxes = [each.bounding_box() for each in (text, preview)]
        assert (boxes[1]["x"] > boxes[0]["x"] + 100) == (width > 820)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.wait_for_load_state()  # the key is a script's
    page.get_by_label("Text").press("Control+Enter")
    page.wait_for_url("**/reports/1")

    expect(page.locator("[data-row=loss] .plot")).to_have_attribute("data-drawn", "40")
    record(database, live, make_steps([1.0] * 10, first=21))
    expect(page.locator("[data-row=loss] .plot")).to_have_attribute("data-drawn", "50")
    row = page.locator("[data-report-table] tr[data-key=loss]")
    expect(row).to_contain_text("1")
    assert page.locator("article img").evaluate_all("all => all.every((i) => i.naturalWidth)")
    for width in (1440, 1024, 390):
        page.set_viewport_size({"width": width, "height": 900})
        until(lambda width=width: page.evaluate("document.documentElement.scrollWidth") <= width)
    assert "\n".join(found_on(page)) == ""
    page.set_viewport_size({"width": 1280, "height": 900})

    page.reload()  # what was unfolded is folded again
    page.get_by_text("Share…").click()
    page.get_by_role("button", name="Create link").click()
    guest = chromium.new_context().new_page()
    guest.goto(page.locator("code.secret").inner_text())
    guest.wait_for_url("**/shared/*")
    expect(guest.locator("[data-row=loss] .plot")).to_have_attribute("data-drawn", "50")
    assert guest.locator("article img").evaluate_all("all => all.every((i) => i.naturalWidth)")
    assert "\n".join(found_on(guest)) == ""
    guest.context.close()

    page.goto("/reports/1")
    page.get_by_role("button", name="More actions").click()
    page.get_by_role("button", name="Move to trash…").click()
    page.get_by_role("dialog").get_by_role("button", name="Move to trash").click()
    expect(page.get_by_text("No reports yet")).to_be_visible()


def test_a_report_is_read_without_scripts(
    page: Page, chromium: Browser, database: Database, running: Run, site_address: str
) -> None:
    """Without scripts charts are the server's images, and legend and tables are text.

    With scripts they are live; either marks a loss that is not finite.
    """
    record(database, running, make_steps([2.0] * 19 + [float("nan")]))
    block = f"```panel\nruns: {running.id}\nmetrics: loss\n```\n\n```runs\nruns: {running.id}\n```"
    body = {"title": "Plain", "text": block}
    page.goto("/runs")
    token = page.locator("meta[name=csrf-token]").get_attribute("content")
    made = page.request.post("/api/v1/reports", data=body, headers={"x-csrf-token": str(token)})
    assert made.status == 201
    plain = chromium.new_context(
        base_url=site_address, java_script_enabled=False, storage_state=page.context.storage_state()
    ).new_page()
    plain.goto("/reports/1")
    image = plain.locator("[data-static-chart]")
    expect(image).to_be_visible()
    expect(plain.get_by_role("link", name=running.name).first).to_be_visible()
    expect(plain.get_by_role("row", name="Last loss")).to_be_visible()
    source = image.get_attribute("src")
    assert "✕" in page.request.get(str(source)).text()
    plain.context.close()
    page.goto("/reports/1")
    expect(page.locator("[data-row=loss] [data-pointed]")).to_have_text("✕ NaN")


def test_an_image_is_added_to_the_note_of_a_project(page: Page) -> None:
    """The note editor's button adds an image, which the projects page shows."""
    page.goto("/notes?project=")
    picture = {
        "name": "loss curve.png",
        "mimeType": "image/png",
        "buffer": base64.b64decode(PNG),
    }
    page.locator("input[type=file]").set_input_files([picture])  # type: ignore[list-item]
    expect(page.get_by_label("Note")).to_have_value(
        re.compile(r"!\[loss curve\]\(/api/v1/artifact-versions/1/files/\w+\.png\)")
    )
    page.get_by_role("button", name="Save").click()
    page.wait_for_url("**/projects")
    wait_until(page, "document.querySelector('.note img')?.naturalWidth === 1")


#: The editor's message about unsaved text.
DRAFT = "Draft, kept in this browser"


def test_a_report_is_created_in_one_step_and_keeps_a_draft(page: Page) -> None:
    """A new report's title can be typed at once; a draft survives a closed tab, and readers see
    the saved text.
    """
    page.goto("/reports")
    page.get_by_role("button", name="New report").click()
    page.wait_for_url("**/reports/1/edit")
    state = page.locator("[data-save-state]")
    title, text = page.get_by_label("Title").first, page.locator("#report-text")
    expect(title).to_have_value("Untitled report")
    until(lambda: title.evaluate("e => e.selectionEnd") == len("Untitled report"))
    page.keyboard.type("Found")
    expect(state).to_have_text(DRAFT)
    text.press_sequentially("First words.")
    page.close(run_before_unload=True)
    page = page.context.new_page()
    page.goto("/reports/1")
    expect(page.get_by_role("heading", name="Empty report")).to_be_visible()
    page.goto("/reports/1/edit")
    expect(text := page.locator("#report-text")).to_have_value("First words.")
    expect(page.get_by_role("heading", level=1)).to_have_text("Found")
    expect(page.locator("[data-save-state]")).to_have_text(DRAFT)
    expect(page.get_by_role("region", name="Preview")).to_contain_text("First words.")
    assert "\n".join(found_on(page)) == ""
    text.press("Control+Enter")
    page.wait_for_url("**/reports/1")
    expect(page.get_by_text("First words.")).to_be_visible()


def test_a_draft_ends_when_it_is_saved_or_taken_back(page: Page) -> None:
    """After saving, whitespace at the end or another user's edit does not make a draft."""
    page.goto("/reports")
    page.get_by_role("button", name="New report").click()
    text, state = page.locator("#report-text"), page.locator("[data-save-state]")
    expect(state).to_have_text("Saved")  # the script has selected the title
    text.press_sequentially("Words\n")
    text.press("Control+Enter")
    page.wait_for_url("**/reports/1")
    token = page.locator("meta[name=csrf-token]").get_attribute("content")
    theirs = {"title": "Theirs", "text": "Their words", "version": 2}
    page.request.put("/api/v1/reports/1", data=theirs, headers={"x-csrf-token": str(token)})
    page.goto("/reports/1/edit")
    expect(state).to_have_text("Saved")
    expect(page.get_by_role("button", name="Restore")).to_be_hidden()
    text.press("Control+End")
    page.keyboard.type("!")
    expect(state).to_have_text(DRAFT)
    page.keyboard.press("Backspace")
    expect(state).to_have_text("Saved")
    page.reload()
    expect(text).to_have_value("Their words")
    expect(state).to_have_text("Saved")


def test_refused_text_is_kept_in_the_browser(page: Page) -> None:
    """A refused text is explained, and still in the editor when it is opened again."""
    page.goto("/reports")
    page.get_by_role("button", name="New report").click()
    text, state = page.locator("#report-text"), page.locator("[data-save-state]")
    expect(state).to_have_text("Saved")
    typed = "Words\n\n```panel\nruns: 1\nsmoothing: none\n```"
    text.fill(typed)
    page.get_by_role("button", name="Save").click()
    expect(state).to_have_text(re.compile("^Not saved: panel 1: smoothing: 'none' is not valid"))
    expect(state).to_have_attribute("data-failed", "")
    page.goto("/reports")
    page.goto("/reports/1/edit")
    expect(text).to_have_value(typed)
    expect(state).to_have_text(DRAFT)


def test_two_editors_do_not_overwrite_each_other(page: Page) -> None:
    """Of two editors the later one gets a message with both texts."""
    page.goto("/reports")
    page.get_by_role("button", name="New report").click()
    token = page.locator("meta[name=csrf-token]").get_attribute("content")
    theirs = {"title": "Theirs", "text": "Their words", "version": 1}
    answer = page.request.put(
        "/api/v1/reports/1", data=theirs, headers={"x-csrf-token": str(token)}
    )
    assert answer.ok
    page.locator("#report-text").press_sequentially("My words")
    state = page.locator("[data-save-state]")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("region", name="Saved text")).to_have_text("Saved textTheir words")
    text = page.locator("#report-text")
    expect(text).to_have_value("My words")
    text.press_sequentially("!")
    page.goto("/reports/1")
    expect(page.get_by_text("Their words")).to_be_visible()
    page.goto("/reports/1/edit")
    page.get_by_role("button", name="Restore").click()
    expect(text).to_have_value("My words!")
    page.get_by_role("button", name="Save").click()
    expect(state).to_have_text(re.compile("^Not saved: This was changed"))
    page.get_by_role("button", name="Save").click()
    page.wait_for_url("**/reports/1")
    expect(page.get_by_text("My words")).to_be_visible()


def test_panels_are_chosen_by_clicking_and_by_keyboard(
    page: Page, database: Database, running: Run
) -> None:
    """Runs are selected, metrics searched, and the panel is inserted after the cursor's line."""
    events = [make_metric(step, step / 20, "val/accuracy") for step in (10, 20)]
    record(database, running, make_steps([2.0] * 20), events=events)
    page.goto("/reports")
    page.get_by_role("button", name="New report").click()
    picker = page.get_by_role("complementary", name="Add a panel")
    expect(picker.get_by_text("Choose a run above.")).to_be_visible()
    picker.get_by_role("checkbox", name=running.name).check()
    picker.get_by_placeholder("Find a metric").press_sequentially("accu")
    expect(picker.get_by_role("group", name="Charts").get_by_role("button")).to_have_count(1)
    page.keyboard.press("Enter")
    text = page.locator("#report-text")
    chart = f"```panel\nruns: {running.id}\nmetrics: val/accuracy\n```\n"
    expect(text).to_have_value(chart)
    preview = page.get_by_role("region", name="Preview")
    expect(preview.locator("[data-row='val/accuracy']")).to_be_visible()
    picker.get_by_placeholder("Find a metric").fill("")
    picker.get_by_role("button", name="Table of runs").click()
    expect(text).to_have_value(re.compile(f"{chart}.*```runs\nruns: {running.id}\n```", re.S))
    expect(preview.get_by_role("table")).to_be_visible()
    picker.get_by_placeholder("Find a run").fill("no such run")
    expect(picker.get_by_role("checkbox")).to_have_count(1)  # what is chosen stays
    expect(page.locator("[data-save-state]")).to_have_text(DRAFT)
    assert "\n".join(found_on(page)) == ""
    for width in (1440, 1024, 390):
        page.set_viewport_size({"width": width, "height": 900})
        boxes = [each.bounding_box() for each in (text, preview, picker)]
        written, drawn, picked = boxes
        assert written
        assert drawn
        assert picked
        if width > 1180:
            assert written["x"] < drawn["x"] < picked["x"]
            assert picked["width"] == 272
        elif width > 820:
            assert written["x"] < drawn["x"]
            assert written["y"] < picked["y"]
        else:
            assert written["y"] < picked["y"] < drawn["y"]
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_report_without_text_invites_to_write(page: Page) -> None:
    """An empty report's page invites to write, without script errors."""
    page.goto("/reports")
    page.get_by_role("button", name="New report").click()
    page.wait_for_url("**/reports/1/edit")
    page.goto("/reports/1")
    expect(page.get_by_role("heading", name="Empty report")).to_be_visible()


def test_cancelling_leaves_a_report_as_it_was_saved(page: Page, running: Run) -> None:
    """Cancel discards a draft after a question, and leaves nothing of a new report."""
    page.goto("/reports")
    page.get_by_role("button", name="New report").first.click()
    page.wait_for_url("**/reports/1/edit")
    page.get_by_role("button", name="Cancel").click()
    page.wait_for_url("**/reports")
    expect(page.get_by_text("No reports yet")).to_be_visible()
    page.get_by_role("button", name="New report").first.click()
    page.wait_for_url("**/reports/2/edit")
    title, text = page.get_by_label("Title").first, page.locator("#report-text")
    title.fill("Findings")
    expect(page.get_by_role("heading", level=1)).to_have_text("Findings")
    page.get_by_role("button", name="Save").click()
    page.wait_for_url("**/reports/2")
    page.goto("/reports/2/edit")
    text.press_sequentially("Unwanted")
    expect(page.locator("[data-save-state]")).to_have_text(DRAFT)
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Discard").click()
    page.wait_for_url("**/reports/2")
    expect(page.get_by_role("heading", level=1)).to_have_text("Findings")
    expect(page.get_by_role("heading", name="Empty report")).to_be_visible()
    page.goto("/reports/2/edit")
    expect(page.locator("[data-save-state]")).to_have_text("Saved")
    expect(text).to_have_value("")


def test_a_panel_comes_last_unless_a_cursor_is_set(
    database: Database, ada: User, offered: None, page: Page
) -> None:
    """A panel is appended unless a cursor is set; runs of the report are listed by name."""
    run = start_run(database, ada, name="the first of many")
    record(database, run, make_steps([2.0] * 3))
    text = f"# Result\n\n```panel\nruns: {run.id}\nmetrics: loss\n```\n\nThe end."
    page.goto("/runs")
    token = page.locator("meta[name=csrf-token]").get_attribute("content")
    body = {"title": "Order", "text": text}
    page.request.post("/api/v1/reports", data=body, headers={"x-csrf-token": str(token)})
    page.goto("/reports/1/edit")
    runs = page.get_by_role("group", name="Runs")
    expect(runs.locator("label").first).to_contain_text("the first of many")
    page.get_by_role("button", name="Gradient norm", exact=True).click()
    expect(page.get_by_label("Text")).to_have_value(
        f"{text}\n\n```panel\nruns: {run.id}\nmetrics: grad_norm\n```\n"
    )
