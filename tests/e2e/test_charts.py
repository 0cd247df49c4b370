"""Charts of long runs in a real browser: merged skip marks have a count, zooms fetch more."""

import math
import re
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from db.database import Database
from db.runs import runs
from db.tables import Run, Status, User
from db.telemetry.recording import Recording
from tests.browser import LINES, open_tab
from tests.db.conftest import make_watched
from tests.db.telemetry.telemetry_made import make_events, make_metric, make_steps, record
from tests.e2e.conftest import refuse_once
from tests.site import until
from tests.spool_made import event_of

STEPS = 40_000
PLOT = "document.querySelector('[data-plot]')"
#: Notes the widths of drawings; where the page is stuck, the first never ends.
WATCH_PLOTLY = """window.widths = []
let plotly
Object.defineProperty(window, 'Plotly', {
    get: () => plotly,
    set: (value) => {
        const react = value.react
        value.react = (plot, data, layout, config) => {
            const isFirst = window.widths.push(layout.width) === 1
            const drawn = react(plot, data, layout, config)
            return isFirst && window.isStuck ? new Promise(() => {}) : drawn
        }
        plotly = value
    },
})"""
#: By the page's clock, the first drawing of each plot takes an hour.
SLOW_FIRST = """let late = 0
const [now, drawn] = [performance.now.bind(performance), new Set()]
performance.now = () => now() + late
let plotly
Object.defineProperty(window, 'Plotly', {
    get: () => plotly,
    set: (value) => {
        const react = value.react
        value.react = (plot, ...rest) => {
            if (!drawn.has(plot)) late += 3_600_000
            drawn.add(plot)
            return react(plot, ...rest)
        }
        plotly = value
    },
})"""
SKIPS = range(100, STEPS, 7)  # more than are listed one by one


@pytest.fixture
def long(database: Database, running: Run) -> None:
    """A run of 40,000 steps with a spike, where every seventh step is skipped."""
    losses = [1.0] * STEPS
    losses[12_344] = 77.0
    for first in range(0, STEPS, 10_000):
        batch = make_steps(losses[first : first + 10_000], first=first + 1, skipped=SKIPS)
        record(database, running, batch)


def _trace(page: Page, name: str) -> dict[str, Any]:
    script = f"""name => {{
        const trace = {LINES}.find((t) => t.name === name) ?? {{ x: [], y: [] }}
        return {{ x: trace.x, y: trace.y, text: trace.text }}
    }}"""
    found: dict[str, Any] = page.evaluate(script, name)
    return found


def _zoom(page: Page, first: int, last: int) -> None:
    ends = f"{{'xaxis.range[0]': {first}, 'xaxis.range[1]': {last}}}"
    page.evaluate(f"window.Plotly.relayout({PLOT}, {ends})")


def _told(page: Page) -> list[int]:
    """Return the number at each skip mark."""
    texts = _trace(page, "skipped")["text"]
    return [1 if t.startswith("step ") else int(t.split()[0].replace(",", "")) for t in texts]


def test_merged_ticks_say_how_many_they_are(long: None, page: Page) -> None:
    """Skip marks closer than a pixel are merged, with counts that add up to all skips."""
    page.goto("/runs/1")
    page.wait_for_selector("[data-drawn]")
    drawn = _told(page)
    assert len(drawn) < 1280
    assert max(drawn) > 1
    assert sum(drawn) == len(SKIPS)
    expect(page.locator("[data-skip-count]")).to_have_text(f"{len(SKIPS):,} skipped steps")
    shown = _trace(page, "skips counted")["text"]
    assert {int(text.removeprefix("×")) for text in shown} <= set(drawn)
    assert page.get_by_text(shown[0], exact=True).first.is_visible()


@pytest.mark.journey
def test_zoom_fetches_the_finer_window_and_reset_the_whole(long: None, page: Page) -> None:
    """A zoom shows raw steps and each skip; a reset shows the spike again."""
    page.goto("/runs/1")
    page.wait_for_selector("[data-drawn]")
    overview = page.get_attribute("[data-plot]", "data-drawn")
    with page.expect_response("**/series?first=20000&last=20700"):
        _zoom(page, 20_000, 20_700)
    page.wait_for_selector('[data-plot=loss][data-drawn="701"]')
    expect(page.locator("[data-point-count]")).to_have_text("701 of 701 points")
    raw = _trace(page, "loss")["x"]
    assert (raw[0], raw[-1]) == (20_000, 20_700)
    assert _told(page) == [1] * 100
    count = f"100 in view, of {len(SKIPS):,} skipped steps"
    expect(page.locator("[data-skip-count]")).to_have_text(count)
    with page.expect_response("**/series?first=20350&last=21050"):  # as dragging the axis does
        _zoom(page, 20_350, 21_050)
    until(lambda: _trace(page, "loss")["x"][-1] == 21_050)
    page.get_by_role("button", name="Reset zoom").click()
    page.wait_for_selector(f'[data-plot=loss][data-drawn="{overview}"]')
    assert 77.0 in _trace(page, "loss")["y"]


def test_applied_updates_are_exact_in_a_zoom(long: None, page: Page) -> None:
    """In a zoom, the axis of applied updates counts earlier skips as well."""
    first = 30_000
    applied = first - sum(skip <= first for skip in SKIPS)
    page.goto(f"/runs/1?x=applied&range={applied},{applied + 100}")
    page.wait_for_selector("[data-drawn]")
    assert _trace(page, "scale")["x"][0] <= applied
    points = page.evaluate("document.querySelector('[data-plot]').data[0].x")
    assert applied in points


def test_a_long_run_opens_with_few_points_and_continues_live(
    database: Database, running: Run, long: None, page: Page
) -> None:
    """Live steps continue a long run's overview, with every skip counted once."""
    page.goto("/runs/1")
    page.wait_for_selector("[data-drawn]")
    more = make_steps([2.0] * 5, first=STEPS + 1, skipped=[STEPS + 2])
    record(database, running, more, events=make_events([STEPS + 2]))
    count = len(SKIPS) + 1
    expect(page.locator("[data-skip-count]")).to_have_text(f"{count:,} skipped steps")
    until(lambda: _trace(page, "loss")["x"][-1] == STEPS + 5)
    assert sum(_told(page)) == count


def test_zoom_of_a_row_is_in_the_address(database: Database, running: Run, page: Page) -> None:
    """A row's y range survives a reload, and a reset shows all values."""
    record(database, running, make_steps([1.0, 2.0, 9.0]))
    page.goto("/runs/1")
    page.wait_for_selector("[data-drawn]")
    page.evaluate(
        "window.Plotly.relayout(document.querySelector('[data-plot]'),"
        "{'yaxis2.range[0]': 0.5, 'yaxis2.range[1]': 2.5})"
    )
    page.wait_for_url("**/runs/1?y.loss=0.5,2.5")
    page.reload()
    page.wait_for_selector("[data-drawn]")
    loss = "document.querySelector('[data-plot]')._fullLayout.yaxis2.range"
    assert page.evaluate(loss) == [0.5, 2.5]
    page.get_by_role("button", name="Reset zoom").click()
    page.wait_for_url("**/runs/1")
    until(lambda: page.evaluate(loss)[1] > 9)


def test_long_run_is_drawn_on_after_its_last_finite_loss(
    database: Database, running: Run, page: Page
) -> None:
    """If the loss stays NaN, axis, skip marks and other lines continue to the end."""
    steps, finite = 6_000, 2_000
    losses = [1.0] * finite + [math.nan] * (steps - finite)
    skipped = range(finite + 1, steps + 1, 500)
    record(database, running, make_steps(losses, skipped=skipped))
    page.goto("/runs/1")
    page.wait_for_selector("[data-drawn]")
    axis = "document.querySelector('[data-plot]')._fullLayout.xaxis.range"
    assert page.evaluate(axis) == [1, steps]
    assert _trace(page, "loss")["x"][-1] == finite
    assert _told(page) == [1] * len(skipped)
    assert _trace(page, "not finite")["x"][-1] > steps - 100
    record(database, running, make_steps([math.nan] * 5, first=steps + 1, skipped=[steps + 2]))
    until(lambda: page.evaluate(axis)[1] == steps + 5)
    assert _told(page) == [1] * (len(skipped) + 1)
    assert _trace(page, "NaN")["text"] == [f"loss NaN: 5 steps from {steps + 1:,} to {steps + 5:,}"]
    rates = page.get_by_role("region", name="Learning rate")
    rates.scroll_into_view_if_needed()
    expect(rates.locator("[data-drawn]")).to_have_count(1)
    assert _trace(page, "learning rate")["x"][-1] == steps + 5


def test_failed_requests_are_repeated(long: None, page: Page) -> None:
    """A 503 for the series only delays the chart or its zoom."""
    refused = refuse_once(page, "**/api/v1/runs/1/series*")
    page.goto("/runs/1")
    page.wait_for_selector("[data-drawn]")
    _zoom(page, 20_000, 20_700)
    page.wait_for_selector('[data-drawn="701"]')
    assert len(refused) == 2


def test_late_answer_to_a_zoom_does_not_undo_its_reset(
    database: Database, running: Run, long: None, page: Page
) -> None:
    """A late response to an earlier request does not replace the view after a reset."""
    page.goto("/runs/1")
    page.wait_for_selector("[data-drawn]")
    held: list[Route] = []
    page.route("**/series?first=20000&last=20700", lambda route: held.append(route))
    with page.expect_request("**/series?first=20000&last=20700"):
        _zoom(page, 20_000, 20_700)
    until(lambda: bool(page.evaluate("1") and held))
    page.get_by_role("button", name="Reset zoom").click()
    with page.expect_response("**/series?first=20000&last=20700") as late:
        held[0].continue_()
    late.value.finished()
    page.evaluate("fetch('/api/v1/runs/1').then((answer) => answer.json())")  # after the late one
    record(database, running, make_steps([2.0], first=STEPS + 1))
    until(lambda: _trace(page, "loss")["x"][-1] == STEPS + 1, seconds=20)
    assert 77.0 in _trace(page, "loss")["y"]


def test_plot_without_a_width_is_drawn_as_soon_as_it_has_one(long: None, page: Page) -> None:
    """A plot without a width, as during Chromium's screenshots, is drawn once it has one."""
    page.add_init_script(WATCH_PLOTLY)
    page.add_init_script(
        f"addEventListener('DOMContentLoaded', () => {{ {PLOT}.style.width = 0 }})"
    )
    page.goto("/runs/1")
    page.evaluate("import('plotly').then(() => new Promise(requestAnimationFrame))")
    page.evaluate(f"{PLOT}.style.width = ''")
    page.wait_for_selector("[data-plot=loss][data-drawn]")
    assert page.evaluate(f"window.widths.includes({PLOT}.clientWidth)")


def test_plot_that_was_out_of_sight_and_is_back_is_drawn(long: None, page: Page) -> None:
    """A plot reported as hidden and visible again at once is drawn."""
    page.add_init_script(
        """const Observer = IntersectionObserver
        window.IntersectionObserver = class extends Observer {
            constructor(listener, options) {
                const hidden = ({ target }) => ({ target, isIntersecting: false })
                super((entries) => listener(
                    entries.flatMap((entry) => [hidden(entry), entry])), options)
            }
        }"""
    )
    page.goto("/runs/1")
    page.wait_for_selector("[data-plot][data-drawn]")


def test_drawing_that_never_ends_is_not_waited_for(
    database: Database, running: Run, long: None, page: Page
) -> None:
    """A drawing that never ends does not block the next data."""
    page.add_init_script(WATCH_PLOTLY)
    page.add_init_script("window.isStuck = true")
    page.goto("/runs/1")
    until(lambda: bool(page.evaluate("window.widths?.length")))
    record(database, running, make_steps([2.0] * 5, first=STEPS + 1))
    until(lambda: _trace(page, "loss")["x"][-1:] == [STEPS + 5], seconds=20)


def test_a_slow_first_drawing_delays_no_update(
    database: Database, running: Run, page: Page
) -> None:
    """Only drawings of updates count towards the limit of drawing time."""
    record(database, running, make_steps([1.0] * 10))
    page.add_init_script(SLOW_FIRST)
    page.goto("/runs/1")
    page.wait_for_selector("[data-plot=loss][data-drawn='10']")
    record(database, running, make_steps([1.0] * 10, first=11))
    page.wait_for_selector("[data-plot=loss][data-drawn='20']")


def test_the_comparison_fetches_missed_data(database: Database, running: Run, page: Page) -> None:
    """A 503 for the comparison's series or table delays only that part."""
    with database.writing() as session:
        runs.get(session, running.id).group_id = running.id
    record(database, running, make_steps([1.0] * 3))
    refused = refuse_once(page, "**/api/v1/comparison/series*")
    page.goto("/groups/1")
    page.wait_for_selector('[data-drawn="3"]')
    refused.clear()
    record(database, running, make_steps([1.0] * 2, first=4))
    page.wait_for_selector('[data-drawn="5"]')
    assert len(refused) == 1


def test_waits_for_data_and_spikes_are_drawn(database: Database, running: Run, page: Page) -> None:
    """A panel with step time and data wait in milliseconds appears with the first steps."""
    page.goto("/runs/1")
    page.wait_for_selector("[data-drawn]")
    panel = page.locator("[data-row=data]")
    expect(panel).to_have_count(0)
    spike = {"event": "spike", "step": 7, "loss": 77.0, "z": 99.5}
    record(database, running, make_steps([1.0] * 6 + [77.0] + [1.0] * 3), events=[spike])
    expect(panel.get_by_role("heading")).to_have_text("Time per step, ms")
    panel.scroll_into_view_if_needed()
    until(lambda: len(_trace(page, "loss spike")["x"]) == 1)
    assert _trace(page, "loss spike")["text"] == ["77 at step 7, z 99.5"]
    waits = [s % 11 * 40 / 1000 for s in range(1, 11)]
    until(lambda: _trace(page, "waiting for data")["y"] == waits)
    assert _trace(page, "step")["y"] == [(5000 + s % 7) / 1000 for s in range(1, 11)]
    open_tab(page, "Skipped steps")
    expect(page.locator("#spikes td").first).to_have_text("7")


def test_panels_come_live_as_on_a_page_that_is_opened_later(
    database: Database, running: Run, page: Page
) -> None:
    """Panels of data known only after the first step, such as examples per second, appear live."""
    page.goto("/runs/1")
    page.wait_for_selector("[data-drawn]")
    expect(page.locator("[data-groups] [data-row]")).to_have_count(1)  # the norm's
    with database.writing() as session:
        session.get_one(Run, 1).workload = {"examples": 64}
    record(database, running, make_steps([1.0] * 10), events=[make_metric(10, 0.5)])
    record(database, running, make_steps([1.0] * 10, first=11))
    examples = page.locator("[data-row=examples]")
    expect(examples.get_by_role("heading")).to_have_text("Examples per second")
    names = page.locator("[data-groups] h3")
    expect(names).to_have_count(5)
    live = names.all_text_contents()
    page.reload()
    expect(names).to_have_text(live)


def test_a_rewind_takes_the_lines_back_live(database: Database, running: Run, page: Page) -> None:
    """Steps undone by a rollback disappear live, and the history shows it."""
    recording = Recording(1, 1, has_begun=True, last_line=0)

    def tell(*items: Any) -> None:
        recording.take([event_of(each) if isinstance(each, dict) else each for each in items])
        with database.writing() as session:
            recording.write(session, [], [])
        recording.forget()

    tell(make_steps([1.0] * 30))
    page.goto("/runs/1")
    page.wait_for_selector("[data-drawn='30']")
    back = {
        "event": "rolled_back",
        "step": 20,
        "from_step": 30,
        "spike": 29,
        "loss": 9.0,
        "z": 50.0,
    }
    tell(back | {"examples": 640, "rollbacks": 1}, make_steps([2.0] * 4, first=21))
    page.wait_for_selector("[data-plot=loss][data-drawn='24']")
    assert _trace(page, "loss")["y"] == [1.0] * 20 + [2.0] * 4
    open_tab(page, "Configuration")
    expect(page.locator("#history")).to_contain_text("Rollback 1: from step 30 to step 20")


def test_no_name_is_markup_to_plotly(database: Database, running: Run, page: Page) -> None:
    """A metric's name is shown in chart titles as recorded, without links or bold text."""
    name = '<a href="https://evil.example">x</a><b>%{x}</b> &lt;'
    record(database, running, make_steps([1.0, 2.0]), events=[make_metric(1, 1.0, name)])
    page.goto("/runs/1")
    page.wait_for_selector("[data-drawn='2']")
    title = page.locator("h3", has_text=name.partition("/")[2])  # below its section's
    panel = page.locator(".chart-panel", has=title)
    panel.scroll_into_view_if_needed()
    expect(panel.locator("[data-drawn]")).to_have_count(1)
    assert page.locator("[data-plot] svg a, [data-plot] svg [style*=bold], h3 a").count() == 0


def test_metrics_of_a_script_that_only_logs_are_not_written_over(
    database: Database, running: Run, page: Page
) -> None:
    """A hint covers empty axes until a script's first metric. A long name is cut, and complete
    in its tooltip.
    """
    page.goto("/runs/1")
    said = page.locator("[data-starting]")
    expect(said).to_contain_text("no step received yet")
    box, panel = said.bounding_box(), page.locator("[data-hero] .chart-panel").first.bounding_box()
    assert box
    assert panel
    assert panel["y"] < box["y"] < panel["y"] + panel["height"] - box["height"]
    name = "a" * 200
    record(database, running, events=[make_metric(step, 1.0, name) for step in (1, 2)])
    expect(said).to_be_hidden()
    page.goto("/runs/1#metrics")
    cell = page.locator(".metrics td", has_text=name)
    expect(cell).to_have_attribute("title", name)
    expect(cell).to_have_css("text-overflow", "ellipsis")
    expect(cell).to_have_css("direction", "rtl")  # its end stays
    expect(page.locator(".chart-panel h3", has_text=name)).to_have_css("text-overflow", "ellipsis")
    expect(said).to_be_hidden()
    page.goto("/compare?runs=1")
    label = page.locator(".comparison .label", has_text=name)
    expect(label).to_have_attribute("title", name)
    box = label.bounding_box()
    assert box is not None
    assert box["height"] < 60


@pytest.mark.parametrize("pattern", ["val/*", "*"])
def test_a_metric_is_an_axis_where_a_script_has_defined_it(
    database: Database, ada: User, page: Page, pattern: str
) -> None:
    """A script's x axis can be chosen, or is the default of all metrics; the URL has it."""
    with database.writing() as session:
        defined = {"step_metric": {pattern: "epoch"}}
        watched = make_watched(session, ada, config=defined)
        run = session.get_one(Run, watched.run_id)
    metrics = [make_metric(step, step / 10, "epoch") for step in (10, 20)]
    metrics += [make_metric(step, 0.5, "val/loss") for step in (10, 20)]
    record(database, run, make_steps([1.0] * 20), events=metrics)
    page.goto(f"/runs/{run.id}")
    epoch = page.locator("[data-view=x][value='metric:epoch']")
    expect(epoch).to_be_checked(checked=pattern == "*")
    if pattern == "*":
        page.locator("[data-view=x][value=step]").check()
        page.wait_for_url("**x=step**")
    epoch.check()
    until(lambda: list(_trace(page, "val/loss")["x"]) == [1, 2])
    loss = list(_trace(page, "loss")["x"])
    assert (loss[0], loss[-1]) == (pytest.approx(0.1), 2)


def test_lines_are_inspected_hidden_arranged_and_saved(
    database: Database, running: Run, page: Page
) -> None:
    """The crosshair shows a step's events in all panels, and legends its values. Hidden lines are
    in the URL, flat losses are visible, a panel can be saved or shown in full screen, and the
    browser remembers pinned metrics and folded groups.
    """
    metrics = [
        make_metric(20, value, name) for name, value in (("a/x", 1.0), ("b/y", 2.0), ("lr", 3.0))
    ]
    page.goto("/runs/1")
    said = page.locator("[data-starting]")
    expect(said).to_contain_text("no step received yet")
    for status, words in ((Status.PAUSING, "Pausing before"), (Status.RUNNING, "no step received")):
        with database.writing() as session:
            runs.set_status(session, session.get_one(Run, 1), status)
        expect(said).to_contain_text(words)
    losses = [2.0 + step / 1000 for step in range(20)]
    record(database, running, make_steps(losses, skipped=[7]), events=metrics)
    page.wait_for_selector("[data-plot=loss][data-drawn='20']")
    expect(page.locator("[data-starting]")).to_be_hidden()
    assert page.evaluate(f"{PLOT}._fullLayout.yaxis2.range[0]") > 1.9
    flag = page.locator("[data-row=loss] .crosshair b")
    box = page.locator("[data-plot=loss] .nsewdrag").first.bounding_box()
    assert box is not None
    for step, drawn in ((7, "step 7 · skipped: step 7"), (8, "step 8")):
        x = box["x"] + box["width"] * (step - 1) / 19
        page.mouse.move(x, box["y"] + 60)
        expect(flag).to_have_text(drawn)
    expect(page.locator("[data-row=scale] .crosshair")).to_be_visible()
    loss = page.locator("[data-row=loss] .panel-lines")
    expect(loss.get_by_role("button", name="loss", exact=False).first).to_contain_text("2.007")
    for row in ("loss", "scale"):
        expect(page.locator(f"[data-row={row}] .panel-lines .sign")).to_have_text("|skipped step")
    expect(page.locator("#tab-skips .chip")).to_have_text("1")
    rate = page.locator("[data-row=lr]")
    rate.scroll_into_view_if_needed()
    rate.get_by_role("button", name=re.compile("^learning rate")).click()
    page.wait_for_url("**/runs/1?hide=learning+rate")
    until(lambda: "learning rate" not in page.evaluate(f"{LINES}.map((line) => line.name)"))

    def choose(panel: str, item: str) -> None:
        page.get_by_role("button", name=f"{panel}: more").click()
        page.locator("[data-panel-menu]").get_by_role("button", name=item).press("Enter")

    with page.expect_download() as started:
        choose("Loss", "Save as CSV")
    lines = started.value.path().read_text().splitlines()
    assert (lines[0], lines[1], len(lines)) == ("line,step,value", "loss,1,2", 21)
    page.locator("[data-row='b/y']").scroll_into_view_if_needed()
    page.wait_for_selector("[data-row='b/y'] [data-drawn]")
    with page.expect_download() as started:
        choose("b/y", "Save as SVG")
    assert "b/y" in started.value.path().read_text()
    choose("b/y", "Full screen")
    page.wait_for_selector("[data-row='b/y']:fullscreen")
    page.evaluate("document.exitFullscreen()")  # as Escape does on a screen
    with page.expect_response("**/preferences/panels"):
        choose("b/y", "Pin to the top")
    expect(page.locator("[data-group=pinned] h3")).to_have_text(["b/y"])
    with page.expect_response("**/preferences/panels"):
        page.locator("[data-group='a/'] summary").click()
    expect(page.locator("[data-row='a/x']")).to_be_hidden()
    page.reload()
    page.wait_for_selector("[data-plot=loss][data-drawn='20']")
    expect(page.locator("[data-group=pinned] h3")).to_have_text(["b/y"])
    expect(page.locator("[data-row='a/x']")).to_be_hidden()
    expect(page.locator("[data-row='lr, logged']")).to_have_count(1)
    page.locator("[data-row=lr]").scroll_into_view_if_needed()
    expect(page.locator("[data-row=lr] [aria-pressed=false]")).to_contain_text("learning rate")
