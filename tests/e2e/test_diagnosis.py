"""The diagnosis in a real browser."""

from itertools import pairwise

import pytest
from playwright.sync_api import Page, expect
from sqlalchemy import select

from app.live.run_updates import SKIPS_SHOWN
from db.database import Database
from db.tables import ControlRequest, Run, Status, User
from tests.app.conftest import CONFIG, start_run, submit
from tests.browser import open_menu, open_tab, wait_until
from tests.db.telemetry.telemetry_made import (
    make_events,
    make_headroom,
    make_histogram,
    make_module,
    make_precision_diff,
    make_replay,
    make_skip,
    make_steps,
    record,
)
from tests.e2e.test_access import found_on

PRESSED_STILL_FOCUSED = """(button) => {
  button.focus()
  button.click()
  return document.activeElement === button
}"""


@pytest.mark.journey
def test_skip_is_replayed_and_the_scale_set(database: Database, running: Run, page: Page) -> None:
    """A button requests a replay, whose finding appears live; an invalid scale is explained."""
    skips = [make_skip(2, "model.head.bias")]
    record(database, running, make_steps([1.0] * 60, skipped=[2]), events=skips)
    page.goto("/runs/1")
    expect(page.locator(".health")).to_contain_text("Loss scale healthy")
    open_tab(page, "Skipped steps")
    replay = page.get_by_role("button", name="Replay")
    assert not replay.evaluate(PRESSED_STILL_FOCUSED), "its cell would wait for who has left it"
    expect(page.locator("[data-toast]")).to_have_text("Replay requested.")
    expect(page.locator(".replay")).to_have_text("Replaying…")
    page.reload()
    open_tab(page, "Skipped steps")
    expect(page.locator(".replay")).to_have_text("Replaying…")
    record(database, running, events=[make_replay(2)])
    expect(page.locator(".replay")).to_contain_text("largest input 70,123 of at most 65,504")

    page.get_by_label("Loss scale from the next step on").fill("1024")
    page.get_by_role("button", name="Set scale").click()
    expect(page.locator("[data-toast]")).to_have_text("New loss scale requested.")
    page.get_by_label("Loss scale from the next step on").fill("1e39")
    page.get_by_role("button", name="Set scale").click()
    expect(page.locator("[data-toast]")).to_contain_text("allowed: 2^-126 to 2^127")
    with database.reading() as session:
        asked = session.scalars(select(ControlRequest).order_by(ControlRequest.id)).all()
        assert [(each.kind, each.value) for each in asked] == [("replay", 2), ("scale", 1024)]


def test_gradients_are_drawn_and_slid_to_another_scale(
    database: Database, ada: User, offered: None, page: Page
) -> None:
    """The gradient heat map shows modules, and what another scale would lose."""
    config = {**CONFIG, "diagnosis": {"histogram_every_steps": 100}}
    page.goto("/workers")  # the empty list would reload itself
    running = start_run(database, ada, config=config)
    page.goto("/runs/1?tab=gradients")
    expect(page.locator("[data-lost]")).to_have_text("The first are counted in step 100.")
    modules = [make_module("body", -30, [50]), make_module("head", -10, [50])]
    record(database, running, make_steps([1.0]), events=[make_histogram(1, *modules)])
    page.wait_for_selector('[data-heat][data-drawn="1"]')
    lost = page.locator("[data-lost]")
    expect(lost).to_contain_text("At its scale, 216, 0 % become 0")
    page.locator("[data-slide-scale]").fill("5")
    expect(lost).to_contain_text("At 25, 50 % become 0")
    page.get_by_label("Module").select_option("head")
    expect(lost).to_contain_text("At 25, 0 % become 0")
    page.locator("[data-slide-scale]").press("End")
    expect(lost).to_contain_text("At its scale, 216")
    page.locator("[data-heat]").focus()
    page.keyboard.press("ArrowLeft")
    expect(lost).to_contain_text("Step 1, scale 216: 100 % of gradients at 2−10")


def test_headroom_is_drawn_look_by_look(database: Database, running: Run, page: Page) -> None:
    """Heat map and table of headroom follow the run; the heading has the value at the pointer."""
    looks = [make_headroom(step, body=(1.0, step), head=(4094.0, None)) for step in (50, 16376)]
    record(database, running, make_steps([1.0]), events=looks[:1])
    page.goto("/runs/1#headroom")
    table = page.locator("#headroom")
    expect(table).to_contain_text("step 50")
    expect(table.locator("tbody tr").first).to_contain_text("head")
    plot = page.locator("[data-headroom-plot]")
    plot.scroll_into_view_if_needed()
    page.wait_for_selector('[data-headroom-plot][data-drawn="1"]')
    expect(plot.locator(".xtick text")).to_have_text("50")
    record(database, running, events=looks[1:])
    page.wait_for_selector('[data-headroom-plot][data-drawn="2"]')
    expect(table).to_contain_text("step 16,376")
    expect(table.locator("tbody tr").first).to_contain_text("body")
    box = plot.locator(".nsewdrag").bounding_box()
    assert box
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 0.75 * box["height"])
    said = page.locator("section", has=plot).locator("[data-pointed]")
    expect(said).to_have_text("head, step 16,376: 4 powers of two left")


def labels_of(page: Page, selector: str) -> list[tuple[str, float, float, float]]:
    """Return the text, top, left and right of each label of a plot."""
    script = """all => all.map(e => {
        const { top, left, right } = e.getBoundingClientRect()
        return [e.textContent, top, left, right]
    })"""
    found: list[tuple[str, float, float, float]] = page.locator(selector).evaluate_all(script)
    return found


def test_a_layer_that_was_infinite_is_the_first_and_marked(
    database: Database, ada: User, offered: None, page: Page
) -> None:
    """A layer with an infinite norm is marked as such, rather than shown as a gap."""
    running = start_run(database, ada, config=CONFIG)
    names = [f"body.{n}" for n in range(15)]
    events: list[dict[str, object]] = []
    for step in (50, 100):
        norms = [1.0 + n for n in range(15)]
        norms[3] = float("inf") if step == 100 else 0.001
        events.append({"event": "layer_norms", "step": step, "layers": names, "norms": norms})
    record(database, running, make_steps([1.0] * 100), events=events)
    page.goto("/runs/1?tab=gradients")
    page.wait_for_selector('[data-layers-plot][data-drawn="2"]')
    assert labels_of(page, "#layers .annotation-text")[0][0] == names[3]
    page.locator("#layer-map").scroll_into_view_if_needed()
    page.wait_for_selector('#layer-map [data-drawn="2"]')
    expect(page.locator("[data-odd]:visible")).to_have_text([" · ▲ ∞ or NaN", "■ ∞ or NaN"])
    marks = page.locator("[data-layers-plot]").evaluate("e => e.data[1].x")
    cells = page.locator("#layer-map [data-map-plot]").evaluate("e => e.data[1].z.map((r) => r[1])")
    assert marks == [100]
    assert [row for row, cell in enumerate(cells) if cell] == [3]


def test_gradients_stand_in_two_columns(
    database: Database, ada: User, offered: None, page: Page
) -> None:
    """Labels and headings of the gradient charts are complete and do not overlap; a heat map has
    a color key; hovering a row highlights its layer.
    """
    config = {**CONFIG, "diagnosis": {"histogram_every_steps": 100}}
    running = start_run(database, ada, config=config)
    names = [f"model.block.{n}.attention.input" for n in range(15)]
    events = []
    for step in (50, 100):
        events.append(make_histogram(step, make_module("body", -30, [50])))
        events.append(make_headroom(step, **{name: (1.0 + i, 2.0) for i, name in enumerate(names)}))
        norms = [1.0 + i / 50 for i in range(len(names))]
        events.append({"event": "layer_norms", "step": step, "layers": names, "norms": norms})
    record(database, running, make_steps([1.0] * 100), events=events)
    for width, height in ((1440, 900), (1024, 768), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        page.goto("/runs/1?tab=gradients")
        page.wait_for_selector('[data-heat][data-drawn="2"]')
        page.locator("[data-layers-plot]").scroll_into_view_if_needed()
        page.wait_for_selector('[data-layers-plot][data-drawn="2"]')
        boxes = {
            name: page.locator(f"#{name}").evaluate("e => e.getBoundingClientRect().toJSON()")
            for name in ("exponents", "layers", "measurements", "headroom")
        }
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        is_wide = width >= 1280
        assert (boxes["measurements"]["left"] > boxes["exponents"]["right"]) == is_wide
        assert boxes["layers"]["top"] >= boxes["exponents"]["bottom"]
        if is_wide:
            assert boxes["headroom"]["bottom"] == pytest.approx(boxes["layers"]["bottom"], abs=1)
            assert boxes["layers"]["bottom"] <= 900
        labels = labels_of(page, "#layers .annotation-text")
        assert len(labels) == 10
        assert names[14].endswith(labels[0][0].strip("…"))  # the largest one, at the top
        assert all(right <= boxes["layers"]["right"] for *_, right in labels)
        if is_wide:
            assert labels[0][0] == names[14]
        expect(page.locator("#layers header")).to_contain_text(
            "5 largest and 5 smallest of 15 layers"
        )
        page.locator("#layer-map").scroll_into_view_if_needed()
        page.wait_for_selector('#layer-map [data-drawn="2"]')
        keys = page.locator(".chart-panel .ramp:visible").all_inner_texts()
        ends = [key.split() for key in keys]
        assert ends == [["0.0001", "%", "100", "%"], ["0", "16+"], ["1", "1.28"]]
        cut = "all => all.filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.innerText)"
        heads = page.locator(".chart-panel header:visible > :is(h2, h3, .cut)")
        assert heads.evaluate_all(cut) == []
        rows = labels_of(page, "#layer-map .ytick text")
        assert len(rows) == 15
        left = page.locator("#layer-map").evaluate("e => e.getBoundingClientRect().left")
        assert all(start >= left for _name, _top, start, _right in rows)
        for labeled in (labels, rows):
            tops = [top for _name, top, *_ in labeled]
            assert all(after - before >= 12 for before, after in pairwise(tops))
    assert list(found_on(page)) == []
    page.set_viewport_size({"width": 1440, "height": 900})
    expect(page.locator("#headroom tbody tr:visible")).to_have_count(7)
    page.get_by_role("button", name="All 15").click()
    expect(page.locator("#headroom tbody tr:visible")).to_have_count(15)
    page.locator(f'[data-layer="{names[14]}"]').focus()
    faint = "() => document.querySelector('[data-layers-plot]').data.filter(t => t.opacity < 1)"
    wait_until(page, f"({faint})().length === 9")
    assert list(found_on(page)) == []
    page.get_by_role("button", name="Gradient norms by layer: full screen").click()
    wait_until(page, "() => document.querySelector('[data-layers-plot]').clientHeight > 800")
    expect(page.locator("#layers .annotation-text")).to_have_count(15)
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Plan precision", exact=True)).to_be_visible()


def test_a_precision_diff_appears_when_it_is_recorded(
    database: Database, running: Run, page: Page
) -> None:
    """A precision diff appears live, and the page no longer says that it has no statistics."""
    page.goto("/runs/1?tab=gradients")
    expect(page.get_by_text("records no gradient statistics")).to_be_visible()
    for step in (50, 60):
        record(database, running, events=[make_precision_diff(step)])
        expect(page.locator("#precision-diff .section-head")).to_contain_text(f"Step {step}")
        expect(page.get_by_text("records no gradient statistics")).to_be_hidden()


def test_page_of_a_plan_says_its_state(database: Database, ada: User, page: Page) -> None:
    """The page of a plan changes from queued to measuring."""
    submit(database, ada, config={**CONFIG, "lab": {"task": "precision_plan"}})
    page.goto("/runs/1/precision-plan")
    expect(page.get_by_role("heading", level=2)).to_have_text("Queued")
    with database.writing() as session:
        session.get_one(Run, 1).status = Status.RUNNING
    expect(page.get_by_role("heading", level=2)).to_have_text("Measuring")


def test_comparison_is_one_click_and_draws_its_runs(
    database: Database, running: Run, page: Page
) -> None:
    """The button queues four runs and leads to their chart and table."""
    record(database, running, make_steps([3.0, 2.0], skipped=[1]), events=make_events([1]))
    page.goto("/runs/1")
    open_menu(page)
    page.get_by_text("Run in other precisions…").click()
    page.get_by_label("Seeds").fill("1")
    page.get_by_role("button", name="Queue runs").click()
    page.wait_for_url("**/groups/2")
    expect(page.locator(".comparison thead a")).to_have_text(
        ["fp32", "fp16 without scaler", "fp16", "bf16"]
    )
    page.wait_for_selector("[data-drawn]")


def test_the_result_of_a_replay_is_not_pushed_away(
    database: Database, running: Run, page: Page
) -> None:
    """A message leads to a replay's result, its row stays below newer ones, and a filter finds
    it.
    """
    skips = list(range(10, 10 + SKIPS_SHOWN))
    steps = make_steps([1.0] * 400, skipped=skips)
    record(database, running, steps, events=[make_skip(step, "model.head.bias") for step in skips])
    page.goto("/runs/1#skips")
    page.locator(f"tr[data-step='{skips[0]}'] button").click()
    expect(page.locator(f"tr[data-step='{skips[0]}'] .replay")).to_have_text("Replaying…")
    steps = make_steps([1.0] * 20, first=401, skipped=[405, 410])
    events = [make_skip(step, "model.0.bias") for step in (405, 410)]
    record(database, running, steps, events=events)
    expect(page.locator("tr[data-step='410']")).to_be_visible()
    expect(page.locator(f"tr[data-step='{skips[1]}']")).to_have_count(0)
    record(database, running, events=[make_replay(skips[0], requested=True)])
    toast = page.locator("[data-toast]")
    expect(toast).to_contain_text(f"Step {skips[0]}: model.head, backward")
    toast.get_by_role("button", name="Show").click()
    row = page.locator(f"tr[data-step='{skips[0]}']")
    expect(row).to_be_in_viewport()
    page.get_by_label("Replayed only").check()
    expect(page.locator(".skips tbody tr:visible")).to_have_count(1)
    page.reload()
    expect(page.locator(f"tr[data-step='{skips[0]}'] .replay")).to_contain_text("70,123")


def test_one_line_says_why_no_step_can_be_replayed(
    database: Database, running: Run, page: Page
) -> None:
    """For a paused or ended run one line says why replays are off; rows have one line at 1440
    px.
    """
    page.set_viewport_size({"width": 1440, "height": 900})
    skip = make_skip(2, "model.head.bias", optimizer="adamw")
    record(database, running, make_steps([1.0] * 60, skipped=[2]), events=[skip])
    page.goto("/runs/1#skips")
    expect(page.get_by_role("button", name="Replay")).to_be_visible()
    heights = "[...document.querySelectorAll('.skips tbody tr')].map((row) => row.offsetHeight)"
    assert max(page.evaluate(heights)) < 40
    for status, words in (("paused", "Paused: resume"), ("finished", "The run has ended")):
        page.evaluate(
            "(status) => document.querySelector('[data-run]').dataset.status = status", status
        )
        expect(page.locator("#skipped")).to_contain_text(words)
        expect(page.locator("#skipped").get_by_text(words)).to_be_visible()
        expect(page.get_by_role("button", name="Replay")).to_be_hidden()
