"""The grouped list of runs: page and API."""

import re
from typing import Any

import pytest
from sqlalchemy import select
from starlette.testclient import TestClient

from app.runs import filters, grouping
from db.access import accounts
from db.database import Database
from db.runs.grouping import GROUPED_BY
from db.tables import LatestMetric, Run, User
from tests.app.conftest import CONFIG, submit
from tests.app.looks_made import collect_queries
from tests.marks import looped

pytestmark = pytest.mark.sql_sample


@pytest.fixture
def some(database: Database, ada: User) -> None:
    """Five runs with three batch sizes; the name of one needs quotes in a filter."""
    for number, (size, tags) in enumerate(
        ((8, "a b"), (8, '"q"'), (16, ""), (None, "x,y"), (8, "x")), start=1
    ):
        training: dict[str, Any] = {"steps": 400} | ({"batch_size": size} if size else {})
        run = submit(database, ada, config=CONFIG | {"training": training}, tags=tags)
        with database.writing() as session:
            session.get_one(Run, run.id).loss = float(number)
            value = {"run_id": run.id, "name": "val/accuracy", "step": 1, "value": number / 10}
            session.add(LatestMetric(**value))


@pytest.mark.slow
def test_each_groups_filter_lists_its_runs(
    database: Database, some: None, script: TestClient, ada: User
) -> None:
    """A group's filter lists as many runs as the group has, for any grouping."""
    for by in ("batch_size", "tag", "recipe", "project", "owner", "sweep", "source", "enabled"):
        query = {"group": by, "filter": "digits", "values": "loss,val/accuracy"}
        answer = script.get("/api/v1/runs/groups", params=query).json()
        assert answer["total"] == len(answer["groups"])
        for group in answer["groups"]:
            listed = script.get("/api/v1/runs", params={"filter": group["filter"]}).json()
            assert (listed["total"], listed["notes"]) == (group["runs"], []), group
            assert listed["runs"][0]["id"] == group["newest"]
    wrong = script.get("/api/v1/runs/groups", params={"group": "batch_size", "sort": "-name"})
    assert "'-name' is not valid; allowed: id, runs, batch_size, loss" in wrong.json()["detail"]
    groups = script.get("/api/v1/runs/groups", params={"group": "batch_size"}).json()["groups"]
    assert [(each["value"], each["filter"]) for each in groups] == [
        (8.0, "training.batch_size=8"),
        (None, "-has:training.batch_size"),
        (16.0, "training.batch_size=16"),
    ]
    assert groups[0]["figures"]["loss"]["mean"] == pytest.approx(8 / 3)
    assert groups[0]["statuses"] == {"queued": 3}


@pytest.mark.slow
def test_a_setting_may_have_the_name_of_a_column_or_a_metric(
    database: Database, script: TestClient, ada: User
) -> None:
    """A setting with the name of a column or metric can be grouped by: filters list its runs, and
    completion has its whole name.
    """
    configs: list[dict[str, Any]] = [
        {"status": "alive", "loss": "mse", "id": 7, "name": "a", "lr": 0.1},
        {"status": "alive", "loss": "l1", "id": 8, "name": "b", "lr": 0.2},
        {},
    ]
    for config in configs:
        run = submit(database, ada, config=CONFIG | config)
        with database.writing() as session:
            session.add(LatestMetric(run_id=run.id, name="lr", step=1, value=0.1))
    for by in ("status", "settings.status", "loss", "id", "name", "lr"):
        groups = script.get("/api/v1/runs/groups", params={"group": by}).json()["groups"]
        assert len(groups) == 2 + ("status" not in by)
        for group in groups:
            listed = script.get("/api/v1/runs", params={"filter": group["filter"]}).json()
            assert (listed["total"], listed["notes"]) == (group["runs"], []), group
            assert listed["runs"][0]["id"] == group["newest"]
    words = script.get("/api/v1/runs/autocomplete").json()["settings"]
    assert {f"settings.{name}" for name in ("status", "loss", "id", "name")} <= {*words}


def test_a_row_for_each_group_with_mean_spread_and_best(
    database: Database, some: None, browser: TestClient
) -> None:
    """A group's row has mean, spread and best value and links to its runs; groups need no extra
    queries, and an unknown name is an error.
    """
    address = "/runs?group=batch_size&columns=name,loss,val/accuracy,owner&sort=-loss"
    with collect_queries(database) as statements:
        page = browser.get(address).text
    assert len(statements) <= 20
    body = page.partition("data-groups")[2].partition(">")[2].partition("</tbody>")[0]
    rows = [" ".join(re.sub("<[^>]+>", " ", row).split()) for row in body.split("</tr>")[:-1]]
    assert rows == [
        "no batch_size 1 1 Queued 4 0.4",
        "16 1 1 Queued 3 0.3",
        "8 3 3 Queued 2.667 ± 2.082 best 1 0.2667 ± 0.2082 best 0.5",
    ]
    columns = "&amp;columns=name%2Closs%2Cval%2Faccuracy%2Cowner"
    assert f'href="/runs?filter=training.batch_size%3D8{columns}"' in body
    assert "Group by" not in rows
    assert 'aria-sort="descending" title="Loss"' in page
    other = browser.get("/runs?group=batchsize&filter=digits").text
    assert "There is no setting batchsize" in other
    assert browser.get("/runs?group=tag&filter=nothing").text.count("No run matches") == 1
    assert browser.get(f"/runs?group={'g' * 201}").status_code == 422


def test_a_group_says_its_value_once_and_rounded(
    database: Database, ada: User, some: None, browser: TestClient
) -> None:
    """The grouped setting gets no column of its own, and equal values get no deviation."""
    page = browser.get("/runs?group=batch_size&columns=name,batch_size,steps").text
    table = page.partition("<thead")[2].partition("</table>")[0]
    assert table.count('data-column="batch_size"') == 1
    assert 'data-column="steps"' in table
    assert "±" not in table
    training = CONFIG["training"] | {"lr": 0.05517662192999636}
    submit(database, ada, config=CONFIG | {"training": training})
    page = browser.get("/runs?group=lr").text
    assert ">0.05518</a>" in page
    assert 'title="0.05517662192999636: its runs"' in page


def test_a_group_has_the_range_of_its_loss_scales(
    database: Database, some: None, browser: TestClient
) -> None:
    """Loss scales are shown as a range of powers of two, without a mean, which no scaler uses."""
    with database.writing() as session:
        for run, power in zip(
            session.scalars(select(Run).order_by(Run.id)), (-30, 16, 9), strict=False
        ):
            run.scale = 2.0**power
    page = browser.get("/runs?group=batch_size&columns=name,scale").text
    cells = re.findall(r'data-column="Scale">\s*(.*?)\s*</td>', page)
    assert sorted(cells) == sorted(["–", "2<sup>−30</sup> to 2<sup>16</sup>", "2<sup>9</sup>"])


def test_groups_whose_runs_share_seeds_lead_to_their_parity(
    database: Database, ada: User, script: TestClient, browser: TestClient
) -> None:
    """All groups together link to their parity, and so do groups whose runs also differ in another
    setting.
    """
    for tag, precision, rate, seeds in (
        ("one", "fp16", 0.1, (0, 1)),
        ("one", "fp32", 0.1, (0, 1)),
        ("two", "fp32", 0.2, (0, 1, 2, 3)),
    ):
        for seed in seeds:
            training = {"steps": 400, "seed": seed, "lr": rate}
            submit(database, ada, config=CONFIG | {"training": training}, tags=tag)
            with database.writing() as session:
                run = session.scalars(select(Run).order_by(Run.id.desc()).limit(1)).one()
                run.config = {**run.config, "precision": precision}
                run.precision = precision

    def find_paired(**query: str) -> tuple[list[int], dict[Any, list[int]]]:
        found = script.get("/api/v1/runs/groups", params=query).json()
        return found["paired"], {row["value"]: row["paired"] for row in found["groups"]}

    everything, first = list(range(1, 9)), [1, 2, 3, 4]
    assert find_paired(group="tag") == ([], {"one": first, "two": []})
    assert find_paired(group="lr") == (everything, {0.1: first, 0.2: []})
    assert find_paired(group="precision") == (everything, {"fp16": [], "fp32": [3, 4, 5, 6, 7, 8]})
    assert find_paired(group="seed")[0] == []
    assert find_paired(group="precision", filter="tag:one") == (first, {"fp16": [], "fp32": []})
    assert find_paired(group="lr", filter="tag:two") == ([], {0.2: []})
    page = browser.get("/runs?group=tag").text
    assert page.count('href="/compare?runs=1,2,3,4#parity"') == 1
    assert "Parity over seeds" not in page
    page = browser.get("/runs?group=lr").text
    assert 'href="/compare?runs=1,2,3,4,5,6,7,8&amp;group=training.lr#parity"' in page
    page = browser.get("/runs?group=precision").text
    assert 'href="/compare?runs=1,2,3,4,5,6,7,8#parity">Parity over seeds of all groups' in page
    assert "#parity" not in browser.get("/runs?group=tag&filter=tag:two").text


@pytest.mark.parametrize("name", [name for name in GROUPED_BY if name != "precision"])
@pytest.mark.one_database
def test_groups_that_parity_does_not_compare_have_no_link(
    database: Database, ada: User, script: TestClient, name: str
) -> None:
    """Groups have no parity link if comparing all their runs would compare precisions."""
    with database.writing() as session:
        bob = accounts.make_user(session, "bob")
    for number in range(8):
        config = CONFIG | {"training": {"steps": 400, "seed": number % 2}}
        submit(database, (ada, bob)[number % 4 // 2], config=config, tags=f"t{number % 4 // 2}")
        with database.writing() as session:
            run = session.scalars(select(Run).order_by(Run.id.desc()).limit(1)).one()
            run.precision = "fp32" if number < 4 else "fp16"
            run.config = {**run.config, "precision": run.precision}
            if number % 4 > 1:
                run.project, run.recipe, run.source = "other", "mlp", "watch"
    found = script.get("/api/v1/runs/groups", params={"group": name}).json()
    assert found["paired"] == []
    assert (found["total"] == 2) == (name != "sweep")
    by_precision = script.get("/api/v1/runs/groups", params={"group": "precision"}).json()
    assert by_precision["paired"] == [*range(1, 9)]


@pytest.mark.parametrize(("name", "limit"), [("MOST_RUNS", 7), ("MOST_READ", 7)])
@pytest.mark.one_database
def test_many_runs_lead_to_no_parity(
    database: Database,
    ada: User,
    script: TestClient,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    limit: int,
) -> None:
    """Groups with more runs than a comparison allows, or than a page reads, have no parity link."""
    monkeypatch.setattr(grouping, name, limit)
    for tag in ("one", "two"):
        for rate in (0.1, 0.2):
            for seed in (0, 1):
                training = {"steps": 400, "seed": seed, "lr": rate}
                submit(database, ada, config=CONFIG | {"training": training}, tags=tag)
    found = script.get("/api/v1/runs/groups", params={"group": "tag"}).json()
    expected = {"MOST_RUNS": [[5, 6, 7, 8], [1, 2, 3, 4]], "MOST_READ": [[], []]}
    assert [row["paired"] for row in found["groups"]] == expected[name]


def test_runs_without_a_scaler_have_no_scale(
    database: Database, ada: User, script: TestClient
) -> None:
    """Runs without a scaler record 1 in each step, which is no scale to average."""
    for scale, skipped in ((1.0, 0), (1.0, 0), (1.0, 3), (512.0, 0)):
        run = submit(database, ada)
        with database.writing() as session:
            row = session.get_one(Run, run.id)
            row.scale, row.skipped, row.precision = scale, skipped, "fp16" if skipped else "fp32"
    query = {"group": "precision", "values": "scale"}
    groups = script.get("/api/v1/runs/groups", params=query).json()["groups"]
    counts = {group["value"]: group["figures"]["scale"]["count"] for group in groups}
    assert counts == {"fp32": 1, "fp16": 1}
    listed = script.get("/api/v1/runs", params={"filter": "scale<=1"}).json()
    assert [run["skipped"] for run in listed["runs"]] == [3]


@looped("word", ["sweep:x", "sweep:0", f"sweep:{'9' * 30}", "has:", "sweep>3"])
def test_invalid_filters_are_rejected(word: str) -> None:
    """An invalid filter is rejected with the allowed values."""
    with pytest.raises(filters.BadFilter, match="allowed"):
        filters.read(word, me="ada")
