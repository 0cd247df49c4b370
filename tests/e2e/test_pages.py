"""The pages in a real browser."""

import re
from collections import Counter
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from db.database import Database
from db.queue import claims, queue, run_control
from db.runs import runs
from db.settings import Settings
from db.tables import Run, Status, User
from db.telemetry import telemetry
from halfstep.telemetry.events import Sample
from tests.app.conftest import CONFIG, CPU, DIGITS, start_run, submit
from tests.app.files.weight_uploads_api_made import offer_weights
from tests.browser import LINES, STATUS, open_menu, wait_until
from tests.db.conftest import add_worker
from tests.db.telemetry.telemetry_made import make_events, make_metric, make_steps, record
from tests.e2e.conftest import refuse_once


def _drawn(page: Page, points: int) -> None:
    page.wait_for_selector(f'[data-plot=loss][data-drawn="{points}"]')


def _line(page: Page, name: str) -> list[float | None]:
    script = f"name => {LINES}.find(t => t.name === name).y"
    found: list[float | None] = page.evaluate(script, name)
    return found


def test_form_keeps_what_was_typed_and_submits(
    database: Database,
    ada: User,
    page: Page,
) -> None:
    """A setting is found by its words; Enter starts nothing; another recipe keeps the input.

    A mistake is shown in a focused summary that links to its field, and the input stays; once
    corrected, Ctrl+Enter queues the run. The times of similar runs are next to the button.
    """
    page.goto("/workers")  # an empty list of runs would reload itself for the first one
    other = {**DIGITS, "name": "other", "title": "Other"}
    add_worker(database, "w1", [DIGITS, other], [CPU])
    finished = submit(database, ada, recipe="other", config={**CONFIG, "precision": "bf16"})
    with database.writing() as session:
        run = session.get_one(Run, finished.id)
        run.steps_per_second = 2.0
        runs.set_status(session, run, Status.FINISHED)
    page.get_by_role("link", name="New run").first.click()
    page.get_by_label("Find a setting").fill("largest clip")
    expect(page.locator("[data-found]")).to_have_text("No matching setting.")
    page.get_by_label("Find a setting").fill("BATCH examples")
    expect(page.locator("details.group .field:visible")).to_have_count(0)
    expect(page.locator("[data-found]")).to_have_text("1 found, the others are hidden")
    expect(page.get_by_label("Steps", exact=True)).to_be_visible()  # a main setting
    page.get_by_label("Find a setting").press("Enter")
    expect(page.get_by_label("Batch size")).to_be_focused()
    page.get_by_label("Batch size").fill("5000")
    page.get_by_label("Find a setting").press("Escape")
    expect(page.get_by_label("Steps", exact=True)).to_be_visible()
    page.get_by_label("Steps", exact=True).fill("120")
    page.get_by_label("Name", exact=True).fill("by hand")
    page.locator("[name=precision][value=bf16]").check()
    page.get_by_label("Name", exact=True).press("Enter")
    page.get_by_role("link", name="Other").click()
    expect(page.locator("[name=recipe]")).to_have_value("other")
    expect(page.get_by_label("Name", exact=True)).to_have_value("by hand")
    expect(page.locator("[data-cost]")).to_have_text(
        "About 1 min 0 s of training (run 1: 2 steps/s)"
    )
    expect(page.get_by_label("Batch size")).to_have_value("64")  # 5,000 is not allowed
    page.get_by_label("Batch size").fill("5000")
    page.get_by_role("button", name="Start run").click()
    expect(page.locator("[data-mistakes]")).to_be_focused()
    expect(page.locator('[id="training.batch_size-error"]')).to_contain_text("5000 is not valid")
    expect(page.get_by_label("Name", exact=True)).to_have_value("by hand")
    expect(page.locator("[name=precision][value=bf16]")).to_be_checked()
    page.locator("[data-mistakes]").get_by_role("link", name="Batch size").click()
    expect(page.get_by_label("Batch size")).to_be_focused()
    page.get_by_label("Batch size").fill("32")
    page.get_by_label("Batch size").press("Control+Enter")
    page.wait_for_url("**/runs/2")
    expect(page.locator("h1")).to_contain_text("by hand")
    with database.reading() as session:
        training = runs.get(session, 2).config["training"]
        assert (training["batch_size"], training["steps"]) == (32, 120)


def test_weights_are_uploaded_into_the_form(
    database: Database, settings: Settings, page: Page, tmp_path: Path
) -> None:
    """During an upload the run cannot be submitted; a cancelled upload leaves nothing; a file of
    another kind is not sent.
    """
    offer_weights(database)
    path = tmp_path / "net.pt"
    path.write_bytes(b"PK\x03\x04".ljust(2**20))
    (tmp_path / "net.zip").touch()
    page.goto("/runs/new?recipe=digits")
    page.locator("summary", has_text="Initial weights").click()
    box, field = page.locator("[data-upload]"), page.get_by_label("Uploaded file")
    held: list[Route] = []
    page.route("**/api/v1/uploads/*", lambda route: held.append(route))
    box.locator("[data-file]").set_input_files(path)
    expect(box.locator("[data-message]")).to_have_text("Uploading net.pt, 1 MiB.")
    page.get_by_role("button", name="Start run").click()
    expect(box.locator("[data-message]")).to_contain_text("still being uploaded")
    box.get_by_role("button", name="Stop").click()
    expect(box.locator("[data-message]")).to_have_text("net.pt was stopped; nothing was stored.")
    box.locator("[data-file]").set_input_files(tmp_path / "net.zip")
    expect(box.locator("[data-message]")).to_contain_text("allowed: .safetensors or .pt")
    page.unroute("**/api/v1/uploads/*")
    box.locator("[data-file]").set_input_files(path)
    expect(field).to_have_value(re.compile("^[0-9a-f]{64}/net.pt$"))
    assert (settings.data / "uploads" / field.input_value()).read_bytes() == path.read_bytes()
    page.get_by_role("button", name="Start run").click()
    page.wait_for_url("**/runs/1")


def test_line_grows_while_the_run_runs(
    database: Database,
    running: Run,
    page: Page,
) -> None:
    """New steps, skips and metrics appear on the page up to the end."""
    record(database, running, make_steps([3.0] * 5, skipped=[2]), events=make_events([2]))
    page.goto("/runs/1")
    _drawn(page, 5)
    expect(page.locator("[data-skip-count]")).to_have_text("1 skipped step")
    more = make_steps([2.0] * 5, first=6, skipped=[7])
    record(database, running, more, events=[*make_events([7]), make_metric(10, 0.875)])
    _drawn(page, 10)
    expect(page.locator("[data-skip-count]")).to_have_text("2 skipped steps")
    expect(page.locator('[data-fact="applied"]')).to_have_text("8")
    expect(page.locator(".skips tbody tr")).to_have_count(2)
    expect(page.locator('[data-metric="val/accuracy"]')).to_have_text("0.875")
    assert _line(page, "loss") == [3.0] * 5 + [2.0] * 5
    wait_until(  # a tick a skip in each panel
        page,
        """() => ['loss', 'scale'].every((row) => {
            const { data, layout } = document.querySelector(`[data-plot=${row}]`)
            const { path } = layout.shapes.find(({ type }) => type === 'path')
            const skipped = data.find(({ name }) => name === 'skipped').x
            return String(skipped) === '2,7' && path.split('M').length === 3
        })""",
    )
    with database.writing() as session:
        queue.end(session, 1, 1, Status.FINISHED)
    expect(page.locator(STATUS)).to_have_text("Finished")
    expect(page.get_by_role("button", name="Pause")).to_be_hidden()


def test_steps_that_run_again_replace_their_points(
    database: Database,
    running: Run,
    page: Page,
) -> None:
    """After a resume from step 3 the line has the new attempt's points from step 4 on."""
    record(database, running, make_steps([3.0] * 6))
    page.goto("/runs/1")
    _drawn(page, 6)
    with database.writing() as session:
        queue.end(session, 1, 1, Status.QUEUED)
        again = claims.claim(
            session,
            1,
            recipes=["digits"],
            precisions=["fp16"],
            free_devices=[0],
            lease_seconds=60.0,
        )
        assert again is not None
        # Together with its first steps, as the recorder does: viewers see both or none.
        queue.start(session, 1, again.attempt, resumed_step=3)
        flush = telemetry.Flush(steps=[make_steps([1.0] * 4, first=4)])
        telemetry.record(session, 1, again.attempt, flush)
    _drawn(page, 7)
    assert _line(page, "loss") == [3.0] * 3 + [1.0] * 4
    resumed = f"{LINES}.find((t) => t.name === 'resumed').text"
    assert page.evaluate(resumed) == ["attempt 2, after step 3"]
    page.reload()
    _drawn(page, 7)
    assert page.evaluate(resumed) == ["attempt 2, after step 3"]


def test_chart_fits_a_resized_window(database: Database, running: Run, page: Page) -> None:
    """A chart without new data follows the window's width, and keeps its height."""
    record(database, running, make_steps([1.0] * 9))
    page.goto("/runs/1")
    _drawn(page, 9)
    picture = page.locator("[data-plot] .main-svg").first
    before = picture.bounding_box()
    page.set_viewport_size({"width": 700, "height": 900})
    inner = page.evaluate("document.querySelector('[data-plot]').clientWidth")
    expect(picture).to_have_css("width", f"{inner}px")
    after = picture.bounding_box()
    assert before is not None
    assert after is not None
    assert after["height"] == before["height"]


@pytest.mark.journey
def test_zoom_survives_updates_reload_and_a_lost_connection(
    database: Database,
    running: Run,
    page: Page,
) -> None:
    """The zoom is in the URL, and data missed during an outage are fetched afterwards."""
    record(database, running, make_steps([2.0] * 20))
    page.goto("/runs/1?range=5,10&loss=log")
    _drawn(page, 20)
    record(database, running, make_steps([2.0] * 5, first=21))
    _drawn(page, 25)
    page.context.set_offline(True)
    page.evaluate("window.dispatchEvent(new Event('offline'))")
    record(database, running, make_steps([2.0] * 5, first=26))
    page.context.set_offline(False)
    _drawn(page, 30)
    assert page.evaluate("document.querySelector('[data-plot]').layout.xaxis.range") == [5, 10]
    page.reload()
    _drawn(page, 30)
    assert page.evaluate("document.querySelector('[data-plot]').layout.xaxis.range") == [5, 10]
    expect(page.locator("[data-view=loss][value=log]")).to_be_checked()
    page.get_by_role("button", name="Reset zoom").click()
    page.wait_for_url("**/runs/1?ylog=loss")


def test_values_that_are_not_finite_are_marked(
    database: Database,
    running: Run,
    page: Page,
) -> None:
    """Non-finite values are marked in each panel, with a sign in its legend, and shown at the
    crosshair.
    """
    nan, inf = float("nan"), float("inf")
    steps = make_steps([1.0, nan, 1.0, inf, 1.0])
    steps["grad_norm"][2] = steps["grad_norm_clipped"][2] = inf
    events = [make_metric(step, value, "a/x") for step, value in ((1, 1.0), (3, -inf), (5, nan))]
    record(database, running, steps, events=events)
    page.goto("/runs/1")
    _drawn(page, 5)
    assert _line(page, "loss") == [1.0, None, 1.0, None, 1.0]
    signs = {"loss": ["✕NaN", "▲∞"], "norm": ["▲∞"], "a/x": ["✕NaN", "▼−∞"]}
    for row, texts in signs.items():
        panel = page.locator(f"[data-row='{row}']")
        panel.scroll_into_view_if_needed()
        expect(panel.locator(".sign")).to_have_text(texts)
    loss = page.locator("[data-row=loss]")
    loss.scroll_into_view_if_needed()
    expect(loss.locator("b").first).to_have_text("1")
    layout = "document.querySelector('[data-plot=loss]')._fullLayout.xaxis"
    left, length = page.evaluate(f"[{layout}._offset, {layout}._length]")
    for step, text in ((2, "NaN"), (4, "∞"), (5, "1")):
        at = {"x": left + length * (step - 1) / 4 - (step == 5), "y": 60}
        loss.locator(".plot").hover(position=at)
        expect(loss.locator("b").first).to_have_text(text)
    flag = page.locator("[data-row=loss] .crosshair b")
    loss.locator(".plot").hover(position={"x": left + length / 4, "y": 60})
    expect(flag).to_have_text("step 2 · loss NaN at step 2")
    record(database, running, make_steps([nan], first=6))
    expect(loss.locator("b").first).to_have_text("NaN")
    page.goto("/compare?runs=1&draw=loss&draw=a/x")
    for row, text in (("loss", "✕ NaN · ▲ ∞"), ("a/x", "✕ NaN · ▼ −∞")):
        expect(page.locator(f"[data-row='{row}'] [data-pointed]")).to_have_text(text)
    paths = f"{layout.removesuffix('._fullLayout.xaxis')}.layout.shapes.map((shape) => shape.name)"
    assert page.evaluate(paths) == ["NaN", "∞"]
    left, length = page.evaluate(f"[{layout}._offset, {layout}._length]")
    page.locator("[data-plot=loss]").hover(position={"x": left + length / 5, "y": 60})
    expect(page.locator("[data-legend] [data-figure=loss]")).to_have_text("NaN")


def test_list_follows_its_runs(
    database: Database,
    ada: User,
    offered: None,
    page: Page,
) -> None:
    """Rows change and new runs appear, and a selected row stays selected."""
    run = start_run(database, ada, name="watched")
    page.goto("/runs")
    page.get_by_label("Select watched").check()
    record(database, run, make_steps([3.0, 2.0, 1.0]))
    row = page.locator('tr[data-key="1"]')
    expect(row.locator("[data-column=step]")).to_have_attribute("title", "Step 3 / 400")
    expect(page.get_by_label("Select watched")).to_be_checked()
    with database.writing() as session:
        queue.end(session, 1, 1, Status.FAILED, error="ValueError")
    start_run(database, ada, name="newer")
    expect(page.locator('tr[data-key="2"]')).to_contain_text("newer")
    expect(row).to_contain_text("Failed")


def test_the_list_fetches_a_missed_run(
    database: Database, ada: User, offered: None, page: Page
) -> None:
    """If the list cannot be fetched when a run is added, it is fetched a little later."""
    page.goto("/workers")  # the empty list would reload itself
    start_run(database, ada)
    page.goto("/runs")
    refused = refuse_once(page, "**/runs?current=*")
    submit(database, ada)
    expect(page.locator('[data-key="2"]')).to_contain_text("next")
    assert len(refused) == 1


def test_row_updates_leave_a_focused_cell(
    database: Database, ada: User, running: Run, page: Page
) -> None:
    """A focused button keeps the focus while other cells and rows are updated."""
    for _ in range(2):
        submit(database, ada)
    page.goto("/runs")
    button = page.get_by_role("button", name="Raise the priority of run 3")
    button.focus()
    with database.writing() as session:
        run_control.move_to_front(session, 3, ada)
    expect(page.locator('[data-key="2"]')).to_contain_text("#2 in the queue")
    expect(button).to_be_focused()
    with database.writing() as session:
        run_control.cancel(session, 3, ada)
    third = page.locator('[data-key="3"]')
    expect(third.locator(".status")).to_have_text("Cancelled")
    expect(button).to_be_focused()
    button.blur()
    expect(button).to_have_count(0)
    expect(third).to_contain_text("0 of 400")


def test_cancel_stays_on_the_page(
    database: Database,
    running: Run,
    page: Page,
) -> None:
    """A cancel is requested and followed on the page without a reload."""
    page.goto("/runs/1?x=time")
    open_menu(page)
    page.get_by_role("button", name="Cancel run").click()
    expect(page.locator(STATUS)).to_have_text("Stopping")
    assert page.url.endswith("?x=time")


@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_their_width(
    database: Database,
    running: Run,
    page: Page,
    width: int,
) -> None:
    """No page scrolls sideways, on desktop or phone."""
    record(database, running, make_steps([1.0] * 9, skipped=[3]), events=make_events([3]))
    page.set_viewport_size({"width": width, "height": 800})
    page.goto("/runs/1")
    open_menu(page)
    page.get_by_text("Run in other precisions…").click()
    page.get_by_label("Seeds").fill("1")
    page.get_by_role("button", name="Queue runs").click()
    page.wait_for_url("**/groups/2")
    for path in (
        "/runs",
        "/runs/new",
        "/runs/1",
        "/groups/2",
        "/compare?runs=1,2&settings=all&across=precision",
        f"/compare?runs={','.join(map(str, range(1, 12)))}",
        "/workers",
        "/recipes",
        "/recipes/digits",
        "/alerts",
        "/account",
        "/people",
        "/projects",
        "/audit",
        "/api/v1/docs",
    ):
        page.goto(path)
        overflow = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert overflow <= 0, path
        if path == "/recipes/digits":
            settings = page.get_by_role("region", name="Settings of")
            assert settings.evaluate("e => e.scrollWidth - e.clientWidth") == 0


def test_the_queue_is_reordered_from_the_list(
    database: Database, ada: User, running: Run, page: Page
) -> None:
    """A queued run's buttons work in a row that arrived live."""
    page.goto("/runs")
    for _ in range(2):
        submit(database, ada)
    third = page.locator('[data-key="3"]')
    expect(third).to_contain_text("#2 in the queue")
    third.get_by_role("button", name="Move run 3 to the front").click()
    expect(third).to_contain_text("next")
    expect(page.locator('[data-key="2"]')).to_contain_text("#2 in the queue")
    page.get_by_role("button", name="Raise the priority of run 2").click()
    expect(page.locator('[data-key="2"]')).to_contain_text("priority 1")
    expect(third).to_contain_text("#2 in the queue")


def test_the_machine_is_drawn_when_visible(database: Database, running: Run, page: Page) -> None:
    """The machine's utilization is fetched when its tab is shown, and drawn from two samples on."""
    sample = {"device": -1, "elapsed_ms": 2000, "utilization": 0.5, "memory_bytes": 2**30}
    with database.writing() as session:
        flush = telemetry.Flush(
            samples=[Sample(**sample, power_watts=None, temperature_celsius=None)]
        )
        telemetry.record(session, 1, 1, flush)
    page.clock.install()
    page.goto("/runs/1")
    with page.expect_response("**/runs/1/system"):
        page.locator("#system").scroll_into_view_if_needed()
    expect(page.locator("#system")).to_contain_text("A chart needs two samples.")
    expect(page.locator("[data-system-plot]")).to_be_hidden()
    with database.writing() as session:
        flush = telemetry.Flush(
            samples=[
                Sample(**sample | {"elapsed_ms": 4000}, power_watts=None, temperature_celsius=None)
            ]
        )
        telemetry.record(session, 1, 1, flush)
    record(database, running, make_steps([1.0]))
    expect(page.locator('[data-fact="step"]')).to_have_text("1")  # news that comes in the pause
    page.locator("#system").scroll_into_view_if_needed()  # the charts of steps have moved it
    page.clock.fast_forward(5000)
    page.wait_for_selector('[data-system-plot][data-drawn="2"]')


@pytest.mark.parametrize("width", [1280, 390])
def test_a_long_name_without_a_space_is_broken(
    database: Database, ada: User, offered: None, page: Page, width: int
) -> None:
    """A long name without spaces moves no column, and makes no page wider than the screen."""
    page.set_viewport_size({"width": width, "height": 800})
    page.goto("/workers")  # the empty list would reload itself
    start_run(database, ada, name="short")
    page.goto("/runs")
    column = page.locator("th", has_text="Created")
    before = column.evaluate("cell => cell.offsetLeft")
    start_run(database, ada, name="x" * 100, tags=f"{'y' * 99},{'z' * 99}")
    page.goto("/runs")
    assert column.evaluate("cell => cell.offsetLeft") - before < 200
    page.goto("/runs/2")
    expect(page.get_by_role("heading", level=1)).to_contain_text("xxx")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_no_figure_of_a_run_is_left_over(database: Database, running: Run, page: Page) -> None:
    """A run's figures fill complete rows at any width, and a loss is separate from its line."""
    record(database, running, make_steps([0.0012345 + 1e-4 / step for step in range(1, 9)]))
    page.goto("/runs")
    apart = """row => row.querySelector('.loss span').getBoundingClientRect().left
        - row.querySelector('.sparkline').getBoundingClientRect().right"""
    assert page.locator("tr:has(.sparkline)").evaluate(apart) >= 8
    page.goto("/runs/1")
    for width in (1400, 1280, 1200, 1080, 1000, 700):
        page.set_viewport_size({"width": width, "height": 900})
        tops = page.eval_on_selector_all(
            ".fact:not(.lead)", "all => all.map(each => each.getBoundingClientRect().top)"
        )
        assert 1 not in Counter(tops).values(), (width, tops)
