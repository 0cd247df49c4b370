"""Elements under the pointer do not move when updates arrive."""

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from db.database import Database
from db.files import checkpoints
from db.queue import queue, run_control, workers
from db.settings import Settings
from db.tables import Run, Status, User
from tests.app.conftest import CONFIG, offer_digits, start_run, submit
from tests.browser import STATUS, open_tab, wait_until
from tests.db.telemetry.telemetry_made import (
    make_events,
    make_histogram,
    make_metric,
    make_module,
    make_steps,
    record,
)
from tests.e2e.test_artifacts import FILES, publish
from tests.site import until
from tests.spool_made import checkpoint_of

SHAPES = {
    "event": "shapes",
    "step": 0,
    "count": 1,
    "layers": ["model.0 (10 to 60)"],
    "share": 0.5,
    "batch_size": 64,
}
NOTE_CLICKS = """() => document.addEventListener('click', (event) => {
    event.preventDefault()
    window.clicked = event.target.getAttribute('href')
})"""
WATCH_SHIFTS = """() => {
    window.shifts = []
    new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) {
            if (entry.hadRecentInput) continue
            const sources = entry.sources.flatMap(({ node, previousRect: a, currentRect: b }) => {
                if (node?.parentElement?.closest('.checkpoints')) return []
                const what = node?.outerHTML ?? node?.parentElement?.outerHTML ?? 'gone'
                return [what.slice(0, 80), a.x, a.y, b.x, b.y].join(' ')
            })
            if (sources.length) window.shifts.push([entry.value, ...sources])
        }
    }).observe({ type: 'layout-shift' })
}"""


@pytest.fixture
def running(database: Database, ada: User, offered: None) -> Run:
    """A run that will have histograms."""
    return start_run(database, ada, config={**CONFIG, "diagnosis": {"histogram_every_steps": 100}})


def save(database: Database, run: Run, step: int) -> None:
    files = [
        {"kind": kind, "size_bytes": 1000, "sha256": "c0ffee" * 10}
        for kind in ("checkpoint", "weights")
    ]
    event = {"step": step, "reason": "asked", "files": files}
    with database.writing() as session:
        keys = [f"{step}.pt", f"{step}.safetensors"]
        checkpoints.publish(session, run.id, run.attempt, checkpoint_of(event), keys)


def train(settings: Settings, database: Database, run: Run, n: int) -> int:
    """Record a hundred steps with updates of every kind; return the last step."""
    first, last = 100 * n - 99, 100 * n
    skipped = [first + 3, first + 9]
    events = [
        *make_events(skipped),
        make_metric(last, 0.5 / n, "val/accuracy"),
        make_metric(last, 0.5 * n, "val/f1"),
        make_histogram(last, make_module("body", -30, [50], underflow=0.5)),
        *([SHAPES] if n == 3 else []),
    ]
    record(database, run, make_steps([3.0 / n] * 100, first=first, skipped=skipped), events=events)
    save(database, run, last)
    for name, body in FILES.items():
        publish(settings, database, run, name, body, step=last)
    return last


def centre(link: Locator) -> tuple[float, float]:
    """Return the centre of an element."""
    box = link.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def hear(page: Page) -> None:
    """Count the messages that the page's scripts have received."""
    page.add_init_script(
        """{
            const Source = window.EventSource
            window.heard = 0
            window.EventSource = class extends Source {
                set onmessage(listener) {
                    super.onmessage = (event) => { listener(event); window.heard++ }
                }
            }
        }"""
    )


def wait_for_news(page: Page, received: int) -> None:
    """Wait for a message, and for its update of the page unless that is delayed."""
    until(lambda: page.evaluate("window.heard") > received)
    page.clock.run_for(1000)


def hold_clock(page: Page) -> None:
    """Control the page's clock, because a busy machine can be seconds late."""
    page.clock.pause_at(page.evaluate("Date.now()") / 1000 + 20)


def test_a_click_works_although_updates_arrive_between_press_and_release(
    settings: Settings, database: Database, running: Run, page: Page
) -> None:
    """Growth above a pressed link waits for the click, and then happens at once."""
    hear(page)
    page.clock.install()
    record(database, running, make_steps([1.0] * 9))
    page.goto("/runs/1?tab=files")
    save(database, running, 9)
    link = page.get_by_role("link", name="Download").first
    link.scroll_into_view_if_needed()
    page.clock.run_for(1000)
    page.evaluate(NOTE_CLICKS)
    hold_clock(page)
    page.mouse.move(*centre(link))
    page.mouse.down()
    received = page.evaluate("window.heard")
    last = train(settings, database, running, 1)
    with database.writing() as session:
        queue.end(session, 1, 1, Status.FINISHED)
    wait_for_news(page, received)
    page.mouse.up()
    assert page.evaluate("window.clicked") == "/runs/1/checkpoints/1/download"
    page.clock.resume()
    expect(page.locator(STATUS)).to_have_text("Finished")
    expect(page.locator('[data-fact="step"]')).to_have_text(str(last))
    expect(page.locator(".skips tbody tr")).to_have_count(2)
    expect(page.locator("[data-metric]")).to_have_count(2)
    expect(page.locator(".findings")).to_contain_text("Gradients underflow")


def test_click_on_a_run_arrives_though_a_newer_one_comes_in_above_it(
    database: Database, ada: User, running: Run, page: Page
) -> None:
    """A new row above a pressed run waits for the click."""
    hear(page)
    page.clock.install()
    page.goto("/runs")
    link = page.locator('[data-key="1"] a').first
    hold_clock(page)
    page.mouse.move(*centre(link))
    page.mouse.down()
    for _ in range(2):
        received = page.evaluate("window.heard")
        submit(database, ada)
        wait_for_news(page, received)
    page.mouse.up()
    page.wait_for_url("**/runs/1")


def test_updates_wait_for_an_open_select_at_most_five_seconds(
    settings: Settings, database: Database, running: Run, page: Page
) -> None:
    """Updates wait for an open select for at most five seconds."""
    hear(page)
    page.clock.install()
    train(settings, database, running, 1)
    page.goto("/runs/1?tab=gradients")
    step = page.locator('[data-fact="step"]')
    hold_clock(page)
    page.get_by_label("Module").click()
    received = page.evaluate("window.heard")
    train(settings, database, running, 2)
    wait_for_news(page, received)
    expect(step).to_have_text("100")
    page.clock.run_for(5000)
    expect(step).to_have_text("200")


def test_findings_that_come_in_move_nothing(
    settings: Settings, database: Database, running: Run, page: Page
) -> None:
    """A new finding changes the number on the banner's button, and moves nothing."""
    train(settings, database, running, 1)
    page.goto("/runs/1")
    button = page.locator("[popovertarget=findings-list]")
    expect(button.get_by_text("1 finding")).to_be_visible()
    expect(button.locator(".cut")).to_be_visible()
    tab = page.locator("[data-tab=log]")
    before = centre(tab)
    train(settings, database, running, 3)
    expect(button).to_contain_text("2 findings")
    button.click()
    expect(page.locator(".findings li")).to_have_count(2)
    assert centre(tab) == before


def test_skipped_steps_begin_with_the_newest(database: Database, running: Run, page: Page) -> None:
    """A new skip is the first row, and the table does not scroll."""
    record(database, running, make_steps([1.0] * 50, skipped=range(20)))
    record(database, running, events=make_events(range(1, 20)))
    page.goto("/runs/1?tab=skips")
    first = page.locator(".skips tbody tr td").first
    expect(first).to_have_text("19")
    record(database, running, make_steps([1.0], first=51), events=make_events([51]))
    expect(first).to_have_text("51")
    assert page.locator("[data-fragment=skips]").evaluate("box => box.scrollTop") == 0


@pytest.mark.parametrize("where", [None, "Files"])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_shifts_while_a_run_runs(
    settings: Settings,
    database: Database,
    ada: User,
    offered: None,
    page: Page,
    where: str | None,
    width: int,
) -> None:
    """From queue to end the browser counts no layout shift, except for rows below a new one."""
    page.set_viewport_size({"width": width, "height": 900})
    config = {**CONFIG, "diagnosis": {"histogram_every_steps": 100}}
    page.goto("/workers")  # the empty list would follow the submission
    submit(database, ada, config=config)
    page.goto("/runs/1")
    expect(page.locator(STATUS)).to_have_text("Queued")
    page.evaluate(WATCH_SHIFTS)
    if where:
        open_tab(page, where)
    run = start_run(database, ada, config=config)
    expect(page.locator(STATUS)).to_have_text("Running")
    for n in range(1, 6):
        last = train(settings, database, run, n)
        expect(page.locator('[data-fact="step"]')).to_have_text(str(last))
        expect(page.locator(".checkpoints tbody tr")).to_have_count(2 * n)
        steps = page.locator('[data-fragment=artifacts] [data-called="steps"]')
        expect(steps).to_contain_text([str(n)])
    with database.writing() as session:
        queue.end(session, 1, 1, Status.FAILED, error="ValueError: no")
    expect(page.locator(".health")).to_contain_text("Failed")
    shifts = page.evaluate("window.shifts")
    assert shifts == [], "\n".join(map(str, shifts))


def test_the_first_run_takes_no_click_from_the_empty_list(
    database: Database, ada: User, page: Page
) -> None:
    """A run that appears while a link is pressed does not prevent the click."""
    page.goto("/runs")
    page.evaluate(NOTE_CLICKS.replace("\n}", "\n}, { once: true }"))
    choose = page.get_by_role("link", name="Choose a recipe")
    choose.hover()
    page.mouse.down()
    with page.expect_response(lambda answer: answer.url.endswith("/runs")):
        submit(database, ada)
    page.mouse.up()
    row = page.locator("tr[data-key='1']")
    expect(row).to_contain_text("Queued")
    assert page.evaluate("window.clicked") == "/runs/new"
    expect(page.locator("[data-total]")).to_have_text("1 run")
    page.keyboard.press("j")  # and leaves the link, which nothing has taken away
    expect(page.locator(".empty")).to_have_count(0)
    page.keyboard.press("x")
    expect(page.locator("[data-ticked]")).to_have_text("1 selected")
    submit(database, ada)
    expect(page.locator("tr[data-key]")).to_have_count(2)
    with database.writing() as session:
        run_control.cancel(session, 1, ada)
    expect(row).to_contain_text("Cancelled")


@pytest.mark.parametrize("width", [1280, 390])
def test_the_list_says_whether_a_worker_is_up_and_moves_nothing(
    database: Database, ada: User, page: Page, width: int
) -> None:
    """The notice about workers appears and disappears without moving the rows."""
    page.set_viewport_size({"width": width, "height": 900})
    submit(database, ada)
    page.goto("/runs")
    missing = page.get_by_text("No worker accepts runs.")
    expect(missing).to_be_visible()
    page.evaluate(WATCH_SHIFTS)
    worker_id = offer_digits(database)
    expect(page.get_by_text("Worker ready.")).to_be_visible()
    expect(missing).to_be_hidden()
    with database.writing() as session:
        workers.stop(session, worker_id)
    expect(missing).to_be_visible()
    shifts = page.evaluate("window.shifts")
    assert shifts == [], "\n".join(map(str, shifts))


def test_nothing_shifts_as_the_scripts_take_over(
    database: Database, running: Run, page: Page
) -> None:
    """The tabs have their final position before scripts mark one as selected."""
    held: list[Route] = []
    page.route("**/tabs.*", lambda route: held.append(route))
    record(database, running, make_steps([1.0] * 9))
    page.goto("/runs/1", wait_until="commit")
    tab = page.locator('[data-tab="configuration"]')
    expect(tab).to_be_visible()
    wait_until(  # a page waits for its styles before it draws, a test does not
        page,
        "() => [...document.querySelectorAll('link[rel=stylesheet]')].every((link) => link.sheet)",
    )
    page.evaluate(WATCH_SHIFTS)
    before = tab.bounding_box()
    until(lambda: bool(page.evaluate("true") and held))
    for route in held:
        route.continue_()
    expect(page.locator('[data-tab][aria-selected="true"]')).to_have_text("Charts")
    page.wait_for_selector("[data-drawn]")
    assert tab.bounding_box() == before
    shifts = page.evaluate("window.shifts")
    assert shifts == [], "\n".join(map(str, shifts))


@pytest.mark.journey
def test_servers_charts_need_no_script_and_are_replaced_without_a_shift(
    database: Database, running: Run, page: Page
) -> None:
    """The server's charts need no script, and Plotly's figures replace them without a shift.

    Labels have the same positions to a pixel.
    """
    losses = [2.0 - step / 400 for step in range(400)]
    record(
        database, running, make_steps(losses, skipped=[100, 200]), events=make_events([100, 200])
    )
    held: list[Route] = []
    page.route("**/plotly*", lambda route: held.append(route))
    page.goto("/runs/1")
    page.evaluate(WATCH_SHIFTS)
    labels = (
        "e => [...e.querySelectorAll('.static-chart span')].map(l => [l.textContent, place(l)])"
    )
    drawn = """e => [...e.querySelectorAll('.xtick text, .x2tick text, .ytick text, .y2tick text')]
        .map(l => [l.textContent.replace('\\u200b', ''), place(l)])"""
    middle = """const place = (e) => {
        const { x, y, width, height } = e.getBoundingClientRect()
        return [x + width / 2, y + height / 2]
    };"""
    until(lambda: page.evaluate("true") and bool(held))
    panels = {row: page.locator(f"[data-plot={row}]") for row in ("loss", "scale")}
    before = {
        row: panel.evaluate(f"e => {{ {middle} return ({labels})(e) }}")
        for row, panel in panels.items()
    }
    for route in held:
        route.continue_()
    page.wait_for_selector("[data-plot=scale][data-drawn]")
    expect(page.locator("[data-static-chart]")).to_have_count(0)
    assert page.evaluate("window.shifts") == []
    for row, panel in panels.items():
        after = dict(panel.evaluate(f"e => {{ {middle} return ({drawn})(e) }}"))
        compared = [(text, at, after[text]) for text, at in before[row] if text in after]
        assert len(compared) >= 6, (before[row], after)
        for text, (x, y), (new_x, new_y) in compared:
            assert abs(x - new_x) < 5, text
            assert abs(y - new_y) < 5, text

    plain = page.context.browser.new_context(  # type: ignore[union-attr]
        java_script_enabled=False, storage_state=page.context.storage_state()
    )
    without = plain.new_page()
    without.goto(page.url)
    for row in panels:
        expect(without.locator(f"[data-row={row}] .lines")).to_be_visible()
        expect(without.locator(f"[data-row={row}] .skipped-steps")).to_be_visible()
    expect(without.locator("[data-last=loss]")).to_have_text("1.0025")
    plain.close()
