"""Streams and requests of pages in a real browser, from start to end."""

import re

import pytest
from playwright.sync_api import Page, Request, expect
from sqlalchemy import delete

from db.database import Database
from db.queue import queue
from db.tables import Run, SignInSession, Status
from db.telemetry import telemetry
from db.telemetry.telemetry import LogRow
from tests.browser import STATUS
from tests.db.telemetry.telemetry_made import make_steps, record


def collect_requests(page: Page, part: str) -> list[str]:
    """Return the requested URLs that contain a text."""
    found: list[str] = []

    def note(request: Request) -> None:
        if part in request.url:
            found.append(request.url)

    page.on("request", note)
    return found


def test_an_ended_run_is_not_polled(database: Database, running: Run, page: Page) -> None:
    """After a run's end the stream is closed and not opened again."""
    page.clock.install()
    streams = collect_requests(page, "/live?")
    record(database, running, make_steps([1.0] * 9))
    with page.expect_request("**/live?*"):
        page.goto("/runs/1")
    with database.writing() as session:
        queue.end(session, running.id, running.attempt, Status.FINISHED)
    expect(page.locator(STATUS)).to_have_text("Finished")
    page.clock.run_for(120_000)
    assert len(streams) == 1
    assert page.locator("[data-connection]").is_hidden()


def test_a_signed_out_page_says_so_and_stops(database: Database, running: Run, page: Page) -> None:
    """After a sign-out the page reconnects once, gets 401, and stops."""
    page.goto("/runs/1")
    page.wait_for_selector("[data-drawn]", state="attached")
    page.clock.install()
    with database.writing() as session:
        session.execute(delete(SignInSession))
    page.evaluate("window.dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
    badge = page.locator("[data-connection]")
    expect(badge).to_be_visible()
    page.clock.run_for(5000)
    expect(badge).to_have_text("Signed out: sign in again")
    streams = collect_requests(page, "/live?")
    page.clock.run_for(300_000)
    assert streams == []


@pytest.mark.parametrize("path", ["/runs", "/runs/1", "/compare?runs=1", "/workers"])
def test_a_page_shows_how_long_the_server_is_unreachable(
    database: Database, running: Run, page: Page, path: str
) -> None:
    """During an outage the page shows the age of its data, until the server responds."""
    page.clock.install()
    with page.expect_response("**/live?*"):
        page.goto(path)
    page.route("**/live?*", lambda route: route.abort())
    page.evaluate("window.dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
    badge = page.locator("[data-connection]")
    expect(badge).to_have_text("reconnecting…")
    page.clock.run_for(45_000)
    said = re.compile(r"^the server has not answered for 40 s; numbers are of \d\d:\d\d:\d\d$")
    expect(badge).to_have_text(said)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.unroute("**/live?*")
    page.clock.run_for(60_000)
    expect(badge).to_be_hidden()


def test_earlier_lines_are_searched_too(database: Database, running: Run, page: Page) -> None:
    """Log lines fetched during a search show only their matches."""
    lines = [
        {"number": n, "attempt": 1, "time": 1.0, "stream": "stdout", "text": f"line {n}\x1b[0m"}
        for n in range(1, 1501)
    ]
    with database.writing() as session:
        telemetry.record(
            session, 1, 1, telemetry.Flush(log_lines=[LogRow(**each) for each in lines])
        )
    page.goto("/runs/1?tab=log")
    page.locator("[data-log-search]").fill("line 77")
    expect(page.locator("[data-log-found]")).to_have_text("10 of 1000 lines")
    page.get_by_role("button", name="Earlier lines").click()
    expect(page.locator("[data-log-found]")).to_have_text("11 of 1500 lines")
    shown = page.locator("[data-log-lines] > :not([hidden])")
    expect(shown).to_have_count(11)
    assert shown.first.text_content() == "line 77"


def test_smoothing_fetches_nothing_and_rarely_changes_the_url(
    database: Database, running: Run, page: Page
) -> None:
    """Smoothing uses loaded points, and changes the URL rarely, because Safari limits that."""
    page.add_init_script(
        """{
            const replace = history.replaceState.bind(history)
            window.replaced = 0
            history.replaceState = (...all) => { window.replaced++; replace(...all) }
        }"""
    )
    record(database, running, make_steps([1.0] * 20_000))
    page.goto("/runs/1?range=100,15000")
    page.wait_for_selector("[data-drawn]", state="attached")
    page.clock.install()
    series = collect_requests(page, "/series")
    before = page.evaluate("window.replaced")
    slider = page.locator("[data-charts] [data-view=smooth]")
    slider.evaluate(
        """(input) => {
            for (let n = 0; n < 40; n++) {
                input.value = n / 100
                input.dispatchEvent(new Event('input'))
            }
        }"""
    )
    page.clock.run_for(1000)
    page.wait_for_url("**smooth=0.39")
    assert page.evaluate("window.replaced") - before <= 3
    assert series == []
