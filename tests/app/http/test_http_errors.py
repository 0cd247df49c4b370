"""HTTP responses for errors."""

import re

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from app.html import rendering
from app.http.http_errors import STATUS_CODES
from app.main import create_app
from db import errors
from db.database import Database
from db.settings import Settings
from db.tables import Run
from tests.marks import looped


def test_every_error_of_the_database_layer_has_a_status() -> None:
    """Every error class of db.errors has an HTTP status, so none becomes an Internal Server
    Error.
    """
    known = [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.HalfstepError)
    ]
    assert set(known) - {errors.HalfstepError} <= STATUS_CODES.keys()


def test_api_answers_json_and_pages_answer_html(browser: TestClient) -> None:
    """A 404 is JSON for the API and HTML for pages."""
    answer = browser.get("/api/v1/runs/9")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json() == {
        "type": "about:blank",
        "title": "Not Found",
        "status": 404,
        "detail": "There is no run 9.",
        "code": "not_found",
    }
    assert browser.get("/api/v1/nowhere").json()["detail"] == "Not Found"
    for path, message in (
        ("/runs/9", "There is no run 9."),
        ("/runs/abc", "There is no run &#39;abc&#39;."),
        (f"/sweeps/{2**64}", "There is no sweep &#39;18446744073709551616&#39;."),
        ("/nowhere", "There is no page /nowhere."),
    ):
        page = browser.get(path)
        assert page.status_code == 404
        assert message in page.text
        assert '<nav class="rail" aria-label="Main">' in page.text  # one finds back


def test_files_that_an_upgrade_removes_are_not_needed(
    browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server keeps its templates and scripts in memory, so an upgrade may remove the files."""

    def refuse(path: object, *_: object, **__: object) -> None:
        raise FileNotFoundError(path)

    rendering._environment.cache.clear()  # type: ignore[union-attr]
    monkeypatch.setattr("builtins.open", refuse)
    page = browser.get("/account").text
    monkeypatch.undo()
    assert "Sign out" in page


def test_an_unexpected_error_is_a_response_like_others(
    app: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected error gets a response with the usual headers and no details, and is logged."""

    @app.get("/api/v1/broken")
    @app.get("/broken")
    def break_down() -> None:
        raise RuntimeError("sesame")

    with TestClient(app, base_url="http://localhost") as client:
        answers = [client.get(path) for path in ("/api/v1/broken", "/broken")]
    for answer in answers:
        assert answer.status_code == 500
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "sesame" not in answer.text
    assert answers[0].json()["code"] == "failed"
    assert caplog.text.count("RuntimeError: sesame") == 2


def test_bad_parameters_are_named(script: TestClient) -> None:
    """A parameter of the wrong kind is named, with its value."""
    answer = script.get("/api/v1/runs", params={"limit": "many"})
    assert answer.status_code == 422
    assert "'many'" in answer.json()["errors"]["limit"]
    answer = script.get("/api/v1/estimates", params={"recipe": "digits"})
    assert (answer.status_code, answer.json()["errors"]) == (422, {"precision": "it is missing"})


def test_an_unused_parameter_is_rejected(script: TestClient, stranger: TestClient) -> None:
    """An unknown query parameter is rejected, since a mistyped limit would have no effect; without
    a sign-in that comes first.
    """
    answer = script.get("/api/v1/runs?limt=3&limit=3&statu=failed")
    allowed = "allowed: before, filter, limit, sort, values"
    assert (answer.status_code, answer.json()["errors"]) == (
        422,
        dict.fromkeys(("limt", "statu"), f"unknown parameter; {allowed}"),
    )
    bare = script.get("/api/v1/projects?x=1").json()["errors"]
    assert bare == {"x": "unknown parameter; allowed: no query parameters"}
    assert stranger.get("/api/v1/runs?limt=3").status_code == 401


def test_bodies_hold_no_field_that_nothing_reads(browser: TestClient) -> None:
    """Unknown fields are rejected, such as a mistyped kind, except in uploads of later versions."""
    known = browser.get("/api/v1/openapi.json").json()
    bodies = {
        each["$ref"].rpartition("/")[2]
        for path in known["paths"].values()
        for action in path.values()
        for content in action.get("requestBody", {}).get("content", {}).values()
        if "$ref" in (each := content.get("schema", {}))
    }
    schemas = known["components"]["schemas"]
    assert {name for name in bodies if schemas[name].get("additionalProperties", True)} == {
        *("WatchedRun", "End", "Source"),
    }
    token = browser.post("/api/v1/tokens", json={"name": "ci", "knd": "read"})
    text = token.json()["errors"]["knd"]
    assert text.startswith("unknown field; did you mean kind? allowed: name, ")


def test_a_body_without_its_type_is_named(script: TestClient) -> None:
    """A body without a Content-Type gets an error that names the header to send."""
    answer = script.post("/api/v1/runs", content='{"recipe": "digits"}')
    assert answer.status_code == 422
    assert "send the header Content-Type: application/json" in answer.json()["errors"]["body"]


def test_a_body_that_is_not_json_is_named(script: TestClient) -> None:
    """Invalid JSON is reported as such, without its position as the name of a field."""
    answer = script.post("/api/v1/runs", content="{", headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    [(field, said)] = answer.json()["errors"].items()
    assert (field, said.startswith("invalid JSON: ")) == ("body", True)


def test_strangers_learn_nothing_about_a_silent_database(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages say only that the database does not answer; the log has its reason, without secrets."""
    silent = Database("postgresql+psycopg://boss@127.0.0.1:1/prod?password=sesame")
    origin = {"origin": "http://localhost"}
    with TestClient(create_app(settings, silent), base_url="http://localhost") as client:
        answers = [
            client.get("/runs", headers={"cookie": "halfstep-8000=x"}),
            client.post("/sign-in", data={"name": "ada"}, headers=origin),
        ]
    for answer in answers:
        assert answer.status_code == 503
        assert "The database does not answer." in answer.text
        assert not re.search("boss|127.0.0.1|prod|sesame|HALFSTEP", answer.text)
    assert "127.0.0.1" in caplog.text
    assert "sesame" not in caplog.text


@looped(
    "path, field, message",
    [
        ("runs/99999999999999999999", "run_id", "'99999999999999999999': allowed: at most"),
        ("runs/0", "run_id", "'0': allowed: at least 1"),
        ("runs?before=99999999999999999999", "before", "'99999999999999999999': allowed: at most"),
        ("runs?filter=status:foo", "filter", "'status:foo': not a status; allowed: act"),
        ("runs?filter=a%00", "filter", "which cannot be stored; allowed: other text"),
        ("runs?sort=a%00", "sort", "allowed: text without NUL"),
    ],
)
def test_no_address_is_an_internal_error(
    running: Run, browser: TestClient, path: str, field: str, message: str
) -> None:
    """An invalid address is answered with the parameter, its value and the allowed values."""
    answer = browser.get(f"/api/v1/{path}")
    assert answer.status_code == 422
    assert message in answer.json()["errors"][field]
    page = browser.get(f"/{path}")
    assert page.status_code == (404 if field == "run_id" else 422)
    assert field.removesuffix("_id") in page.text


@looped("wrong", ["x", "", "0", "²", "9" * 30, "\0"])
def test_ticked_runs_must_be_numbers(browser: TestClient, wrong: str) -> None:
    """The bulk action names a value that is no run number."""
    answer = browser.post("/runs/cancellation", data={"run": wrong})
    assert answer.status_code == 422
    assert "a run id" in answer.text


@pytest.mark.parametrize("step", ["first=99999999999999999999", "last=99999999999999999999"])
def test_steps_of_a_chart_are_bounded(running: Run, script: TestClient, step: str) -> None:
    """A step beyond the largest integer is rejected."""
    assert script.get(f"/api/v1/runs/1/series?{step}").status_code == 422
