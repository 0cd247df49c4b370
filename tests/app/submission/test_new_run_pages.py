"""The form of a new run, in a browser without scripts."""

from copy import deepcopy
from typing import Any

from fastapi import FastAPI
from starlette.testclient import TestClient

from db.access import accounts, projects
from db.access.permissions import VIEWER
from db.database import Database
from db.runs import runs
from db.tables import Run, User
from tests.app.auth.users_pages_made import browser_of
from tests.app.conftest import CONFIG, CPU, DIGITS, SCHEMA, submit
from tests.app.submission.new_run_pages_made import FORM
from tests.db.conftest import add_worker
from tests.marks import looped


def test_form_is_drawn_from_the_schema(offered: None, browser: TestClient) -> None:
    """Every field of the schema has its title, help text and default in the form."""
    page = browser.get("/runs/new", params={"recipe": "digits"}).text
    assert 'name="training.batch_size" value="64"' in page
    assert "Examples a step." in page
    assert 'name="precision" value="fp16" checked' in page


def test_without_workers_it_says_so(browser: TestClient) -> None:
    """Without workers the page says that no recipe can be offered, and what to start."""
    assert "halfstep worker" in browser.get("/runs/new").text


def test_a_viewer_gets_a_sentence_in_place_of_the_form(
    app: FastAPI, database: Database, offered: None
) -> None:
    """Viewers get the reason instead of the forms of runs and sweeps."""
    with database.writing() as session:
        viewer = accounts.make_user(session, "viola")
        projects.set_role(session, viewer, projects.DEFAULT, VIEWER)
    browser = browser_of(app, database, viewer)
    for address in ("/runs/new", "/sweeps/new"):
        answer = browser.get(address, headers={"accept": "text/html"})
        assert answer.status_code == 403
        assert (
            "Your role does not allow submitting runs; ask a maintainer of a project."
            in answer.text
        )
        assert 'class="run-form' not in answer.text


def test_submitting_queues_the_run(database: Database, offered: None, browser: TestClient) -> None:
    """Submitting an unchanged form queues a run with the recipe's configuration."""
    answer = browser.post("/runs", data=FORM | {"name": "first", "tags": "a"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs/1")
    with database.reading() as session:
        run = runs.get(session, 1)
        assert (run.name, run.tags, run.config) == ("first", "a", CONFIG)


@looped(
    "changes, path, message",
    [
        (
            {"training.batch_size": "5000"},
            "training.batch_size",
            "5000 is not valid; allowed: a whole number",
        ),
        (
            {"training.steps": "many"},
            "training.steps",
            "many is not valid; allowed: a whole number",
        ),
        ({"training.steps": ""}, "training.steps", "it is empty; allowed: a whole number"),
        ({"precision": "fp8"}, "precision", "fp8 is not valid; allowed: one of fp16, bf16, fp32"),
        ({"priority": "high"}, "priority", "high is not valid; allowed: a whole number"),
        ({"after_id": "77"}, "after_id", "there is no run 77"),
        ({"recipe": "gpt"}, "recipe", "There is no recipe"),
    ],
)
def test_errors_appear_at_their_fields_and_input_is_preserved(
    database: Database,
    offered: None,
    browser: TestClient,
    changes: dict[str, str],
    path: str,
    message: str,
) -> None:
    """An invalid form is shown again with the entered values and the errors; nothing is queued."""
    answer = browser.post("/runs", data=FORM | {"name": "kept"} | changes)
    assert answer.status_code == 422
    assert message in answer.text.replace("&#39;", "'")
    assert f'<a href="#{path}">' in answer.text
    assert 'value="kept"' in answer.text
    if path not in ("precision", "recipe"):
        assert f'name="{path}"' in answer.text
        assert f'value="{changes[path]}"' in answer.text
    with database.reading() as session:
        assert runs.newest(session) == []


def test_all_mistakes_are_shown_at_once(offered: None, browser: TestClient) -> None:
    """Mistakes in the queue's fields and in the recipe's are reported together."""
    changes = {"priority": "high", "training.steps": "0"}
    page = browser.post("/runs", data=FORM | changes).text
    assert '<a href="#priority">' in page
    assert '<a href="#training.steps">' in page


def test_clone_has_what_the_other_run_had(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """The form of a clone has the values of the original run."""
    config: dict[str, Any] = CONFIG | {"precision": "bf16", "scaler": {"init_scale": 2.0}}
    run = submit(database, ada, config=config, name="good", tags="x")
    page = browser.get("/runs/new", params={"from": run.id}).text
    said = f'Filled in with the settings of <a href="/runs/{run.id}">run {run.id}</a>'
    assert said in page
    again = {"recipe": "digits", "priority": "high", "filled_from": str(run.id)}
    assert said in browser.post("/runs", data=again).text
    assert 'name="precision" value="bf16" checked' in page
    assert 'name="scaler.init_scale" value="2"' in page
    assert 'value="good"' in page


def test_a_checkpoint_to_start_from_must_exist(
    database: Database, running: Run, browser: TestClient
) -> None:
    """The form accepts a checkpoint of another run to start from; a missing checkpoint is
    an error.
    """
    page = browser.get("/runs/new", params={"from": 1, "step": 40}).text
    assert 'name="parent_step" value="40"' in page
    answer = browser.post("/runs", data=FORM | {"parent_id": "1", "parent_step": "40"})
    assert answer.status_code == 422
    assert "no checkpoint at step 40" in answer.text


def test_a_number_that_is_too_small_is_reported_at_its_field(
    offered: None, browser: TestClient
) -> None:
    """After a number that is too small the form has the entered values and the allowed ones."""
    form = {"recipe": "digits", "precision": "fp16", "training.steps": "-3"}
    answer = browser.post("/runs", data=form)
    assert answer.status_code == 422
    assert 'value="-3"' in answer.text
    assert "-3 is not valid; allowed: a whole number of at least 1" in answer.text


def test_enter_starts_no_run(offered: None, browser: TestClient) -> None:
    """Pressing Enter starts no run, because the form's first button is disabled."""
    page = browser.get("/runs/new", params={"recipe": "digits"}).text
    form = page.partition("data-run-form")[2].partition("</form>")[0]
    assert form.index("<button disabled hidden>") < form.index("Start run</button>")
    assert form.count("<button") == 4  # and those that save a preset and copy the command
    assert (
        form.index('id="precision"') < form.index('id="training.steps"') < form.index('id="name"')
    )
    assert form.count('name="name"') == 1


def test_another_recipe_takes_over_changed_settings(
    database: Database, browser: TestClient
) -> None:
    """Choosing another recipe keeps the common fields that the user changed; values that it does
    not allow are named and left out.
    """
    other = deepcopy(SCHEMA)
    fields = other["properties"]["training"]["properties"]
    fields["batch_size"] |= {"maximum": 100, "default": 8}
    fields["steps"]["default"] = 50
    del other["properties"]["scaler"]
    add_worker(database, "w1", [DIGITS, {**DIGITS, "name": "other", "schema": other}], [CPU])
    form = FORM | {"name": "kept", "precision": "bf16", "training.batch_size": "1000"}
    changes = {"other": "other", "training.max_grad_norm": "0.5", "parent_id": "1"}
    page = browser.post("/runs/new", data=form | changes).text
    assert 'name="recipe" value="other"' in page
    assert 'value="kept"' in page
    assert 'value="bf16" checked' in page
    assert 'name="training.max_grad_norm" value="0.5"' in page
    assert 'name="training.steps" value="50"' in page
    assert 'name="training.batch_size" value="8"' in page
    assert "does not allow what was entered for Batch size:" in page
    assert 'name="parent_id"' not in page
    assert "No worker offers the recipe" in browser.post("/runs/new", data={"other": "x"}).text


def test_errors_use_labels(offered: None, browser: TestClient) -> None:
    """The error summary uses labels and takes the focus; the invalid field has the message."""
    wrong = {"training.steps": "0", "after_id": "77", "training.max_grad_norm": "-1"}
    page = browser.post("/runs", data=FORM | wrong).text
    assert ": -1 is not valid; allowed: " in page  # as it was typed, not -1.0
    assert '<a href="#training.steps">Steps</a>' in page
    assert '<a href="#after_id">After run</a>' in page
    assert "autofocus data-mistakes" in page
    assert 'aria-describedby="training.steps-hint training.steps-error" aria-invalid="true"' in page


def test_an_emptied_number_is_not_one_in_silence(offered: None, browser: TestClient) -> None:
    """An emptied required number is an error, although a form may omit the field."""
    typed = {"recipe": "digits", "precision": "fp16", "training.steps": "5"}
    typed |= {"training.batch_size": "8", "scaler.init_scale": "2"}
    page = browser.post("/runs", data={**typed, "nodes": "", "devices_per_node": " "})
    assert page.status_code == 422
    assert "it is empty; allowed: a whole number from 1 to 256" in page.text
    assert "it is empty; allowed: a whole number from 1 to 1024" in page.text
    assert browser.post("/runs", data=typed | {"after_id": ""}).status_code == 303
