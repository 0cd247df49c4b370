"""Media types of requests, in all spellings that FastAPI reads."""

import pytest
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from app.http.media_types import is_form, is_json
from db.database import Database
from db.tables import Run, User
from tests.app.auth.test_audit import list_recorded
from tests.marks import looped

JSON = [
    "application/json",
    "application/JSON",
    "Application/Json; Charset=UTF-8",
    "APPLICATION/JSON;charset=utf-8",
    "application/json ; x=y",
    "application/problem+json",
    "application/vnd.API+JSON",
]
FORMS = [
    "application/x-www-form-urlencoded",
    "Application/X-WWW-Form-Urlencoded",
    "application/x-www-form-urlencoded ;charset=utf-8",
]
OTHERS = ["", "text/json", "text/plain; application/json", "application/jsonlines", "json", "x"]


@pytest.mark.parametrize("kind", JSON)
def test_the_audit_log_has_the_details_of_json_in_any_spelling(
    database: Database, ada: User, browser: TestClient, kind: str
) -> None:
    """JSON of any accepted media type is audited with its details."""
    answer = browser.put(
        "/api/v1/projects/roles",
        content=b'{"user": "ada", "role": "viewer", "project": ""}',
        headers={"content-type": kind},
    )
    assert answer.status_code == 204
    assert [row[2] for row in list_recorded(database)] == ["user ada, role viewer"]


@pytest.mark.parametrize("kind", FORMS)
def test_the_audit_log_has_the_details_of_forms_in_any_spelling(
    database: Database, ada: User, browser: TestClient, kind: str
) -> None:
    """A form of any accepted media type is audited with its fields, and its CSRF token is found."""
    token = browser.headers.pop("x-csrf-token")
    answer = browser.post(
        "/projects/roles",
        content=f"user=ada&role=viewer&project=&csrf_token={token}",
        headers={"content-type": kind},
        follow_redirects=False,
    )
    assert answer.status_code == 303
    assert [row[2] for row in list_recorded(database)] == ["user ada, role viewer"]


@looped("kind", JSON)
def test_nested_json_is_rejected_in_any_spelling(
    running: Run, script: TestClient, kind: str
) -> None:
    """Nested JSON is answered by 413 before anything recurses into it."""
    body = b'{"recipe": "digits", "config": %s%s}' % (b"[" * 500, b"]" * 500)
    answer = script.post("/api/v1/runs", content=body, headers={"content-type": kind})
    assert answer.status_code == 413


@looped("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_json_in_another_encoding_is_rejected(
    running: Run, script: TestClient, encoding: str
) -> None:
    """JSON in another encoding is rejected, since it could hide brackets from the nesting limit."""
    text = f'{{"\u0122": "", "recipe": "digits", "config": {"[" * 800}{"]" * 800}}}'
    headers = {"content-type": "application/json"}
    for body in (text, text.replace("\u0122", "x"), '{"recipe": "digits"}'):
        answer = script.post("/api/v1/runs", content=body.encode(encoding), headers=headers)
        assert (answer.status_code, "UTF-8" in answer.json()["detail"]) == (415, True)


@looped("kind", OTHERS)
def test_nested_text_of_another_type_is_no_error_of_the_server(
    running: Run, script: TestClient, kind: str
) -> None:
    """Nested text of another media type is not parsed, and no server error."""
    body = b'{"recipe": "digits", "config": %s%s}' % (b"[" * 500, b"]" * 500)
    answer = script.post("/api/v1/runs", content=body, headers={"content-type": kind})
    assert answer.status_code == 422


def test_types_are_told_apart() -> None:
    """A form is not taken for JSON, and other types are neither."""
    for kinds, expected in ((JSON, (True, False)), (FORMS, (False, True)), (OTHERS, (False,) * 2)):
        for kind in kinds:
            headers = Headers({"content-type": kind})
            assert (is_json(headers), is_form(headers)) == expected
    assert is_form(Headers({"content-type": "Multipart/Form-Data; boundary=x"}))
