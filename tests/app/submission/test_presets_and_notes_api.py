"""Presets, notes and retention rules by the API: permissions and audit log."""

import pytest
from fastapi import FastAPI
from sqlalchemy import select
from starlette.testclient import TestClient

from db.access import accounts, projects
from db.database import Database
from db.files import retention
from db.tables import AuditEvent, User
from tests.app.auth.permissions_made import script_of
from tests.app.conftest import submit

PRESET = {"name": "quick", "recipe": "digits", "config": {}, "project": "vision"}
NOTE = {"note": "Our plan", "project": "vision"}
RULE = {"scope": "in:vision", "log_days": 5}


@pytest.fixture
def scripts(app: FastAPI, database: Database, offered: None) -> dict[str, TestClient]:
    """Clients of each role in a project, and one without a role in it."""
    with database.writing() as session:
        projects.make(session, "vision")
        people = {role: accounts.make_user(session, role) for role in ("maintainer", "member")}
        people |= {name: accounts.make_user(session, name) for name in ("viewer", "outsider")}
        for role in ("maintainer", "member", "viewer"):
            projects.set_role(session, people[role], "vision", role)
    return {name: script_of(app, database, user) for name, user in people.items()}


@pytest.mark.slow
def test_roles_allow_what_they_do_on_the_pages(
    database: Database, ada: User, scripts: dict[str, TestClient]
) -> None:
    """Members write, maintainers set rules and viewers read notes; an outsider gets 404."""
    submit(database, ada, project="vision")
    rejections = {"maintainer": 0, "member": 0, "viewer": 403, "outsider": 404}
    for name, refused in rejections.items():
        script = scripts[name]
        assert script.post("/api/v1/presets", json=PRESET).status_code == (refused or 201)
        for note in (NOTE, {"note": "both", "runs": "1"}):
            assert script.put("/api/v1/notes", json=note).status_code == (refused or 200)
        read = 404 if name == "outsider" else 200
        assert script.get("/api/v1/notes?project=vision").status_code == read
        assert script.get("/api/v1/notes?runs=1").status_code == read
        listed = script.get("/api/v1/presets").json()
        assert [each["name"] for each in listed] == ([] if refused else ["quick"])
        rule = {"maintainer": 200, "outsider": 404}.get(name, 403)
        assert script.put("/api/v1/retention", json=RULE).status_code == rule
        assert script.get("/api/v1/retention/preview", params=RULE).status_code == rule
        assert script.delete("/api/v1/retention?scope=all").status_code == 403
        assert len(script.get("/api/v1/retention").json()) == (name != "outsider")
    assert scripts["viewer"].delete("/api/v1/presets/1").status_code == 403
    assert scripts["outsider"].delete("/api/v1/presets/1").status_code == 404
    assert scripts["member"].delete("/api/v1/presets/1").status_code == 204
    wrong = scripts["member"].put("/api/v1/notes", json={"note": "\0", "project": "vision"})
    assert (wrong.status_code, "cannot be stored" in wrong.text) == (422, True)
    with database.reading() as session:
        result = {action.action: action.detail for action in session.scalars(select(AuditEvent))}
    assert result["PUT /api/v1/retention"] == "scope in:vision, log_days 5"
    assert result["POST /api/v1/presets"] == "name quick, recipe digits, project vision"
    assert result["PUT /api/v1/notes"] in ("project vision", "runs 1")


def test_a_token_for_one_project_sets_no_rule_for_all(
    app: FastAPI, database: Database, ada: User
) -> None:
    """A token of one project cannot set the instance's retention rule, even an admin's token."""
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, ada, "one", project="")
    headers = {"Authorization": f"Bearer {token}"}
    script = TestClient(app, base_url="http://localhost", headers=headers)
    rule = {"checkpoint_days": "30", "log_days": "", "scope": "all"}
    assert script.put("/api/v1/retention", json=RULE | {"scope": "all"}).status_code == 403
    assert script.post("/retention", data=rule).status_code == 403
    assert script.put("/api/v1/retention", json=RULE | {"scope": "in:"}).status_code == 200
    with database.reading() as session:
        assert [rule.project for rule in retention.list_rules(session)] == [""]
