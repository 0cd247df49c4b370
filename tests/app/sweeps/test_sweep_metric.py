"""A sweep's metric: a warning if no run logs it, and the choice of another one."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from app.submission.command_lines import Command
from app.sweeps import sweep_submission
from app.sweeps.pruning import Pruner
from app.sweeps.sweep_submission import SweepSubmission
from db.database import Database
from db.tables import LatestMetric, Run, User
from tests.app.conftest import submit
from tests.app.sweeps.sweep_submission_made import begin, finish
from tests.app.sweeps.test_sweeps_api import FORM, SWEEP

pytestmark = pytest.mark.usefixtures("offered")
MEANT = "No recent run of digits has logged val/acc; did you mean val/accuracy? "


def log(database: Database, run_id: int, **metrics: float) -> None:
    """Log metrics of a run; an underscore in a name stands for a slash."""
    with database.writing() as session:
        for name, value in metrics.items():
            row = {"name": name.replace("_", "/"), "step": 5, "value": value}
            session.add(LatestMetric(run_id=run_id, **row))


def test_a_metric_that_no_run_of_the_recipe_logged_is_a_warning(
    database: Database, ada: User, script: TestClient, browser: TestClient
) -> None:
    """Preview, response and page warn of a metric that no run of the recipe logged, if any has
    logged metrics.
    """
    form = FORM | {"metric": "val/acc"}
    assert "has logged" not in browser.post("/sweeps", data=form).text
    log(database, submit(database, ada).id, val_accuracy=0.9, lr=0.1)
    assert f"{MEANT}Logged: lr, val/accuracy." in browser.post("/sweeps", data=form).text
    unknown = browser.post("/sweeps", data=form | {"metric": "val/acuracy", "goal": ""}).text
    assert '<a href="#metric">Metric</a>: No recent run of digits' in unknown
    assert '<a href="#goal">Goal</a>: it is unknown whether a lower' in unknown
    assert "has logged" not in browser.post("/sweeps", data=form | {"metric": "lr"}).text
    begun = script.post("/api/v1/sweeps", json=SWEEP | {"metric": "val/acc"}).json()
    assert begun["warning"] == f"{MEANT}Logged: lr, val/accuracy."
    assert MEANT in browser.get("/sweeps/1").text
    assert script.post("/api/v1/sweeps", json=SWEEP | {"metric": "lr"}).json()["warning"] == ""


def test_a_metric_that_no_run_of_the_command_logged_is_a_warning(
    database: Database, ada: User
) -> None:
    """A metric logged only by runs of another command line has a warning."""
    command = {"line": "python train.py --lr {lr}", "parameters": {}}
    log(database, submit(database, ada).id, other=1)
    log(database, (run := submit(database, ada)).id, val_accuracy=0.9)
    with database.writing() as session:
        row = session.get_one(Run, run.id)
        row.recipe, row.command = "", command
        given = Command(line=command["line"])
        sweep = SweepSubmission(command=given, space={"lr": "0.1, 1"}, metric="val/acc", goal="")
        ada.runs_commands = True
        warning = sweep_submission.check(session, ada, sweep).warning
    assert warning.startswith("No recent run of train has logged val/acc; did you mean")
    assert warning.endswith("Logged: val/accuracy.")


def test_ended_runs_are_ranked_by_another_metric(
    database: Database, ada: User, script: TestClient, browser: TestClient
) -> None:
    """Choosing another metric, of those that runs logged, ranks the ended trials by its values."""
    begin(database, ada, at_once=3, metric="val/acc", goal="maximize")
    for run_id in (1, 2, 3):
        log(database, run_id, val_accuracy=run_id / 10)
        finish(database, run_id, 1 / run_id)
    sweep_submission.submit_due(database)
    before = script.get("/api/v1/sweeps/1").json()
    assert (before["status"], before["failed"], before["best"]) == ("finished", 3, None)
    assert before["metrics"] == ["loss", "val/accuracy"]
    page = browser.get("/sweeps/1").text
    assert "Logged: loss, val/accuracy." in page
    assert "<option selected>val/accuracy</option>" in page
    assert "with a value yet" not in page
    after = script.put("/api/v1/sweeps/1/metric", json={"metric": "val/accuracy"}).json()
    assert (after["goal"], after["failed"], after["best"]) == ("maximize", 0, 0.3)
    assert after["warning"] == ""
    browser.post("/sweeps/1/metric", data={"metric": "loss", "goal": ""})
    assert "<option selected>loss</option>" in browser.get("/sweeps/1").text
    trials = script.get("/api/v1/sweeps/1/trials?sort=value").json()["trials"]
    assert [(trial["run_id"], trial["value"]) for trial in trials] == [(3, 1 / 3), (2, 0.5), (1, 1)]


@pytest.mark.parametrize(
    ("body", "field"),
    [({"metric": "x"}, "goal"), ({"metric": ""}, "metric"), ({"metric": "x", "goal": "y"}, "goal")],
)
def test_a_metric_of_unknown_direction_requires_a_goal(
    database: Database, ada: User, script: TestClient, body: dict[str, Any], field: str
) -> None:
    """A metric of unknown direction needs a goal; a rejected change leaves the sweep as it is."""
    begin(database, ada)
    answer = script.put("/api/v1/sweeps/1/metric", json=body)
    assert (answer.status_code, field in answer.json()["errors"]) == (422, True)
    assert script.get("/api/v1/sweeps/1").json()["metric"] == "loss"


def test_the_metric_of_runs_that_a_pruner_ends_stays_until_they_have_ended(
    database: Database, ada: User, script: TestClient
) -> None:
    """While pruned runs are ending the metric cannot change: the pruner compares its values."""
    begin(database, ada, pruner=Pruner(kind="median"))
    body = {"metric": "val/accuracy"}
    assert script.put("/api/v1/sweeps/1/metric", json=body).status_code == 409
