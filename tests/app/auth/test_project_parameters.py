"""Tests of app.auth.project_parameters: the projects that requests name."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args

import pytest
from fastapi import FastAPI, Form, Query
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import BaseModel
from sqlalchemy import select
from starlette.testclient import TestClient

from app.auth.project_parameters import project_field
from db.access import accounts, projects
from db.access.permissions import MAINTAINER, MEMBER, VIEWER
from db.database import Database
from db.tables import FULL, WRITE, ApiToken, Sweep, User

HIDDEN, SEEN, MISSING = "vault", "agora", "nowhere"

AGENTS: dict[str, Any] = {"space": {"lr": [0.1, 0.2]}, "goal": "minimise"}
BODIES = {
    "/api/v1/sweeps/agents": AGENTS,
    "/api/v1/sweeps": {**AGENTS, "agents": True},
}


def _token(database: Database, name: str, kind: str = FULL, only: str | None = None) -> str:
    """Return a token of a maintainer of no, or a viewer or member of one of the projects."""
    roles = {
        "outsider": {SEEN: MAINTAINER},
        "viewer": {HIDDEN: VIEWER},
        "member of both": {HIDDEN: MEMBER, SEEN: MEMBER},
        "admin": {},
    }[name]
    with database.writing() as session:
        for project in (HIDDEN, SEEN):
            projects.make(session, project)
        user = accounts.make_user(session, name)
        projects.take_role(session, user, projects.DEFAULT)
        user.is_admin = name == "admin"
        for project, role in roles.items():
            projects.set_role(session, user, project, role)
        return accounts.make_api_token(session, user, "script", kind, project=only)[0]


@pytest.fixture
def script_with(app: FastAPI, ada: User) -> Callable[[str], TestClient]:
    """Return a function that makes a client from a token."""
    return lambda token: TestClient(
        app, base_url="http://localhost", headers={"Authorization": f"Bearer {token}"}
    )


@pytest.mark.parametrize("address", BODIES)
@pytest.mark.parametrize(
    "whose",
    [
        ("outsider",),
        ("outsider", WRITE),
        ("member of both", FULL, SEEN),
        ("member of both", WRITE, SEEN),
        ("admin", FULL, SEEN),
    ],
    ids=" ".join,
)
def test_a_sweep_of_a_hidden_project_is_rejected_like_one_of_a_missing_project(
    database: Database,
    script_with: Callable[[str], TestClient],
    whose: tuple[str, ...],
    address: str,
) -> None:
    """A sweep in a hidden project gets status and text of one in a missing project."""
    script = script_with(_token(database, *whose))
    answers = [
        script.post(address, json=BODIES[address] | {"project": name}) for name in (HIDDEN, MISSING)
    ]
    hidden, missing = ((each.status_code, each.text) for each in answers)
    assert 400 <= hidden[0] < 500
    assert hidden == (missing[0], missing[1].replace(MISSING, HIDDEN))
    with database.reading() as session:
        assert session.scalars(select(Sweep)).all() == []


@pytest.mark.parametrize("address", BODIES)
@pytest.mark.parametrize("project", [HIDDEN, None])
def test_a_viewer_begins_no_sweep(
    database: Database,
    script_with: Callable[[str], TestClient],
    address: str,
    project: str | None,
) -> None:
    """A viewer's sweep is rejected, also one without a project, which would be the default."""
    answer = script_with(_token(database, "viewer")).post(
        address, json=BODIES[address] | {"project": project}
    )
    assert answer.status_code in (403, 422), answer.text
    with database.reading() as session:
        assert session.scalars(select(Sweep)).all() == []


#: Routes that resolve a project in another way, with the reason.
OTHERWISE = {
    # An admin's project is created if missing; `db.telemetry.ingest` rejects others' with one text.
    ("/api/v1/ingest", "project"),
    # A new name.
    ("/api/v1/projects", "name"),
    ("/projects", "name"),
    ("/projects/name", "new_name"),
    ("/api/v1/projects/name", "new_name"),
    # Reads its body before its transaction, in which it calls `project_parameters.resolve`.
    ("/api/v1/projects/images", "project"),
}


def _named(annotation: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the fields of a model that hold names of projects, nested ones too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from _named(field.annotation, f"{path}.{name}".lstrip("."))
    elif arguments := get_args(annotation):
        for argument in arguments:
            yield from _named(argument, path)
    elif path and "project" in path.rpartition(".")[2]:
        yield path


def _fields(path: str, dependant: Dependant) -> set[str]:
    """Return the fields of a route's own parameters, or of a dependency's, that name projects."""
    fields = set()
    for parameter in (*dependant.query_params, *dependant.body_params, *dependant.path_params):
        annotation = parameter.field_info.annotation
        fields |= set(_named(annotation)) or set(_named(annotation, parameter.alias))
        is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
        names = annotation.model_fields if is_model else [parameter.alias]
        if path.endswith(("/projects", "/projects/name", "/projects/quota")):
            fields |= {name for name in names if name in ("name", "new_name")}
    return {field for field in fields if (path, field) not in OTHERWISE}


def _dependants(dependant: Dependant) -> Iterator[Dependant]:
    for each in dependant.dependencies:
        yield each
        yield from _dependants(each)


def _find_unresolved(path: str, dependant: Dependant) -> set[str]:
    """Return the projects of a route that no dependency resolves, or that it takes itself."""
    below = list(_dependants(dependant))
    resolved = {project_field(each.call) for each in below}
    named = {field for each in below for field in _fields(path, each)}
    return _fields(path, dependant) | (named - resolved)


def test_no_route_resolves_a_project_by_itself(app: FastAPI) -> None:
    """A project in a query, a form or a JSON body is resolved by app.auth.project_parameters."""
    wrong, seen = [], 0
    for context in iter_route_contexts(app.routes):
        if context.path and hasattr(context.original_route, "dependant"):
            dependant = context.original_route.dependant
            seen += any(project_field(each.call) for each in _dependants(dependant))
            wrong += [
                f"{context.path}: {field}" for field in _find_unresolved(context.path, dependant)
            ]
    assert wrong == []
    assert seen > 30


class _Nested(BaseModel):
    moves: list[dict[str, "_Move"]] | None = None


class _Move(BaseModel):
    project: str | None = None


_Nested.model_rebuild()


def test_the_walk_finds_a_project_of_a_nested_model() -> None:
    """A route with a project anywhere in its body, which it takes itself, is found."""
    app = FastAPI()

    @app.post("/moves")
    def move(body: _Nested) -> None: ...

    @app.post("/names")
    def name(project: Annotated[str, Form()], body_project: Annotated[str, Query()]) -> None: ...

    dependants = {
        route.path: route.dependant for route in app.routes if isinstance(route, APIRoute)
    }
    assert _find_unresolved("/moves", dependants["/moves"]) == {"moves.project"}
    assert _find_unresolved("/names", dependants["/names"]) == {"project", "body_project"}


def test_a_token_of_the_default_project_is_limited_to_it(
    browser: TestClient, database: Database
) -> None:
    """A token of the Default project, which is an empty value in the form, is limited to it."""
    assert browser.post("/account/tokens", data={"name": "ci", "project": ""}).status_code == 200
    with database.reading() as session:
        assert session.scalars(select(ApiToken.project)).all() == [""]
