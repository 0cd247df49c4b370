"""Errors as answers."""

import re

import pytest
from starlette.testclient import TestClient

from app.errors import STATUS_CODES
from app.main import create_app
from db import errors
from db.database import Database
from db.settings import Settings


def test_every_error_of_the_database_layer_has_a_status() -> None:
    """No error of db.errors can reach a person as an Internal Server Error."""
    known = [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.HalfstepError)
    ]
    assert set(known) - {errors.HalfstepError} <= STATUS_CODES.keys()


def test_api_answers_json_and_pages_answer_html(browser: TestClient) -> None:
    """What is not there is said in the form that was asked for."""
    answer = browser.get("/api/runs/9")
    assert (answer.status_code, answer.json()) == (404, {"detail": "There is no run 9."})
    page = browser.get("/runs/9")
    assert page.status_code == 404
    assert "There is no run 9." in page.text


def test_bad_parameters_are_named(script: TestClient) -> None:
    """A parameter of the wrong kind is named, with its value."""
    answer = script.get("/api/runs", params={"limit": "many"})
    assert answer.status_code == 422
    assert "'many'" in answer.json()["errors"]["limit"]


def test_strangers_learn_nothing_about_a_silent_database(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages say that the database does not answer; the log says which and why, without secrets."""
    silent = Database("postgresql+psycopg://boss@127.0.0.1:1/prod?password=sesame")
    with TestClient(create_app(settings, silent), base_url="http://localhost") as client:
        answers = [client.get("/healthz"), client.post("/sign-in", data={"name": "ada"})]
    for answer in answers:
        assert answer.status_code == 503
        assert "The database does not answer." in answer.text
        assert not re.search("boss|127.0.0.1|prod|sesame|HALFSTEP", answer.text)
    assert "127.0.0.1" in caplog.text
    assert "sesame" not in caplog.text
