"""Errors as answers."""

from starlette.testclient import TestClient

from app.errors import STATUS_CODES
from db import errors


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
