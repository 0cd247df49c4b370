"""The language of the list's filter, on both databases."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from app.runs import filters
from app.runs.filters import BadFilter
from db.database import Database
from db.runs import runs
from db.tables import Run, Status, User
from tests.app.conftest import CONFIG, submit
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record

pytestmark = pytest.mark.sql

DAY = 86400.0


@pytest.fixture
def listed(database: Database, ada: User, running: Run) -> None:
    """Run 1 is training, run 2 failed long ago, and run 3 is queued."""
    record(database, running, make_steps([3.0, 2.0, 0.25], skipped=[1]))
    record(database, running, events=[make_metric(1, 0.95), make_metric(3, 0.75)])
    training = CONFIG["training"] | {"batch_size": 32, "learning_rate": 0.1}
    bf16: dict[str, Any] = CONFIG | {"precision": "bf16", "training": training}
    submit(database, ada, name="second one", tags="lr, big run", config=bf16)
    with database.writing() as session:
        failed = session.get_one(Run, 2)
        runs.set_status(session, failed, Status.FAILED, reason="it raised")
        failed.project, failed.created_at = "vision", failed.created_at - 30 * DAY
    submit(database, ada, name='odd "name" -x', priority=5)


FOUND = {
    "": [1, 2, 3],
    "second": [2],
    "SECOND one": [2],
    '"second one"': [2],
    '"one second"': [],
    "-second": [1, 3],
    '"-x"': [3],
    '"""name"""': [3],
    "vision": [2],
    "ada digits": [1, 2, 3],
    "status:failed": [2],
    "status:active": [1, 3],
    "-status:ended": [1, 3],
    "since:7d": [1, 3],
    "before:7d": [2],
    "before:2001-01-01": [],
    "since:2001-01-01T12:30": [1, 2, 3],
    "tag:lr": [2],
    'tag:"big run"': [2],
    "tag:big": [],
    "precision:FP16": [1, 3],
    "recipe:digits": [1, 2, 3],
    "recipe:dig": [],
    "owner:me": [1, 2, 3],
    "owner:nobody": [],
    "-project:vision": [1, 3],
    "source:recipe": [1, 2, 3],
    "name:one": [2],
    "skips>0": [1],
    "skipped=1": [1],
    "step>=3": [1],
    "loss<0.5": [1],
    "-loss<0.5": [2, 3],
    "scale<2^20": [1],
    "priority>0": [3],
    "id<=2": [1, 2],
    "duration<1h": [1],
    "batch_size>32": [1, 3],
    "training.batch_size=32": [2],
    "other.batch_size=32": [],
    "lr>0.01": [2],
    "training.lr=0.1": [2],
    "fused=true": [1, 2, 3],
    "val/accuracy>0.5": [1],
    "val/accuracy>0.9": [],
    "-val/accuracy>0.5": [2, 3],
    '"val/accuracy"=0.75 status:running': [1],
    "nothing>0": [],
}


@pytest.mark.slow
def test_each_word_means_what_it_says(listed: None, script: TestClient) -> None:
    """Listed runs and their count are those that match all filter terms."""
    found = {}
    for text in FOUND:
        answer = script.get("/api/v1/runs", params={"filter": text, "sort": "id"}).json()
        found[text] = [run["id"] for run in answer["runs"]]
        assert answer["total"] == len(found[text])
    assert found == FOUND


WRONG = (
    ("ok status:fialed", [2], "allowed: active, ended, queued"),
    ("status:fialed", [1], "did you mean failed?"),
    ("stauts:failed", [1], "there is no key stauts; did you mean status? Allowed: status, since"),
    ("health:healthy", [1], "computed for listed runs only; allowed: status:attention, skipped>"),
    ("stauts:failed", [1], "did you mean status?"),
    ("skips:10", [1], "skips is a number; allowed: skips>…"),
    ("status>failed", [1], "status is not compared by >"),
    ("status>0.5", [1], "of a metric or setting metrics.status>0.5, settings.status>0.5"),
    ("loss<few", [1], "'few' is not a number; allowed: 10, 0.5"),
    ("loss<nan", [1], "'nan' is not a number"),
    ("since:yesterday", [1], "not a time; allowed: 7d"),
    ("since:9999999999d", [1], "not a time"),
    ("source:wach", [1], "did you mean watch?"),
    ("tag: x", [1], "it lacks a value; allowed: a whole tag"),
    ("a lr>", [2], "it lacks a value; allowed: lr>0.5"),
    (">3", [1], "there is nothing before >"),
    ('x "open', [2], "its quote is not closed"),
    ('""', [1], "it is empty"),
    ("a:b c:d", [1, 2], "word 2, 'c:d'"),
    (
        "ok OR lr>1",
        [2],
        'terms are combined with AND, and OR is not an operator; allowed: "OR" as a text',
    ),
    ("ok a\0b", [2], "has the character '\\x00', which cannot be stored"),
    ("w " * 21, [0], "it has 21 words; allowed: at most 20"),
    ("w" * 1001, [0], "it has 1,001 characters; allowed: at most 1000"),
)


def test_a_wrong_word_is_named_with_the_allowed_words(browser: TestClient) -> None:
    """An invalid term is named with the allowed values; the page marks it and keeps the text."""
    for text, numbers, message in WRONG:
        answer = browser.get("/api/v1/runs", params={"filter": text})
        assert (answer.status_code, answer.json()["words"]) == (422, numbers)
        assert message in answer.json()["errors"]["filter"]
    page = browser.get("/runs", params={"filter": "ok status:fialed"})
    assert page.status_code == 422
    assert "<mark>status:fialed</mark> not a status" in page.text
    assert 'value="ok status:fialed"' in page.text


def test_an_unknown_run_name_is_reported(listed: None, browser: TestClient) -> None:
    """A filter by an unknown run name matches nothing, with a note: a later run may have it."""
    query = {"filter": "val/acuracy>0.5", "sort": "-batchsize"}
    answer = browser.get("/api/v1/runs", params=query).json()
    assert answer["notes"] == [
        "there is no setting or metric val/acuracy; did you mean val/accuracy?",
        "there is no setting or metric batchsize; did you mean batch_size?",
    ]
    assert "did you mean val/accuracy?" in browser.get("/runs", params=query).text
    shown = browser.get("/runs?columns=status,batchsize").text
    assert "There is no setting or metric batchsize; did you mean batch_size?<" in shown
    assert browser.get("/api/v1/runs?values=batchsize").json()["notes"] == answer["notes"][1:]
    assert browser.get("/api/v1/runs?sort=grad_norm").json()["notes"] == [
        "there is no column grad_norm: it is recorded by step, for charts and reports"
    ]


SORTED = {
    "-id": [3, 2, 1],
    "name": [1, 3, 2],
    "-loss": [1, 3, 2],
    "loss": [1, 2, 3],
    "-created": [3, 1, 2],
    "duration": [1, 2, 3],
    "owner": [1, 2, 3],
    "-batch_size": [3, 1, 2],
    "lr": [2, 1, 3],
    "val/accuracy": [1, 2, 3],
    "fused": [1, 2, 3],
    "nothing is called so": [3, 2, 1],
    "-nothing is called so": [3, 2, 1],
}


@pytest.mark.slow
def test_runs_are_sorted_by_anything(listed: None, script: TestClient) -> None:
    """Runs can be sorted by any column, setting or metric; those without a value are last."""
    found, paged = {}, {}
    for sort in SORTED:
        answer = script.get("/api/v1/runs", params={"sort": sort}).json()
        found[sort], paged[sort] = [run["id"] for run in answer["runs"]], []
        query: dict[str, str | int] | None = {"sort": sort, "limit": 1}
        while query is not None:
            page = script.get("/api/v1/runs", params=query).json()
            paged[sort] += [run["id"] for run in page["runs"]]
            query = query | {"before": page["next"]} if page["next"] else None
    assert found == paged == SORTED


def test_values_of_settings_and_metrics_are_reported(listed: None, script: TestClient) -> None:
    """Requested settings and metrics are returned with each run that has them."""
    answer = script.get("/api/v1/runs?sort=id&values=batch_size,val/accuracy,lr,fused").json()
    assert [run["values"] for run in answer["runs"]] == [
        {"batch_size": 64.0, "val/accuracy": 0.75, "fused": "true"},
        {"batch_size": 32.0, "lr": 0.1, "fused": "true"},
        {"batch_size": 64.0, "fused": "true"},
    ]


def test_a_metric_named_as_a_column_is_listed_by_its_prefix(
    listed: None, database: Database, running: Run, script: TestClient, browser: TestClient
) -> None:
    """A metric named like a column is selected by its prefix in filter, order, values and columns;
    `loss` stays the column.
    """
    record(database, running, events=[make_metric(3, 41.5, "loss"), make_metric(3, 7.5, "status")])
    query = {"filter": "metrics.loss>40 loss<1", "sort": "-metrics.status"}
    answer = script.get("/api/v1/runs", params=query | {"values": "metrics.loss"}).json()
    assert [(run["id"], run["values"]) for run in answer["runs"]] == [(1, {"metrics.loss": 41.5})]
    assert answer["notes"] == []
    ordered = script.get("/api/v1/runs", params={"sort": "metrics.loss"}).json()["runs"]
    assert [run["id"] for run in ordered] == [1, 2, 3]
    page = browser.get("/runs", params=query | {"columns": "loss,metrics.loss"}).text
    assert "41.5" in page
    words = script.get("/api/v1/runs/autocomplete").json()["metrics"]
    assert words == ["metrics.loss", "metrics.status", "val/accuracy"]
    result = script.get("/api/v1/runs", params={"filter": "metrics.los>1"}).json()["notes"]
    assert result == ["there is no setting or metric metrics.los; did you mean metrics.loss?"]


WORDS = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.builds(
            "{}{}{}{}".format,
            st.sampled_from(["", "-", "--", '"']),
            st.sampled_from([*filters.KEYS, "loss", "lr", "a.b", "val/accuracy", '"x y"', ""]),
            st.sampled_from([":", "=", ">", "<", ">=", "<=", ""]),
            st.one_of(
                st.sampled_from(["failed", "1e999", "-inf", "7d", "2026-11-01", "0001-01-01", "%"]),
                st.floats().map(str),
                st.integers().map(str),
                st.text(max_size=8),
            ),
        ),
    ),
    max_size=25,
).map(" ".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=WORDS, sort=st.text(max_size=10))
def test_whatever_is_typed_there_are_rows_or_a_sentence(
    listed: None, browser: TestClient, text: str, sort: str
) -> None:
    """Page and API answer any filter with rows or with the allowed values."""
    for path in ("/runs", "/api/v1/runs"):
        answer = browser.get(path, params={"filter": text, "sort": sort, "columns": text})
        assert answer.status_code in (200, 422)
        if answer.status_code == 422:
            assert "allowed" in answer.text.lower()


@given(text=st.text(alphabet='"- x:<>=\t\n', max_size=1000))
def test_a_filter_is_read_in_time_that_grows_with_its_length(text: str) -> None:
    """A filter with any number of quotes is parsed in linear time, into terms or errors."""
    with suppress(BadFilter):
        assert len(filters.read(text, me="ada")) <= filters.MOST_WORDS


@given(text=st.text(min_size=1, max_size=30).filter(lambda text: not filters.flaw(text)))
def test_a_text_that_is_quoted_is_read_as_it_is(text: str) -> None:
    """A quoted text is taken literally, so any tag can be used as a filter."""
    if text.strip():
        [term] = filters.read(f"tag:{filters.quote(text)}", me="ada")
        assert term.condition == filters.Text("tag", text.strip())


def test_terms_are_told_apart_for_the_list() -> None:
    """Each valid filter term is returned with its key and value and with the filter without it;
    invalid text stays text.
    """
    text = '-status:failed lr>0.1 nonsense:1 "two words"'
    with pytest.raises(BadFilter) as raised:
        filters.read(text, me="ada")
    chips, invalid = filters.chips(text, raised.value.mistakes)
    assert [(chip.key, chip.value) for chip in chips] == [
        ("not status", "failed"),
        ("lr", "> 0.1"),
        ("", "two words"),
    ]
    assert chips[1].without == '-status:failed "two words"'
    assert invalid == "nonsense:1"
