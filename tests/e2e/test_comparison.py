"""Comparisons of any runs in a real browser."""

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from sqlalchemy import update

from db.access import chart_preferences, shared_links
from db.database import Database
from db.queue import queue
from db.tables import Run, RunNode, Status, User
from tests.app.compare.any_runs_made import train
from tests.app.compare.seeds_made import add_seed, two_precisions
from tests.app.conftest import start_run
from tests.browser import wait_until
from tests.db.conftest import make_watched
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record
from tests.e2e.test_access import found_on

#: Names of more metrics than a page lists, and the last of them.
MANY = [f"unit/{number:03}" for number in range(300)]
LAST = MANY[-1]


@pytest.mark.journey
def test_runs_are_compared_by_a_metric(database: Database, ada: User, page: Page) -> None:
    """A script's x axis can be chosen, zoomed and linked; runs without it are listed as not
    drawn.
    """
    for number, (length, epochs) in enumerate(((20, 2), (40, 2), (20, 0))):
        with database.writing() as session:
            config = {"step_metric": {"*": "epoch"}} if epochs else {}
            watched = make_watched(session, ada, f"{number:032}", config=config)
            run = session.get_one(Run, watched.run_id)
        ends = [(epoch + 1) * length // epochs for epoch in range(epochs)]
        metrics = [make_metric(step, n + 1.0, "epoch") for n, step in enumerate(ends)]
        record(database, run, make_steps([1.0] * length), events=metrics)
    page.goto("/compare?runs=1,2,3")
    _wait_for(page, "named.length === 3")
    epoch = page.get_by_role("radio", name="epoch", exact=True)
    epoch.check()
    expect(page.locator("[data-unknown]")).to_contain_text("they have no epoch: ")
    _wait_for(page, "named.length === 2")
    assert [trace["x"][-1] for trace in _traces(page)] == [2, 2]
    page.wait_for_url("**epoch**")
    page.reload()
    _wait_for(page, "named.length === 2 && named[1].x.at(-1) === 2")
    expect(epoch).to_be_checked()
    page.get_by_label("Step", exact=True).check()
    _wait_for(page, "named.length === 3 && named[1].x.at(-1) === 40")


def test_the_toolbar_of_a_comparison_is_recalled(database: Database, ada: User, page: Page) -> None:
    """Axis and smoothing are remembered for all comparisons, unless the URL sets them."""
    for number in (1, 2):
        with database.writing() as session:
            run = session.get_one(Run, make_watched(session, ada, f"{number:032}").run_id)
        record(database, run, make_steps([1.0] * 20))
    page.goto("/compare?runs=1,2")
    _wait_for(page, "named.length === 2")
    with page.expect_response("**/preferences/toolbar") as kept:
        page.get_by_label("Time", exact=True).check()
        page.get_by_label("Smoothing").fill("0.5")
    assert kept.value.ok
    page.goto("/compare?runs=2,1")
    expect(page.get_by_label("Time", exact=True)).to_be_checked()
    expect(page.locator("output[data-smooth]")).to_have_text("0.5")
    page.goto("/compare?runs=1,2&x=applied")
    expect(page.get_by_label("Applied steps", exact=True)).to_be_checked()
    expect(page.locator("output[data-smooth]")).to_have_text("0")


def test_parity_follows_its_runs(database: Database, ada: User, offered: None, page: Page) -> None:
    """Parity appears when the last run ends, and its form keeps the view; axe finds no
    violations.
    """
    two_precisions(database, ada)
    last = add_seed(database, ada, "fp32", 5, 0.95, status=None)
    add_seed(database, ada, "fp16", 5, 0.94)
    page.goto(f"/compare?runs={','.join(map(str, range(1, 13)))}&x=applied")
    parity = page.get_by_role("region", name="Parity", exact=True)
    expect(parity).to_contain_text("Unknown for fp16: not finished: run 11 (running)")
    with database.writing() as session:
        queue.end(session, last.id, last.attempt, Status.FINISHED)
        session.execute(update(RunNode).values(devices=[0]))
    expect(parity).to_contain_text("fp16 is worse than fp32 in val/accuracy")
    expect(parity).to_contain_text("6 seeds")
    parity.get_by_label("Margin").fill("0.02")
    parity.get_by_role("button", name="Test").click()
    expect(parity).to_contain_text("fp16 is equivalent to fp32 in val/accuracy within ±0.02")
    expect(page.get_by_label("Applied steps", exact=True)).to_be_checked()
    parity.get_by_text("Pairs", exact=True).last.click()
    expect(parity.get_by_role("link", name="0.95", exact=True)).to_have_count(2)
    expect(page.locator("[data-dots] li:not(.axis)")).to_have_count(12)
    expect(parity.get_by_label("Target")).to_be_hidden()
    duration = parity.get_by_label("Metric").locator("option[value=seconds]")
    expect(duration).not_to_have_css("display", "none")
    parity.get_by_label("Value").select_option("Area under the curve")
    expect(parity.get_by_label("Margin")).to_have_value("0.02")
    expect(duration).to_have_css("display", "none")
    parity.get_by_label("Value").select_option("Time to target")
    expect(parity.get_by_label("Margin ± s")).to_have_value("")
    parity.get_by_label("Target").fill("0.945")
    parity.get_by_role("button", name="Test").click()
    expect(parity).to_contain_text("Unknown for fp16: val/accuracy never reaches 0.945: run 3")
    expect(parity.get_by_label("Target")).to_have_value("0.945")
    expect(page.get_by_label("Applied steps", exact=True)).to_be_checked()
    assert [*found_on(page)] == []


def _traces(page: Page) -> list[dict[str, Any]]:
    script = """() => document.querySelector('[data-plot=loss]').data
        .filter((trace) => trace.name).map(({ name, x, y, yaxis }) => ({ name, x, y, yaxis }))"""
    found: list[dict[str, Any]] = page.evaluate(script)
    return found


def _wait_for(page: Page, script: str, of: str = "[data-plot=loss]") -> None:
    wait_until(
        page,
        f"() => {{ const plots = document.querySelectorAll('{of}'); "
        f"const named = [...plots].flatMap((plot) => plot.data ?? []).filter((t) => t.name); "
        f"return {script} }}",
    )


def test_runs_are_compared_starting_from_a_run(
    database: Database, ada: User, offered: None, page: Page
) -> None:
    """Runs are added by a click; lines are hidden, inspected, smoothed and averaged, with all of
    it in the URL, and active runs grow.
    """
    for lr, base in ((0.1, 3.0), (0.1, 2.0), (0.2, 1.0)):
        train(database, ada, [base] * 60, lr=lr)
    with database.writing() as session:
        for run_id in (1, 2, 3):
            session.get_one(Run, run_id).workload = {"examples": 10 * run_id}
    growing = start_run(database, ada, name="growing")
    record(database, growing, make_steps([4.0] * 3))

    page.goto("/runs/1")
    page.get_by_role("link", name="Compare", exact=True).click()
    page.locator("[data-add='2']").click()
    page.wait_for_url("**/compare?runs=1,2")
    page.get_by_role("button", name="Add runs").click()
    page.get_by_label("Run IDs").fill("1, 2,3,4")
    page.get_by_role("button", name="Compare", exact=True).click()
    _wait_for(page, "named.length === 4")
    assert [trace["y"][0] for trace in _traces(page)] == [3.0, 2.0, 1.0, 4.0]

    # Pointed at, the legend has the values there, and the crosshair is in every panel.
    box = page.locator("[data-plot=loss] .nsewdrag").last.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.locator("[data-where]")).to_contain_text("at step")
    expect(page.locator(".crosshair:visible")).to_have_count(4)
    expect(page.locator("[data-figure=loss]").last).to_have_text("–")  # it has three steps
    expect(page.locator(".legend .pointed")).to_have_count(1)
    # Pointed at in the legend, a run's line is before the others, which are faint.
    page.locator(".legend tbody tr").first.hover()
    expect(page.locator("[data-where]")).to_have_text("latest values")
    behind = page.locator("[data-plot=loss] .trace.behind")
    expect(behind.first).to_be_attached()
    last = page.locator("[data-plot=loss] .scatterlayer").last.locator(".trace").last
    expect(last).not_to_have_class(re.compile("behind"))

    page.get_by_label("Examples", exact=True).check()
    expect(page.locator("[data-unknown]")).to_contain_text("growing")
    _wait_for(page, "named.length === 3 && named[2].x.at(-1) === 1800")
    page.get_by_label("Step", exact=True).check()
    panels = page.get_by_role("button", name="Panels")
    expect(panels).to_have_text("Panels 4")
    panels.click()
    page.get_by_role("checkbox", name="Gradient norm", exact=True).uncheck()
    page.get_by_role("checkbox", name="Loss scale").uncheck()
    expect(panels).to_have_text("Panels 2")
    page.keyboard.press("Escape")
    _wait_for(page, "named.length === 7", of="[data-plot]")
    page.locator(".legend").get_by_label("run of").nth(2).uncheck()
    _wait_for(page, "named.length === 5", of="[data-plot]")
    averaging = page.get_by_label("Average runs by")
    averaging.select_option("Mean by training.lr")
    _wait_for(page, "named[0]?.name === 'training.lr 0.1' && named[0].y[0] === 2.5")
    expect(page.locator("[data-means]")).to_contain_text("training.lr 0.1, mean of 2 runs")

    kept = ["by=training.lr", "hide=3", "draw=loss&draw=val%2Faccuracy"]
    wait_until(page, "kept => kept.every((each) => location.search.includes(each))", kept)
    page.reload()
    _wait_for(page, "named[0]?.name === 'training.lr 0.1' && named.length >= 3", of="[data-plot]")
    expect(averaging.locator("option:checked")).to_have_text("Mean by training.lr")
    averaging.select_option("No averaging")
    record(database, growing, make_steps([5.0] * 2, first=4))
    _wait_for(page, "named.some((t) => t.x.length === 5 && t.y.at(-1) === 5)")
    expect(page.locator('[data-key="step"] td').last).to_contain_text("5 of")
    with database.writing() as session:
        queue.end(session, growing.id, 1, Status.FINISHED)
    expect(page.locator('[data-key="status"] td').last).to_have_text("Finished")

    page.get_by_label(re.compile("All settings")).check()
    expect(page.locator('[data-key="config.training.batch_size"]')).to_be_visible()
    page.locator("[data-choice='across']").select_option("training.lr")
    page.locator("[data-choice='up']").select_option("Lowest loss")
    page.locator("[data-scatter-plot]").scroll_into_view_if_needed()
    # The fourth has no such setting. Until it was chosen, four were drawn by another one.
    page.wait_for_selector('[data-scatter-plot][data-drawn="3"]')
    page.locator("[data-parallel-plot]").scroll_into_view_if_needed()
    page.wait_for_selector('[data-parallel-plot][data-drawn="4"]')


def test_panels_and_legend_fit_the_first_screen(
    database: Database, ada: User, offered: None, page: Page
) -> None:
    """The legend has the differing settings and scrolls beyond eight runs; a focused row
    highlights its line.
    """
    for n in range(10):
        train(database, ada, [3.0, 2.0, 1.0], lr=0.1 * (1 + n))
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/compare?runs=1,2,3,4")
    page.wait_for_selector("[data-plot=grad_norm][data-drawn]")
    panels = [panel.bounding_box() for panel in page.locator("[data-panels] > *").all()]
    assert [round(box["width"]) for box in panels if box] == [456] * 4
    assert all(box["y"] + box["height"] <= 860 for box in panels if box)
    side = page.locator(".compare-side").bounding_box()
    assert side
    assert (side["width"], side["x"] + side["width"] < panels[0]["x"]) == (396, True)  # type: ignore[index]
    legend = page.locator("[data-legend]")
    expect(legend.locator("th")).to_have_text(["Shown", "lr", "loss", "val/accuracy"])
    expect(legend.locator("tbody tr").nth(1)).to_contain_text("lr 0.22 · run of")
    assert legend.bounding_box()["width"] <= 396  # type: ignore[index]
    dots = page.locator("[data-dots] li")
    expect(dots).to_have_count(5)  # the last one is the axis
    expect(dots.last.locator(".track span")).to_have_count(2)  # its ends, which have room
    expect(dots.first).to_contain_text("0.5")
    places = dots.locator(".dot").evaluate_all("all => all.map(e => parseFloat(e.style.left))")
    assert all(0 <= place <= 100 for place in places)
    values = page.locator("[data-row=loss] [data-values] b")
    expect(values).to_have_text(["1"] * 4)
    page.locator("[data-plot=loss] .xy2 > .nsewdrag").hover(position={"x": 2, "y": 60})
    expect(values).to_have_text(["3"] * 4)
    expect(page.locator("[data-where]")).to_have_text("at step 1")
    page.mouse.move(0, 0)
    expect(values).to_have_text(["1"] * 4)
    first = page.locator(".comparison tbody tr").first
    expect(first).to_contain_text("training.lr")
    expect(first.locator(".differs")).to_have_count(4)
    expect(page.locator(".primary:visible")).to_have_count(0)
    legend.get_by_role("checkbox").nth(2).focus()
    expect(page.locator("[data-plot=loss] .trace.behind").first).to_be_attached()
    page.get_by_role("button", name="val/accuracy: more").click()
    page.get_by_role("button", name="Log axis").click()
    page.wait_for_url("**ylog=val%2Faccuracy**")
    page.locator("[data-row=scale] [data-more]").click()
    page.get_by_role("button", name="Hide").click()
    expect(page.locator("[data-panels] > *")).to_have_count(3)
    page.goto(f"/compare?runs={','.join(map(str, range(1, 11)))}")
    expect(page.locator(".comparison.sideways tbody tr")).to_have_count(10)
    box = legend.locator("..")
    assert box.evaluate("(box) => box.getBoundingClientRect().bottom <= innerHeight")
    for width in (1024, 640, 390, 320):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if width > 640:
            assert box.evaluate("(box) => box.scrollWidth <= box.clientWidth")


def test_the_first_dot_plot_is_of_the_foremost_figure(
    database: Database, ada: User, offered: None, page: Page
) -> None:
    """The first scatter plot has the most common metric, also live, unless the user chooses one.

    The URL can name a metric, and one that fewer runs have is not the default.
    """
    runs = [start_run(database, ada, name=name) for name in ("a", "b")]
    page.goto("/compare?runs=1,2")
    figure = page.locator("[data-choice=figure]")
    expect(figure).to_have_value("Steps")
    for run in runs:
        record(database, run, make_steps([2.0] * 5))
    expect(figure).to_have_value("Lowest loss")
    for run in runs:
        events = [make_metric(5, 0.5, "val/accuracy")]
        record(database, run, make_steps([2.0] * 5, first=6), events=events)
    expect(figure).to_have_value("val/accuracy, best")
    figure.select_option("Last loss")
    record(database, runs[0], make_steps([2.0], first=11), events=[make_metric(11, 0.6, "val/f1")])
    expect(page.locator("[data-fragment=comparison]")).to_contain_text("val/f1")
    expect(figure).to_have_value("Last loss")
    third = start_run(database, ada, name="c")
    record(database, third, make_steps([2.0] * 5))
    page.goto("/compare?runs=1,2,3")
    expect(figure).to_have_value("Lowest loss")
    page.goto("/compare?runs=1,2,3&metric=val/accuracy")
    expect(figure).to_have_value("val/accuracy")


def test_the_seeds_of_a_configuration_have_one_mean(
    database: Database, ada: User, offered: None, page: Page
) -> None:
    """Runs that differ in the seed have one mean; the loss scale is drawn for each run."""
    for lr, seed, loss in ((0.1, 1, 2.0), (0.1, 2, 4.0), (0.2, 1, 1.0), (0.2, 2, 3.0)):
        train(database, ada, [loss] * 20, lr=lr, seed=seed)
    page.goto("/compare?runs=1,2,3,4&draw=loss&draw=scale")
    averaging = page.get_by_label("Average runs by")
    averaging.select_option("Mean over seeds")
    _wait_for(page, "named.length === 2 && named[0].y[0] === 3 && named[1].y[0] === 2")
    expect(page.locator("[data-means]")).to_contain_text("training.lr 0.1, mean of 2 runs")
    _wait_for(page, "named.length === 4 && named[0].line.shape === 'hv'", of="[data-plot=scale]")
    dots = page.locator("[data-dots] li")
    expect(dots.locator(".band")).to_have_count(2)
    expect(dots.locator(".seed")).to_have_count(4)
    page.reload()
    _wait_for(page, "named.length === 2 && named[0].y[0] === 3")
    expect(averaging.locator("option:checked")).to_have_text("Mean over seeds")


def test_every_metric_of_a_comparison_is_found(database: Database, ada: User, page: Page) -> None:
    """The panel search finds all metrics, pinned ones come first, and shared links have it too."""
    with database.writing() as session:
        chart_preferences.write(session, ada, f"{chart_preferences.PANELS}", {"pinned": [LAST]})
    for number in (1, 2):
        with database.writing() as session:
            run = session.get_one(Run, make_watched(session, ada, f"{number:032}").run_id)
        record(database, run, make_steps([1.0] * 3), events=[make_metric(1, 1.0, n) for n in MANY])
    page.goto("/compare?runs=1,2")
    _wait_for(page, "named.length === 2")
    drawn = page.locator(".run-panels [data-row]")
    for place, row in enumerate(["loss", LAST]):
        expect(drawn.nth(place)).to_have_attribute("data-row", row)
    page.get_by_role("button", name="Panels").click()
    panels = page.locator("#panels")
    expect(panels.get_by_role("checkbox").first).to_be_checked()
    expect(panels.locator("label > .cut").first).to_have_text(LAST)
    expect(panels).to_contain_text("100 of 300 metrics: search for others.")
    page.keyboard.type("UNIT 277")
    expect(panels.get_by_role("checkbox")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(panels.get_by_role("checkbox", name="unit/277")).to_be_checked()
    expect(drawn.last).to_have_attribute("data-row", "unit/277")
    expect(page.locator("#table")).to_contain_text("unit/277")
    page.wait_for_url("**draw=unit**")
    page.reload()
    _wait_for(page, "named.length === 2")
    expect(drawn.last).to_have_attribute("data-row", "unit/277")
    with database.writing() as session:
        secret = shared_links.make(session, ada, [1, 2], 1)[0]
    page.goto(f"/shared#{secret}")
    page.get_by_role("button", name="Panels").click()
    page.keyboard.type("277")
    expect(panels.get_by_role("checkbox")).to_have_count(1)


def test_a_legend_names_its_lines(database: Database, ada: User, page: Page) -> None:
    """Legends in panels show run numbers if names have no room, and the table shows full names;
    so does a narrow panel of one run with two lines.
    """
    page.set_viewport_size({"width": 1440, "height": 900})
    long = "a-much-longer-name-of-a-run" * 2
    for name in ("fp16", long, "bf16"):
        with database.writing() as session:
            watched = make_watched(session, ada, name, name=name)
            run = session.get_one(Run, watched.run_id)
        events = [make_metric(5, 0.5)] if name != long else []
        record(database, run, make_steps([1.5] * 20), events=events)
    page.goto("/compare?runs=1,2,3")
    values = page.locator("[data-row=loss] [data-values]")
    shown = "> span > span:visible"
    expect(values.locator(shown)).to_have_text(["1", "2", "3"])
    few = page.locator('[data-row="val/accuracy"] [data-values]')
    expect(few.locator(shown)).to_have_text(["fp16", "bf16"])
    whole = "(labels) => labels.map((each) => each.scrollWidth <= each.clientWidth)"
    named = page.locator("[data-legend] .name :is(a, .quiet), [data-dots] li > :first-child")
    for width in (1440, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert all(named.evaluate_all(whole))
        assert values.evaluate("(each) => each.scrollHeight <= each.clientHeight")
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/compare?runs=1,3")
    expect(values.locator(shown)).to_have_text(["fp16", "bf16"])
    page.goto("/runs/1")
    labels = page.locator("[data-row=norm] .panel-lines .cut")
    if page.locator("[data-row=norm]").bounding_box():
        page.locator("[data-row=norm]").scroll_into_view_if_needed()
    expect(labels).to_have_text(["before", "after"])
    assert labels.evaluate_all(whole) == [True, True]
