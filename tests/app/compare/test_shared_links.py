"""Read-only links: who can create them and what they give access to."""

import re
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import update
from starlette.testclient import TestClient

from app.auth.permissions import SHARED_LINK, access_of
from db.access import accounts, projects
from db.access.permissions import MAINTAINER, MEMBER, VIEWER
from db.database import Database
from db.queue import queue
from db.runs import trash
from db.tables import COMMAND, WATCH, Run, SharedLink, SharedRun, Status, User
from tests.app.auth.permissions_made import routes_of
from tests.app.auth.users_pages_made import browser_of
from tests.app.compare.shared_links_made import open_link
from tests.app.conftest import start_run, submit
from tests.db.telemetry.telemetry_made import make_events, make_metric, make_steps, record

pytestmark = pytest.mark.slow

PROJECT, HIDDEN = "vision", "hush-hush"


@pytest.fixture
def member(database: Database, ada: User, offered: None) -> User:
    """A user who may share runs of a project, and is no admin."""
    with database.writing() as session:
        projects.make(session, PROJECT)
        user = accounts.make_user(session, "mel")
        projects.set_role(session, user, PROJECT, MEMBER)
    return user


@pytest.fixture
def run(database: Database, ada: User, member: User) -> Run:
    """A run of the project shared with the member, with data to show."""
    run = start_run(database, ada, project=PROJECT, name="shown")
    events = [*make_events([3]), make_metric(5, 0.5)]
    record(database, run, make_steps([1.0] * 20, skipped=[3]), events=events)
    return run


def share(client: TestClient, *run_ids: int, days: int = 7) -> str:
    """Make a link; return its secret."""
    answer = client.post("/api/v1/links", json={"runs": run_ids, "days": days})
    assert answer.status_code == 201, answer.text
    path, _, secret = answer.json()["address"].partition("#")
    assert path == "/shared"
    return str(secret)


def test_a_link_opens_what_it_shows_and_no_other_route(
    app: FastAPI, database: Database, ada: User, member: User, run: Run, stranger: TestClient
) -> None:
    """A read-only link's cookie opens its run's routes; any other requires a sign-in or is
    missing.
    """
    other = submit(database, ada, project=PROJECT, name=HIDDEN)
    with database.writing() as session:
        session.get_one(Run, run.id).parent_id = other.id
    client = browser_of(app, database, member)
    page = open_link(stranger, share(client, run.id))
    (cookie,) = stranger.cookies.jar
    assert (cookie.path, cookie.has_nonstandard_attr("HttpOnly")) == (page, True)
    headers = {"cookie": f"{cookie.name}={cookie.value}"}
    link = page.rpartition("/")[2]
    answered = set()
    for method, path, endpoint in routes_of(app):
        need = access_of(endpoint).need
        for run_id in (run.id, other.id):
            ids = {"run_id": str(run_id), "link_id": link}
            address = re.sub(r"\{(\w+)[^}]*\}", lambda m, ids=ids: ids.get(m[1], "1"), path)
            params = {"runs": str(run_id), "series": "loss", "metric": "loss", "group": "recipe"}
            answer = stranger.request(method, address, params=params, headers=headers)
            label = f"{method} {address}: {answer.status_code}"
            if "{image_id}" in path and need == SHARED_LINK:  # of a report, not a run
                assert answer.status_code == 404, label
                answered.add(endpoint)
            elif need == SHARED_LINK and ("{run_id" not in path or run_id == run.id):
                assert answer.status_code == 200, label
                answered.add(endpoint)
            elif need == SHARED_LINK:
                assert answer.status_code == 404, label
            else:
                is_led = answer.headers.get("location", "").startswith("/sign-in?next=")
                assert is_led or answer.status_code == 401, label
            assert HIDDEN not in answer.text, label
    assert answered == {each for *_, each in routes_of(app) if access_of(each).need == SHARED_LINK}
    series = f"{page}/comparison/series?runs={run.id},{other.id}&series=loss"
    assert list(stranger.get(series).json()["runs"]) == [str(run.id)]


def test_a_shared_run_is_there_to_look_at(
    app: FastAPI, database: Database, member: User, run: Run, stranger: TestClient
) -> None:
    """A shared run's page has figures, skips, metrics, settings and history, without actions,
    downloads or users; the secret is neither in a URL nor on the page.
    """
    with database.writing() as session:
        session.get_one(Run, run.id).nodes = 2
    secret = share(browser_of(app, database, member), run.id)
    answer = stranger.get("/shared")
    assert "data-open-link" in answer.text
    assert answer.headers["x-robots-tag"] == "noindex"
    page = open_link(stranger, f" http://localhost/shared#{secret} ")
    answer = stranger.get(page)
    assert answer.headers["x-robots-tag"] == "noindex"
    assert answer.headers["referrer-policy"] == "no-referrer"
    for label in ("shown", "2 nodes", "Shared by mel", "batch_size", "20", "Running"):
        assert label in answer.text
    ways = ("<form", "/api/v1", "/runs?", 'href="/runs', "/export/", "/help")
    for absent in (secret, "w1", "claimed by", PROJECT, *ways):
        assert absent not in answer.text, absent
    assert stranger.get(f"{page}/runs/{run.id}/series").json()["last"] == 20
    assert stranger.get("/runs").status_code == 303


@pytest.mark.parametrize("source", [WATCH, COMMAND])
def test_a_shared_run_without_a_recipe_has_its_kind_instead(
    app: FastAPI, database: Database, member: User, run: Run, stranger: TestClient, source: str
) -> None:
    """The heading of a shared run without a recipe does not begin with a separator."""
    with database.writing() as session:
        row = session.get_one(Run, run.id)
        row.source, row.recipe = source, ""
    page = stranger.get(open_link(stranger, share(browser_of(app, database, member), run.id))).text
    kind = {WATCH: "watched", COMMAND: "command"}[source]
    assert f'<span class="meta">{kind} · ' in page


def test_runs_side_by_side_are_shared_in_their_order(
    app: FastAPI, database: Database, ada: User, member: User, run: Run, stranger: TestClient
) -> None:
    """A shared comparison keeps its order, without deleted runs and without pending reasons."""
    runs = [submit(database, ada, project=PROJECT, after_id=run.id).id for _ in range(2)]
    page = open_link(stranger, share(browser_of(app, database, member), runs[1], run.id, runs[0]))
    answer = stranger.get(page)
    assert f'data-runs="{runs[1]},{run.id},{runs[0]}" data-api="{page}"' in answer.text
    for absent in ('href="/runs', "<form", "add-runs", f"run {run.id} to end"):
        assert absent not in answer.text, absent
    found = stranger.get(f"{page}/comparison").json()
    assert [each["run"] for each in found["runs"]] == [
        {"step": step, "skipped": skipped} for step, skipped in ((0, 0), (20, 1), (0, 0))
    ]
    with database.writing() as session:
        queue.end(session, run.id, 1, Status.FINISHED)
        trash.delete(session, run.id, ada)
    assert f'data-runs="{runs[1]},{runs[0]}"' in stranger.get(page).text


def test_a_link_ends(
    app: FastAPI, database: Database, ada: User, member: User, run: Run, stranger: TestClient
) -> None:
    """A link ends at its time, when it is revoked, or when its creator may no longer
    share the run.
    """
    client = browser_of(app, database, member)

    def is_open(page: str) -> bool:
        code = stranger.get(page).status_code
        assert code in (200, 401)
        assert stranger.get(f"{page}/runs/{run.id}/series").status_code == code
        return code == 200

    pages = [open_link(stranger, share(client, run.id)) for _ in range(2)]
    assert all(map(is_open, pages))
    assert client.delete(f"/api/v1/links/{pages[0].rpartition('/')[2]}").status_code == 204
    assert list(map(is_open, pages)) == [False, True]
    with database.writing() as session:
        projects.set_role(session, member, PROJECT, VIEWER)
    assert not is_open(pages[1])
    with database.writing() as session:
        projects.set_role(session, member, PROJECT, MAINTAINER)
    assert is_open(pages[1])
    with database.writing() as session:
        session.execute(update(SharedLink).values(expires_at=1.0))
    assert not is_open(pages[1])
    secret = share(client, run.id)
    page = open_link(stranger, secret)
    with database.writing() as session:
        accounts.deactivate(session, session.get_one(User, member.id))
        accounts.reactivate(session, session.get_one(User, member.id))
    assert not is_open(page)
    assert stranger.post("/shared", data={"secret": secret}).status_code == 401
    with database.reading() as session:
        assert session.query(SharedRun).count() == 0
    del stranger.headers["origin"]
    assert stranger.post("/shared", data={"secret": secret}).status_code == 403


def test_links_are_made_by_those_who_may(
    app: FastAPI, database: Database, ada: User, member: User, run: Run, browser: TestClient
) -> None:
    """Users create links to runs that they may share, in a browser or by the API. A project's
    maintainers see and revoke those of others, and the secret is not stored.
    """
    with database.writing() as session:
        viewer, boss, peer = (accounts.make_user(session, each) for each in ("vi", "bo", "pe"))
        for user, role in ((viewer, VIEWER), (boss, MAINTAINER), (peer, MEMBER)):
            projects.set_role(session, user, PROJECT, role)
    other = submit(database, ada)
    client = browser_of(app, database, member)
    page = client.post("/links", data={"runs": str(run.id), "days": "30"}).text
    assert f'<a class="crumb" href="/runs/{run.id}">{run.name}</a><h1>Share</h1>' in page
    assert 'class="secret">http://localhost/shared#' in page
    panel = client.get(f"/runs/{run.id}").text.partition("Share…")[2].partition("</details>")[0]
    assert "/links/1/revocation" in panel
    assert "#" not in panel
    refused = client.post("/links", data={"runs": str(run.id), "days": "365"})
    assert (refused.status_code, "allowed: 1, 7, 30, 90" in refused.text) == (422, True)
    wrongs: tuple[tuple[Any, int], ...] = (
        ([run.id, other.id], 404),
        ([], 422),
        ([run.id] * 51, 422),
        ([999], 404),
    )
    for runs, status in wrongs:
        assert client.post("/api/v1/links", json={"runs": runs}).status_code == status
    (row,) = client.get(f"/api/v1/links?runs={run.id}").json()["links"]
    assert (row["user"], row["runs"]) == ("mel", 1)
    assert round(row["expires_at"] - row["created_at"]) == 30 * 86_400
    wanted = {"runs": [run.id]}
    looker = browser_of(app, database, viewer)
    assert looker.post("/api/v1/links", json=wanted).status_code == 403
    assert looker.get(f"/api/v1/links?runs={run.id}").status_code == 403
    assert "Share…" not in looker.get(f"/runs/{run.id}").text
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, member, "script")
    script = TestClient(
        app, headers={"Authorization": f"Bearer {token}"}, base_url="http://localhost"
    )
    assert script.post("/api/v1/links", json=wanted).status_code == 403
    address = f"/links/{row['id']}/revocation"
    assert browser_of(app, database, peer).post(address).status_code == 404
    assert browser_of(app, database, boss).post(address).status_code == 303
    assert client.get(f"/api/v1/links?runs={run.id}").json()["total"] == 0
    (made,) = browser.get(f"/api/v1/audit?user=MEL&run={run.id}").json()["audit_events"]
    assert made["detail"] == f"runs {run.id}, days 30"
