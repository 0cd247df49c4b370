"""The list of runs and its bulk actions."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from db.database import Database
from db.queue import pending_reasons, queue
from db.runs import config_values, runs
from db.runs.run_filters import InStatus, Term
from db.tables import Run, Status, User
from tests.app.conftest import submit
from tests.db.telemetry.telemetry_made import make_events, make_steps, record


def test_a_newcomer_sees_the_next_step(browser: TestClient) -> None:
    """Without runs and workers, the page says how to get both."""
    page = browser.get("/runs").text
    assert "halfstep worker" in page
    assert 'href="/runs/new"' in page


def test_row_shows_where_a_run_is(database: Database, running: Run, browser: TestClient) -> None:
    """A row of the list has status, steps, scale, skips, owner and a sparkline of the loss."""
    record(database, running, make_steps([3.0, 2.0, 1.5], skipped=[1]))
    page = browser.get("/runs").text
    assert 'data-status="running"' in page
    assert "3 / 400" in page
    assert "2<sup>19</sup>" in page
    assert 'aria-label="Loss from 3 to 1.5"' in page


def test_what_a_run_does_not_have_is_a_dash_in_the_list_and_on_its_page(
    database: Database, ada: User, browser: TestClient
) -> None:
    """Skipped and applied steps before the first step, and the loss-scale health of a run without a
    scale, are dashes.
    """
    submit(database, ada)
    page = browser.get("/runs").text
    assert '<td class="number" data-column="skipped"><span class="quiet">–</span>' in page
    assert '<td data-column="health"><span class="quiet">–</span>' in page
    page = browser.get("/runs/1").text
    assert '<span data-fact="skipped">–</span>' in page
    assert '<span data-fact="applied">–</span>' in page


def test_a_share_of_all_steps_is_stated_as_all(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A share of all steps is shown as "100 %", because "100.0 %" would be cut off."""
    record(database, running, make_steps([1.0, 1.0], skipped=[1, 2]))
    assert "<small>100 %</small>" in browser.get("/runs/1").text


def test_a_run_that_lost_its_loss_says_so(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A run that finished with a NaN loss is marked so in the list and on its page."""
    record(database, running, make_steps([1.0, float("nan")]))
    assert "<span>NaN</span>" in browser.get("/runs").text
    with database.writing() as session:
        queue.end(session, running.id, running.attempt, Status.FINISHED)
    for path in ("/runs?filter=status:diverged", "/runs/1"):
        page = browser.get(path).text
        assert 'data-outcome="diverged" title="Finished">Diverged</span>' in page
        assert "NaN</" in page
    diagnosis = page.partition('aria-label="Diagnosis"')[2].partition("</section>")[0]
    assert "Diagnosis · loss NaN" in diagnosis
    assert "checkpoint" not in diagnosis  # it may have none, and its last one has these weights
    assert browser.get("/api/v1/runs/1").json()["outcome"] == "diverged"


def test_a_run_that_applied_nothing_says_so(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A run whose steps were all skipped is not shown as a success."""
    record(database, running, make_steps([1.0, 1.0], skipped=[1, 2]), events=make_events([1, 2]))
    with database.writing() as session:
        queue.end(session, running.id, running.attempt, Status.FINISHED)
    for path in ("/runs?filter=status:no_updates", "/runs/1"):
        page = browser.get(path).text
        assert 'data-outcome="no_updates" title="Finished">No updates</span>' in page
    assert "Each of its 2 steps was skipped" in page


def test_a_run_that_a_rule_has_stopped_is_no_error_in_the_code(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A run that a configured rule stopped shows no error."""
    record(database, running, make_steps([1.0]))
    with database.writing() as session:
        reason = "step 1 was skipped although the loss scale, 16, is at its floor"
        said = {"reason": reason, "error": reason, "failure_kind": "rule"}
        queue.end(session, running.id, running.attempt, Status.FAILED, **said)
    browser.patch("/api/v1/runs/1", json={"name": "a remark follows"})
    for path in ("/runs?filter=status:stopped", "/runs/1"):
        page = browser.get(path).text
        assert 'data-outcome="stopped" title="Failed">Stopped by rule</span>' in page
    assert f"<b>Stopped by rule.</b> A rule of its configuration: {reason}" in page
    assert "an error in the code" not in page


def test_queued_run_shows_place_and_reason(
    database: Database, ada: User, running: Run, browser: TestClient
) -> None:
    """A queued run shows its position and the reason why it waits."""
    for _ in range(2):
        submit(database, ada)
    page = browser.get("/runs").text
    assert f"<b>next</b> the only device is used by run 1 ({running.name})" in page
    assert "<b>#2 in the queue</b> 1 run is ahead: 2 (digits-fp16)" in page


def test_filter_stays_in_the_form(database: Database, ada: User, browser: TestClient) -> None:
    """The filter in the URL is applied and shown in the form."""
    for name in ("alpha", "beta"):
        submit(database, ada, name=name)
    page = browser.get("/runs", params={"filter": 'alp -"x y"'}).text
    assert 'title="alpha"' in page
    assert 'title="beta"' not in page
    assert 'value="alp -&#34;x y&#34;"' in page
    assert "1 run matches" in page


def test_actions_on_an_older_page_lead_back_to_it(
    database: Database, ada: User, running: Run, browser: TestClient
) -> None:
    """A button of the list returns to the page that it was on."""
    submit(database, ada)
    page = browser.get("/runs?filter=d&sort=-loss&columns=name,lr&before=1").text
    assert "No run matches" in page
    page = browser.get("/runs?filter=d&columns=name,lr&before=2").text
    assert 'name="back" value="/runs?filter=d&amp;columns=name%2Clr&amp;before=2"' in page


def test_user_input_is_escaped(database: Database, ada: User, browser: TestClient) -> None:
    """Markup in a name is shown as text."""
    run = submit(database, ada, name="<script>alert(1)</script>", tags="<b>")
    for address in ("/runs", f"/runs/{run.id}"):
        page = browser.get(address).text
        assert "<script>alert" not in page
        assert "&lt;script&gt;alert" in page


def test_selected_runs_are_cancelled_together(
    database: Database, ada: User, running: Run, browser: TestClient
) -> None:
    """The bulk action cancels active runs and returns to the same list."""
    for _ in range(2):
        submit(database, ada)
    browser.post("/runs/3/cancellation")
    form = {"run": ["1", "2", "3"], "back": "/runs?filter=d"}
    answer = browser.post("/runs/cancellation", data=form)
    location = answer.headers["location"]
    assert (answer.status_code, location) == (303, "/runs?filter=d&ended=1")
    assert "1 of these runs had ended already" in browser.get(location).text
    with database.reading() as session:
        found = [runs.get(session, run_id).status for run_id in (1, 2, 3)]
    assert found == [Status.STOPPING, Status.CANCELLED, Status.CANCELLED]


def test_a_run_that_no_worker_can_take_says_so(
    database: Database, ada: User, browser: TestClient
) -> None:
    """The row of a run that no worker can take has the reason instead of a queue position."""
    submit(database, ada)
    cell = browser.get("/runs").text.partition('class="queue-place"')[2].partition("</div>")[0]
    assert ">no worker reports at the moment</span>" in cell


@pytest.mark.sql
def test_waiting_runs_are_put_in_another_order(
    database: Database, ada: User, running: Run, browser: TestClient
) -> None:
    """A row's buttons move a queued run to the front or change its priority, and redirect back."""
    for _ in range(3):
        submit(database, ada)
    page = browser.get("/runs").text
    assert "/runs/1/place" not in page  # it trains
    assert "/runs/2/place" not in page  # it is next
    assert 'formaction="/runs/4/place"' in page
    assert 'formaction="/runs/3/priority" name="priority" value="-1"' in page
    answer = browser.post("/runs/4/place", data={"back": "/runs?filter=d"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs?filter=d")
    assert list_queued(database) == [4, 2, 3]
    browser.post("/runs/3/priority", data={"priority": "1"})
    assert list_queued(database) == [3, 4, 2]
    assert "priority 1" in browser.get("/runs").text
    browser.post("/runs/2/place")  # takes over the priority of the first
    assert list_queued(database) == [2, 3, 4]
    assert browser.post("/runs/2/place").status_code == 303  # it is there already
    assert browser.post("/runs/1/place").status_code == 409
    assert browser.post("/runs/3/priority", data={"priority": "101"}).status_code == 422
    assert list_queued(database) == [2, 3, 4]


def list_queued(database: Database) -> list[int]:
    """Return the ids of queued runs, next first."""
    with database.reading() as session:
        return list(pending_reasons.Queue.read(session).places)


@pytest.mark.sql
def test_two_who_cancel_the_same_runs_in_opposite_orders_do_not_wait_for_each_other(
    database: Database, ada: User, browser: TestClient
) -> None:
    """Two requests that cancel the same runs in opposite orders lock them by id, so neither
    deadlocks.
    """
    ids = [str(submit(database, ada).id) for _ in range(40)]
    together = threading.Barrier(2)

    def cancel(ticked: list[str]) -> int:
        together.wait()
        return browser.post("/runs/cancellation", data={"run": ticked}).status_code

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(cancel, (ids, ids[::-1]))) == [303, 303]
    with database.reading() as session:
        ended = [Term(InStatus((Status.CANCELLED,)))]
        rows = runs.newest(session, conditions=ended, limit=100)
        assert len(rows) == len(ids)
        histories = [runs.statuses(session, run.id) for run, _owner in rows]
    assert all([each.status for each in found][1:] == ["cancelled"] for found in histories)


def test_the_learning_rate_of_a_script_has_its_column(
    database: Database, ada: User, browser: TestClient
) -> None:
    """The column of a script's learning rate is found as lr and as learning_rate."""
    submit(database, ada)
    with database.writing() as session:
        run = session.get_one(Run, 1)
        run.config = run.config | {"lr": 0.625}
        config_values.note(session, run)
    for name in ("lr", "learning_rate"):
        assert ">0.625</td>" in browser.get(f"/runs?columns=name,{name}").text
