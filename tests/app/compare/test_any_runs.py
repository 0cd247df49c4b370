"""Comparison of any runs: page, figures and series."""

import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from db.database import Database
from db.tables import Run, Status, User
from tests.app.compare.any_runs_made import train
from tests.app.conftest import start_run, submit
from tests.app.looks_made import collect_queries
from tests.db.telemetry.telemetry_made import (
    make_metric,
    make_skip,
    make_steps,
    record,
)


def cells(page: str, key: str) -> list[str]:
    """Return the texts of a row of the table."""
    row = page.partition(f'<tr data-key="{key}">')[2].partition("</tr>")[0]
    found = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
    return [" ".join(re.sub("<[^>]+>", " ", each).split()) for each in found]


def test_runs_are_in_the_requested_order(
    database: Database, ada: User, offered: None, script: TestClient
) -> None:
    """Compared runs keep their order with last and best figures; missing ones are named."""
    train(database, ada, [3.0, 1.0, 2.0], lr=0.1)
    train(database, ada, [3.0, 2.5, 2.4], lr=0.2, extra="x")
    answer = script.get("/api/v1/comparison", params={"runs": "2, 77,1,2"}).json()
    assert [each["run"]["id"] for each in answer["runs"]] == [2, 1]
    assert answer["missing"] == [77]
    assert answer["differences"] == {"training.lr": [0.2, 0.1], "training.extra": ["x", None]}
    second = answer["runs"][1]
    assert second["figures"]["loss"] == {"value": 2.0, "ratio": None}
    assert second["best"]["loss"]["value"] == 1.0
    assert second["best"]["val/accuracy"]["value"] == 0.5
    assert second["figures"]["val/score"]["value"] == 2.0
    assert "val/score" not in second["best"]  # its better direction is unknown


def test_a_setting_that_one_run_lacks_is_no_difference_of_the_others(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """Settings with several values come first and are named.

    The metric next to the loss, in the legend and as a panel, is one that most runs have and that
    is no mere counter.
    """
    for lr in (0.1, 0.2):
        run = train(database, ada, [3.0, 1.0], ended=False, lr=lr)
        record(database, run, events=[make_metric(1, 1.0, "epoch")])
    script = start_run(
        database, ada, name="script", config={"precision": "fp16", "training": {"steps": 400}}
    )
    record(
        database,
        script,
        make_steps([3.0]),
        events=[make_metric(1, 1.0, "a/own"), make_metric(1, 1.0, "epoch")],
    )
    page = browser.get("/compare?runs=1,2,3").text
    assert re.findall(r"differ in (.*?)</span>", page) == ['<b title="training.lr">lr</b>']
    keys = re.findall(r'<tr data-key="config\.([\w.]+)">', page)
    assert keys[0] == "training.lr"
    assert "training.batch_size" in keys
    assert len(re.findall(r'<td class="differs">', page)) == 3
    assert re.findall(r'data-figure="([^"]+)" data-of="3"', page) == ["loss", "val/accuracy"]
    assert re.findall(r'class="chart-panel" data-row="([^"]+)"', page)[:2] == [
        "loss",
        "val/accuracy",
    ]


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ({}, "runs: no run is given; allowed: comma-separated run ids"),
        ({"runs": "1,two"}, "runs: 'two' is not valid; allowed: comma-separated run ids"),
        ({"runs": "1,-2"}, "runs: '-2' is not valid"),
        ({"runs": "0"}, "runs: '0' is not valid"),
        ({"runs": "99999999999999999999"}, "runs: '999999999999' is not valid"),
        ({"runs": ",".join(map(str, range(1, 52)))}, "runs: 51 runs are given; allowed"),
        ({"runs": "1", "x": "colour"}, "x: 'colour' is not valid; allowed: step, applied, time"),
        ({"runs": "1", "smooth": "2"}, "smooth: '2': allowed: at most 0.99"),
        (
            {"runs": "1", "draw": list("abcdefghijklm")},
            "draw: 13 charts are given; allowed: at most 12",
        ),
    ],
)
def test_invalid_urls_name_the_allowed_values(
    running: Run, browser: TestClient, query: dict[str, Any], sentence: str
) -> None:
    """An invalid URL of a comparison gets the field, the value and the allowed values."""
    answer = browser.get("/compare", params=query)
    assert answer.status_code == 422
    text = answer.text.replace("&#39;", "'").replace("&#34;", '"')
    assert sentence in text


@pytest.mark.slow
def test_series_are_those_of_each_run(
    database: Database, ada: User, offered: None, script: TestClient
) -> None:
    """Only requested series and metrics are returned, with columns to convert steps to updates,
    seconds and examples.
    """
    losses = [float(n % 37) for n in range(3000)]
    for lr in (0.1, 0.2):
        train(database, ada, losses, lr=lr)
    with database.writing() as session:
        session.get_one(Run, 1).workload = {"examples": 64}
    query = {"runs": "2,1,77", "series": ["loss", "val/accuracy"], "points": 100}
    runs = script.get("/api/v1/comparison/series", params=query).json()["runs"]
    assert list(runs) == ["2", "1"]
    alone = script.get("/api/v1/runs/1/series", params={"points": 100}).json()
    assert set(runs["1"]["series"]) == {"loss", "elapsed_ms"}
    assert runs["1"]["series"]["loss"] == alone["series"]["loss"]
    assert runs["1"]["series"]["elapsed_ms"] == alone["series"]["elapsed_ms"]
    assert runs["1"]["metrics"] == {"val/accuracy": alone["metrics"]["val/accuracy"]}
    assert runs["1"]["skips"] == alone["skips"]
    assert (runs["1"]["examples"], runs["2"]["examples"]) == ({"before": 0, "each": 64}, None)
    query |= {"first": 2900, "last": 2950}
    part = script.get("/api/v1/comparison/series", params=query).json()["runs"]["1"]
    assert (part["x"], part["skips"]["before"]) == (list(range(2900, 2951)), 1)
    query["series"] = [str(n) for n in range(31)]
    refused = script.get("/api/v1/comparison/series", params=query)
    assert refused.json()["errors"] == {"series": "31 series are named; allowed: at most 30"}


def test_best_of_each_row_is_marked_where_it_is_known(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """The lowest loss and the highest accuracy are marked as best, but no score of unknown
    direction and no time of a shorter run.
    """
    train(database, ada, [3.0, 1.0, 2.0], lr=0.1)
    train(database, ada, [3.0, 2.5, 1.9, 1.8], lr=0.2)
    page = browser.get("/compare?runs=1,2,9").text
    assert "there is no run 9" in page.replace("\n", " ")
    assert cells(page, "loss") == ["2", "1.8 the best"]
    assert cells(page, "best.loss") == ["1 the best", "1.8"]
    assert cells(page, "best.val/accuracy") == ["0.5 the best", "0.3571"]
    assert cells(page, "val/score") == ["2", "1.8"]
    assert cells(page, "skipped") == ["1 33.3 % of its steps", "1 the best 25 % of its steps"]
    assert "the best" not in "".join(cells(page, "seconds"))
    assert cells(page, "config.training.lr") == ["0.1", "0.2"]
    assert cells(page, "config.training.batch_size") == []
    page = browser.get("/compare?runs=1,2&settings=all").text
    assert cells(page, "config.training.batch_size") == ["64", "64"]


def test_a_metric_called_loss_is_not_the_loss_that_is_recorded(
    database: Database, ada: User, offered: None, script: TestClient
) -> None:
    """Metrics with names of columns stay separate series; a run that only logs has no other
    loss.
    """
    both, logs = (start_run(database, ada, name=name) for name in ("both", "logs"))
    clash = [make_metric(2, 99.0, name) for name in ("loss", "seconds", "run/step_ms")]
    record(database, both, make_steps([3.0, 1.0, 2.0]), events=clash)
    record(database, logs, events=[make_metric(n, 9.0 - n, "loss") for n in (1, 2)])
    query: dict[str, Any] = {"runs": "1,2"}
    first, second = script.get("/api/v1/comparison", params=query).json()["runs"]
    assert (first["figures"]["loss"]["value"], first["best"]["loss"]["value"]) == (2.0, 1.0)
    assert first["figures"]["seconds"]["value"] is None
    assert first["best"].keys() == {"loss"}
    assert (second["figures"]["loss"]["value"], second["best"]["loss"]["value"]) == (7.0, 7.0)
    query |= {"series": "loss"}
    drawn = script.get("/api/v1/comparison/series", params=query).json()["runs"]
    assert drawn["1"]["series"]["loss"]["y"] == [3.0, 1.0, 2.0]
    assert drawn["2"]["metrics"]["loss"]["y"] == [8.0, 7.0]


def test_many_runs_are_rows(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """Up to eight runs are columns; fifty take as many queries as nine."""
    for _ in range(50):
        submit(database, ada, name="<b>hostile</b> " + "x" * 80)
    eight = browser.get("/compare?runs=1,2,3,4,5,6,7,8").text
    assert [each.partition(" ")[0] for each in cells(eight, "status")] == ["Queued"] * 8
    costs = []
    for most in (9, 50):
        address = f"/compare?runs={','.join(map(str, range(1, most + 1)))}"
        with collect_queries(database) as statements:
            page = browser.get(address).text
        costs.append(len(statements))
        assert cells(page, str(most))[0].startswith("Queued")
    assert costs[0] == costs[1] < 30, costs
    assert "<b>hostile" not in page
    assert "(50)</a>" in page  # of equal names


def test_missing_files_are_reported(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """A comparison names missing series and settings without differences; all runs missing is
    404.
    """
    train(database, ada, [1.0], lr=0.1)
    page = browser.get("/compare?runs=1&draw=val/lost&by=training.momentum").text
    text = page.replace("&#39;", "'")
    assert "None of these runs has 'val/lost'" in text
    assert "do not differ in 'training.momentum'" in text
    assert 'data-row="loss"' in page
    answer = browser.get("/compare?runs=5,6")
    assert (answer.status_code, "There are no runs 5, 6." in answer.text) == (404, True)


def test_a_run_leads_to_a_comparison_that_offers_others(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """The comparison offers the run's parent, its forks and other runs of its recipe."""
    for _ in range(3):
        submit(database, ada)
    with database.writing() as session:
        session.get_one(Run, 3).parent_id = 1
    assert 'href="/compare?runs=1"' in browser.get("/runs/1").text
    page = browser.get("/compare?runs=1").text
    assert re.findall(r'href="/compare\?runs=1,(\d)"', page) == ["3", "2"]
    assert "a fork of run 1" in page


def test_runs_of_all_kinds_are_compared(
    database: Database, ada: User, running: Run, browser: TestClient
) -> None:
    """Runs of all kinds are compared, including a watched run with any configuration.

    A run without a scaler is not the best one by skips.
    """
    record(database, running, make_steps([1.0] * 3, skipped=[2]), events=[make_skip(2)])
    odd: dict[str, Any] = {"scaler": "own", "checkpoints": None, "list": [1, {"a": 2}]}
    submit(database, ada)
    with database.writing() as session:
        run = session.get_one(Run, 2)
        run.source, run.recipe, run.config, run.precision = "watch", "", odd, ""
        run.status, run.workload = Status.FINISHED, {"examples": 1, "device": "their GPU"}
    page = browser.get("/compare?runs=1,2").text
    assert cells(page, "config.scaler.enabled") == ["true", "–"]
    assert cells(page, "config.scaler") == ["–", "own"]
    assert cells(page, "device") == ["CPU", "their GPU"]
    assert "the best" not in "".join(cells(page, "skipped"))


def test_runs_are_labelled_by_the_few_settings_that_differ(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """Legend and table have the differing settings without those that follow from the
    precision; runs that differ in many keep their names.
    """
    for precision in ("fp16", "fp32"):
        for lr in (0.1, 0.30000000000000004):
            run = train(database, ada, [1.0], lr=lr)
            with database.writing() as session:
                stored = session.get_one(Run, run.id)
                stored.config = stored.config | {"precision": precision}
                stored.precision = precision
    page = browser.get("/compare?runs=1,2,3,4").text
    legend = page.partition("data-legend>")[2].partition("</table>")[0]
    assert re.findall(r'<th[^>]* title="(.*?)"', legend)[0] == "precision, training.lr"
    assert re.findall(r'data-label="(.*?)"', legend) == [
        *("fp16 · lr 0.1", "fp16 · lr 0.3", "fp32 · lr 0.1", "fp32 · lr 0.3"),
    ]
    train(database, ada, [1.0], lr=0.1, a=1, b=2, c=3)
    page = browser.get("/compare?runs=1,5").text
    assert '<th title="">run</th>' in page
    for shuffle in (True, False):
        train(database, ada, [1.0], lr=0.1, shuffle=shuffle)
    page = browser.get("/compare?runs=6,7").text
    assert 'data-label="shuffle"' in page
    assert 'data-label="no shuffle"' in page


def test_no_star_stands_beside_fewer_skips(
    database: Database, ada: User, running: Run, browser: TestClient
) -> None:
    """A run without a loss scale skips nothing, so no other run gets the star for fewest skips."""
    record(database, running, make_steps([1.0] * 3, skipped=[2]), events=[make_skip(2)])
    unscaled = train(database, ada, [1.0] * 3)
    with database.writing() as session:
        other = session.get_one(Run, unscaled.id)
        other.precision, other.config = "bf16", other.config | {"precision": "bf16"}
    page = browser.get(f"/compare?runs={running.id},{unscaled.id}").text
    assert "the best" not in "".join(cells(page, "skipped"))


def test_a_setting_that_a_run_lacks_names_no_run_in_the_legend(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """Runs without shared settings, such as a watched script and a recipe's, have names as
    labels.
    """
    train(database, ada, [1.0])
    with database.writing() as session:
        watched = session.get_one(Run, train(database, ada, [1.0]).id)
        watched.source, watched.recipe, watched.config = "watch", "", {}
        watched.name = "my script"
    page = browser.get("/compare?runs=1,2").text
    legend = page.partition("data-legend>")[2].partition("</table>")[0]
    assert '<th title="">run</th>' in legend
    assert ">my script</a>" in legend
