"""Runs with many metric names: pages, the API and live updates are limited to a page of them."""

import json
from collections.abc import Sequence

import pytest
from starlette.testclient import TestClient

from app.live import run_updates
from app.telemetry.metric_names import MOST_SHOWN, Choice
from db.database import Database
from db.settings import Settings
from db.tables import Run, User
from tests.db.conftest import make_watched
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record

pytestmark = pytest.mark.sql_sample

MANY = 250
NAMES = [f"layer{number:03d}/norm" for number in range(MANY)]
SEARCH = 'role="search" data-metric-search>'


def log(database: Database, run: Run, step: int, names: Sequence[str] = NAMES) -> None:
    """Record one point of each name."""
    record(database, run, events=[make_metric(step, step / 8, name) for name in names])


@pytest.fixture
def many(database: Database, running: Run) -> Run:
    log(database, running, 1)
    return running


def test_page_shows_a_page_of_metrics(many: Run, browser: TestClient) -> None:
    """The table of metrics has the first hundred, and the search shows the total."""
    page = browser.get(f"/runs/{many.id}").text
    assert page.count("data-metric=") == MOST_SHOWN
    assert f"{MOST_SHOWN} of {MANY} metrics" in page
    assert f"<b data-metric-count>{MANY} metrics</b>" in page
    assert SEARCH in page


def test_page_finds_metrics_by_a_part_of_their_names(many: Run, browser: TestClient) -> None:
    """The search for metrics ignores case and takes SQL wildcards literally."""
    for search, found in (("LAYER12", 10), ("%", 0), ("_", 0), ("nothing", 0)):
        page = browser.get(f"/runs/{many.id}", params={"metric_search": search}).text
        assert page.count("data-metric=") == found, search
        assert 'name="metric_search"' in page


def test_names_are_in_order_of_their_numbers(
    database: Database, running: Run, script: TestClient
) -> None:
    """Numbers within names are sorted by value; a page continues after the last name."""
    names = ["b/layer1", "b/layer2", "b/layer10", "c/loss", "c2/loss", "c10/loss"]
    log(database, running, 1, names[::-1])
    run = f"/api/v1/runs/{running.id}"
    page = script.get(f"{run}/metrics/names?limit=2").json()
    assert (page["names"], page["total"], page["next"]) == (names[:2], 6, names[1])
    page = script.get(f"{run}/metrics/names", params={"limit": 4, "after": page["next"]}).json()
    assert (page["names"], page["next"]) == (names[2:], None)
    assert list(script.get(f"{run}/series").json()["metrics"]) == names
    found = script.get(f"{run}/metrics/summary?metric_search=layer").json()
    assert [row["name"] for row in found["metrics"]] == names[:3]
    figures = script.get(f"/api/v1/comparison?runs={running.id}").json()["runs"][0]["figures"]
    assert [name for name in figures if name in names] == names
    assert script.get("/api/v1/runs/autocomplete").json()["metrics"][-6:] == names


def test_page_of_few_metrics_has_no_search(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A run with few metrics has no search for them."""
    log(database, running, 1, NAMES[:3])
    page = browser.get(f"/runs/{running.id}").text
    assert "data-metric-search hidden" in page
    assert SEARCH not in page


def test_series_come_with_a_page_of_metrics(many: Run, script: TestClient) -> None:
    """Pages of metrics contain every name once; a name can be requested in addition."""
    address, result = f"/api/v1/runs/{many.id}/series", list[str]()
    after: str | None = ""
    for expected in (MOST_SHOWN, MOST_SHOWN, MANY - 2 * MOST_SHOWN):
        page = script.get(address, params={"metric_after": after}).json()
        assert (len(page["metrics"]), page["metrics_total"]) == (expected, MANY)
        result += page["metrics"]
        after = page["metrics_next"]
    assert result == NAMES
    assert after is None
    asked = {"metric_search": "LAYER1", "metric": [NAMES[200], "none"]}
    page = script.get(address, params=asked).json()
    assert list(page["metrics"]) == [*NAMES[100:200], NAMES[200]]


def test_names_come_in_order(many: Run, script: TestClient) -> None:
    """Metric names are sorted, in the whole list and in a page."""
    address = f"/api/v1/runs/{many.id}/metrics/names"
    assert script.get(address).json() == {"names": NAMES, "total": MANY, "next": None}
    page = script.get(address, params={"after": NAMES[99], "limit": 100}).json()
    assert page == {"names": NAMES[100:200], "total": MANY, "next": NAMES[199]}


def test_names_of_several_runs_are_searched_by_words(
    database: Database, many: Run, ada: User, script: TestClient
) -> None:
    """A search over several runs returns, in pages, each name once that can be drawn."""
    with database.writing() as session:
        other = session.get_one(Run, make_watched(session, ada, "other").run_id)
    events = [make_metric(1, 1.0, name) for name in (NAMES[0], "other/unit", "run/seconds")]
    record(database, other, make_steps([1.0]), events=events)
    address, runs = "/api/v1/comparison/metrics/names", f"{many.id},{other.id}"
    page = script.get(address, params={"runs": runs, "limit": 5000}).json()
    assert page == {"names": [*NAMES, "other/unit"], "total": MANY + 1, "next": None}
    words = {"runs": runs, "search": " UNIT  oth", "limit": 1}
    assert script.get(address, params=words).json()["names"] == ["other/unit"]
    compared = {"runs": runs, "metric": NAMES[-1]}
    figures = script.get("/api/v1/comparison", params=compared).json()["runs"][0]["figures"]
    assert NAMES[-1] in figures


def test_series_of_some_metrics_come_without_those_of_steps(
    database: Database, many: Run, script: TestClient
) -> None:
    """Panels that come into view request their metrics for the visible steps, up to a limit,
    without the series of steps.
    """
    log(database, many, 2, NAMES[:3])
    address = f"/api/v1/runs/{many.id}/metrics/series"
    answer = script.get(address, params={"metric": [*NAMES[1:3], "none"]}).json()
    assert {name: line["y"] for name, line in answer["metrics"].items()} == {
        name: [0.125, 0.25] for name in NAMES[1:3]
    }
    assert answer["cursor"] == script.get(f"/api/v1/runs/{many.id}/series").json()["cursor"]
    assert len(answer) == 2
    some = script.get(address, params={"metric": NAMES[1], "first": 2, "last": 2}).json()
    assert some["metrics"][NAMES[1]]["x"] == [2]
    assert script.get(address, params={"metric": ["a"] * 101}).status_code == 422


def test_summaries_come_a_page_at_a_time(many: Run, script: TestClient) -> None:
    """A page of summaries has each name with its latest value, extremes and number of points."""
    address, names = f"/api/v1/runs/{many.id}/metrics/summary", list[str]()
    after: str | None = ""
    while after is not None:
        page = script.get(address, params={"metric_after": after}).json()
        assert len(page["metrics"]) <= MOST_SHOWN
        names += [row["name"] for row in page["metrics"]]
        after = page["next"]
    assert names == NAMES
    row = {"name": NAMES[0], "step": 1, "value": 0.125, "low": 0.125, "high": 0.125, "points": 1}
    assert script.get(address).json()["metrics"][0] == row


def test_long_names_and_searches_are_rejected(many: Run, script: TestClient) -> None:
    """Names and searches are limited to the length of all typed texts."""
    for query in ({"metric_after": "a" * 501}, {"metric": ["a"] * 101}, {"metric_search": "\0"}):
        answer = script.get(f"/api/v1/runs/{many.id}/series", params=query)
        assert answer.status_code == 422, query


@pytest.mark.slow
def test_updates_have_the_visible_metrics(
    database: Database, settings: Settings, many: Run
) -> None:
    """Updates contain points and rows of the visible metrics only."""
    choice = Choice(search="layer24", named=(NAMES[7],))
    look = run_updates.of_run(database, settings, many.id, chosen=choice)
    first = look("")
    assert first is not None
    log(database, many, 2)
    second = look(first.cursor)
    assert second is not None
    result = json.loads(second.data)
    assert [point["name"] for point in result["metrics"]] == [NAMES[7], *NAMES[240:]]
    assert result["rows"]["metrics"]["keys"] == NAMES[240:]
    assert result["rows"]["metrics"]["html"].count("data-metric=") == MANY - 240
    assert result["metric_names"] == MANY
    everything = run_updates.of_run(database, settings, many.id)(first.cursor)
    assert everything is not None
    assert len(json.loads(everything.data)["metrics"]) == MOST_SHOWN


@pytest.mark.slow
def test_updates_of_metrics_in_view_have_no_others(
    database: Database, settings: Settings, many: Run
) -> None:
    """Updates of visible metrics read neither points nor rows of the others, whose number
    is known.
    """
    choice = Choice(limit=0, named=(NAMES[7], NAMES[8]))
    look = run_updates.of_run(database, settings, many.id, chosen=choice)
    first = look("")
    assert first is not None
    log(database, many, 2, [*NAMES, "new"])
    second = look(first.cursor)
    assert second is not None
    result = json.loads(second.data)
    assert [point["name"] for point in result["metrics"]] == [NAMES[7], NAMES[8]]
    assert "metrics" not in result["rows"]
    assert result["metric_names"] == MANY + 1
    log(database, many, 3, NAMES[100:])
    third = look(second.cursor)
    assert third is not None
    assert json.loads(third.data)["metrics"] == []
    assert look(third.cursor) is None
