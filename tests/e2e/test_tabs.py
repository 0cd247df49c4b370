"""The tabs of a run's page: by pointer, keys, address and links, and what they do not ask for."""

from playwright.sync_api import Page, expect

from db.database import Database
from db.tables import Run
from tests.browser import open_tab
from tests.db.telemetry_made import make_events, make_headroom, make_steps, record
from tests.e2e.test_streams import asked


def test_one_part_at_a_time_is_shown_and_fetched(
    database: Database, running: Run, page: Page
) -> None:
    """A tab is in the address, opens by keys and by a link into it, and sticks; what is hidden is
    asked for when it is shown, no step of the meantime is missed, and without scripts all is there.
    """
    looks = [make_headroom(50, body=(1.0, 2.0))]
    record(
        database, running, make_steps([1.0] * 3, skipped=[2]), events=[*make_events([2]), *looks]
    )
    series, headroom, streams = (
        asked(page, part) for part in ("/1/series", "/1/headroom", "/live?")
    )
    page.goto("/runs/1?tab=log&x=time")
    panels = page.get_by_role("tabpanel")
    expect(panels).to_have_accessible_name("Log")
    assert not any("steps" in address for address in streams)
    record(database, running, make_steps([1.0], first=4))
    expect(page.locator('[data-fact="step"]')).to_have_text("4")
    assert (series, headroom) == ([], [])

    selected = page.locator("[role=tab][aria-selected=true]")
    selected.focus()
    for key, name in (("End", "History"), ("ArrowRight", "Charts"), ("ArrowLeft", "History")):
        page.keyboard.press(key)
        expect(selected).to_have_text(name)
        expect(selected).to_be_focused()
        expect(panels).to_have_accessible_name(name)
    page.keyboard.press("Home")
    page.wait_for_url("**/runs/1?x=time")
    page.wait_for_selector("[data-plot][data-drawn='4']")
    record(database, running, make_steps([1.0], first=5))
    page.wait_for_selector("[data-plot][data-drawn='5']")
    assert (len(series), headroom) == (1, [])
    assert "steps" in streams[-1]

    page.evaluate("location.hash = '#headroom'")
    expect(panels).to_have_accessible_name("Gradients")
    page.wait_for_selector("[data-headroom-plot][data-drawn='1']")
    page.wait_for_url("**/runs/1?x=time&tab=gradients#headroom")
    page.reload()
    page.wait_for_selector("[data-headroom-plot][data-drawn='1']")
    open_tab(page, "Charts")
    page.wait_for_selector("[data-plot][data-drawn='5']")
    page.set_viewport_size({"width": 390, "height": 700})
    page.wait_for_url("**/runs/1?x=time")
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    open_tab(page, "History")
    expect(selected).to_be_in_viewport()
    box = selected.bounding_box()
    assert box is not None
    assert box["y"] < 2  # at the top, where it was pressed
    assert page.evaluate("document.documentElement.scrollWidth") <= 390

    plain = page.context.browser.new_context(  # type: ignore[union-attr]
        java_script_enabled=False, storage_state=page.context.storage_state()
    )
    without = plain.new_page()
    without.goto(page.url)
    for part in ("#skipped", "#headroom", "#history", "#charts"):
        expect(without.locator(part)).to_be_visible()
    plain.close()
