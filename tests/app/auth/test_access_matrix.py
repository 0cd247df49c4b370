"""Every route for every kind of identity, on an installation with rows in every table.

Paths, parameters and fields are read from the server's own routes; valid requests are those of
tests.app.auth.valid_requests, which test_valid_requests.py sends as the owner of the rows.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import iter_route_contexts
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel
from sqlalchemy import select

from db.database import Database
from db.settings import Settings
from db.tables import User
from tests.app.auth import valid_requests
from tests.app.auth.authentication_made import PUBLIC
from tests.app.auth.identities import IDENTITIES, Caller, by_token
from tests.app.installation import (
    FILE_MARK,
    HIDDEN,
    MARK,
    NEAR,
    Installation,
    Side,
    empty_tables,
    install,
    tables,
)
from tests.marks import extended, sampled

pytestmark = [pytest.mark.slow]
if os.environ.get("HALFSTEP_FAULTS") != "full":
    # On PostgreSQL in `make test-journeys`: the conditions themselves are tested on both.
    pytestmark.append(pytest.mark.only_on("sqlite"))
SAFE = ("GET", "HEAD", "OPTIONS")
#: Routes that end the session of their caller.
ENDING = ("/sign-out", "/account/password", "/account/sign-ins/deletion")


@dataclass(frozen=True)
class Route:
    """A path with one method, and the fields of its JSON body."""

    method: str
    path: str
    parameters: frozenset[str]
    fields: dict[str, Any]
    is_stream: bool

    @property
    def is_api(self) -> bool:
        return self.path.startswith("/api/")

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def routes_of(app: FastAPI) -> Iterator[Route]:
    """Yield the routes for signed-in users."""
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        if not context.path or context.path in PUBLIC or not hasattr(route, "dependant"):
            continue
        flat = list(_dependants(route.dependant))
        fields: dict[str, Any] = {}
        for parameter in (each for dependant in flat for each in dependant.body_params):
            annotation = parameter.field_info.annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                fields |= {key: each.annotation for key, each in annotation.model_fields.items()}
        names = frozenset(each.alias for dependant in flat for each in dependant.query_params)
        is_stream = route.response_class is EventSourceResponse
        for method in sorted(route.methods):
            yield Route(method, context.path, names, fields, is_stream)


def _dependants(dependant: Dependant) -> Iterator[Dependant]:
    yield dependant
    for each in dependant.dependencies:
        yield from _dependants(each)


#: Variants of a request by number: without parameters, and with two sets of values.
VARIANTS = pytest.mark.parametrize("variants", [range(2), *extended([range(1), range(2, 3)])])


def values(side: Side, user: str, variant: int) -> dict[str, Any]:
    """Return an attacker's values by field name: ids and names of a project."""
    run, other = side.runs[0], side.runs[-1]
    return {
        **side.ids,
        **dict.fromkeys(("run", "from", "before", "parent_id", "compared_with", "after_id"), run),
        **{"before_id": other, "run_id": run, "runs": side.runs, "group_id": run},
        **{"project": side.project, "name": side.project, "user": user, "role": "maintainer"},
        "scope": ("run", f"in:{side.project}", "all")[variant],
        "action": ("cancel", "delete", "tag")[variant],
        **{"filter": f"{NEAR}>1", "tag": "stolen", "label": "stolen", "note": "stolen"},
        **dict.fromkeys(("sort", "values", "by", "group", "columns", "metric", "names"), NEAR),
        **{"recipe": "digits", "config": {}, "space": {"training.batch_size": [8]}},
        **{"goal": "minimise", "condition": "ended", "kind": ("webhook", "full", "read")[variant]},
        **{"address": "https://8.8.8.8/x", "new_name": "stolen", "viewers_download": True},
        **{"is_on": False, "priority": 1, "scale": 1024.0, "step": 1, "days": 7, "stop": False},
        **{"checkpoint_days": 1.0, "log_days": 1.0, "up_to": 2**31 - 1, "parent_step": 5},
        **{"value": "stolen", "change": "admin", "on": "", "confirmed": "1", "secret": "s"},
    }


def request_of(route: Route, side: Side, user: str, variant: int) -> tuple[str, dict[str, Any]]:
    """Return the address and the options of a request of VARIANTS."""
    known = values(side, user, variant)
    ids = {"worker_id": 1, "user_id": side.owner.id} | known
    address = re.sub(r"\{(\w+)[^}]*\}", lambda m: str(ids.get(m[1], 1)), route.path)
    options: dict[str, Any] = {}
    if variant or route.method not in SAFE:
        chosen = {name: known[name] for name in route.parameters if name in known}
        options["params"] = {name: _type_name(value) for name, value in chosen.items()}
    if route.method not in SAFE:
        if route.is_api:
            fields = {name: kind for name, kind in route.fields.items() if name in known}
            options["json"] = {name: _json(kind, known[name]) for name, kind in fields.items()}
        else:
            options["data"] = {name: _type_name(value) for name, value in known.items()}
    return address, options


def requests_of(
    route: Route, sides: Collection[Side], user: str, variants: range
) -> list[list[tuple[str, dict[str, Any]]]]:
    """Return the different requests of variants, each for all sides.

    Requests that change something have values in all fields: the last value of a range is enough.
    """
    chosen = variants if route.method in SAFE else variants[-1:]
    found = [[request_of(route, side, user, variant) for side in sides] for variant in chosen]
    return [each for i, each in enumerate(found) if each not in found[:i]]


def _type_name(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _json(kind: Any, value: Any) -> Any:
    """Return a value as a field of this type takes it."""
    is_list = "list" in str(kind)
    if isinstance(value, list) != is_list and (is_list or "str" in map(_name_of, get_args(kind))):
        return [value] if is_list else _type_name(value)
    return value


def _name_of(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


@pytest.fixture
def installed(settings: Settings, database: Database, ada: User, offered: None) -> Installation:
    """Two projects in use, without a member in common."""
    installation = install(settings, database, ada)
    with database.reading() as session:
        assert empty_tables(session) == []
    return installation


def rows_of(database: Database, side: Side, *, but: int) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows of a project, its runs and its owner, except those of the user `but`, the
    audit log, which records rejected requests, and the last use of tokens.
    """
    found: dict[str, list[tuple[Any, ...]]] = {}
    with database.reading() as session:
        for table in tables():
            columns = [each for each in table.columns if each.name != "used_at"]
            rows = session.execute(select(*columns)).mappings().all()
            mine = [
                row
                for row in rows
                if table.name != "audit_events" and _is_of(table.name, row, side)
            ]
            kept = [row for row in mine if row.get("user_id", row.get("owner_id")) != but]
            found[table.name] = sorted((tuple(row.values()) for row in kept), key=repr)
    return found


def _is_of(table: str, row: Any, side: Side) -> bool:
    return (
        row.get("run_id") in side.runs
        or row.get("project") == side.project
        or row.get("user_id", row.get("owner_id")) == side.owner.id
        or (table == "runs" and row["id"] in side.runs)
        or (table == "users" and row["id"] == side.owner.id)
        or (table == "projects" and row["name"] == side.project)
        or (table == "notes" and side.mark in row["text"])
    )


#: The others run in `make test-all`: test_authentication.py tests all routes without a sign-in and
#: with a token to send, test_shared_links.py with a link, test_access.py with a limited token.
KINDS = ("outsider's browser", "viewer")
CALLERS = [*KINDS, *extended(name for name in IDENTITIES if name not in KINDS)]
#: What a viewer may do on each route is tested by test_permissions.py, too.
SHUT_OUT = sampled(IDENTITIES, KINDS[:1])
#: Identities whose requests change nothing, not even their own rows.
CHANGE_NOTHING = ("limited token", "token to read")


@VARIANTS
@pytest.mark.parametrize("name", SHUT_OUT)
def test_no_route_opens_what_an_identity_may_not_see(
    app: FastAPI,
    database: Database,
    installed: Installation,
    name: str,
    variants: range,
    record_property: Callable[[str, object], None],
) -> None:
    """No response to any identity is a 5xx, reveals a hidden project, or changes it."""
    caller = IDENTITIES[name](app, database, installed)
    user = "" if caller.user is None else caller.user.name
    changes_nothing = name.startswith(CHANGE_NOTHING)
    but = 0 if changes_nothing or caller.user is None else caller.user.id
    before = rows_of(database, installed.hidden, but=but)
    mine = [] if caller.user is None else _account_of(database, caller.user)
    requests, wrong = 0, []
    # Those that change nothing come first: later ones may store what they send as the caller's own.
    # Those that end the caller's session come last: nothing after them would be tested.
    order = sorted(routes_of(app), key=lambda each: (each.path in ENDING, each.method not in SAFE))
    for route in order:
        if route.is_stream and not caller.is_refused and ("_id" not in route.path or caller.sees):
            continue  # it would not end
        for [(address, options)] in requests_of(route, [installed.hidden], user, variants):
            answer = caller.request(route.method, address, **options)
            requests += 1
            said = f"{route} {options}: {answer.status_code} {answer.text[:300]}"
            sent = address + str(options)
            wrong += [f"{why}: {said}" for why in _faults(caller, route, answer, sent)]
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
    assert rows_of(database, installed.hidden, but=but) == before
    if changes_nothing and caller.user is not None:
        assert _account_of(database, caller.user) == mine
    record_property("requests", requests)
    assert requests > 250


#: What is added to ids for those of missing rows, and the name of a missing project.
FAR, NO_PROJECT = 70_000, "vault-7"


@VARIANTS
@pytest.mark.parametrize("kind", ["full", *extended(["write", "read", "control"])])
def test_hidden_rows_are_answered_as_missing_ones(
    app: FastAPI, database: Database, installed: Installation, kind: str, variants: range
) -> None:
    """A hidden row gets the same status from each route as a missing one, and the same API text."""
    caller = by_token("left", kind=kind)(app, database, installed)
    hidden, wrong = installed.hidden, []
    missing = replace(
        hidden,
        project=NO_PROJECT,
        runs=[run + FAR for run in hidden.runs],
        ids={name: number + FAR for name, number in hidden.ids.items()},
    )
    for route in sorted(routes_of(app), key=lambda each: each.method not in SAFE):
        if route.is_stream and "_id" not in route.path:
            continue  # it would not end
        for asked in requests_of(route, [hidden, missing], "left", variants):
            if asked[0] == asked[1]:  # which names no row
                continue
            first, second = (
                caller.client.request(route.method, address, **options)
                for address, options in asked
            )
            text = re.sub(rf"{str(FAR)[:-2]}(\d\d)", lambda m: str(int(m[1])), second.text)
            is_same = text.replace(NO_PROJECT, hidden.project) == first.text
            # A page has its own token; another answer has the time, or a new id.
            is_same |= first.status_code < 400 or not route.is_api
            if (first.status_code, is_same) != (second.status_code, True):
                answers = f"{first.status_code} {first.text[:200]} | {second.text[:200]}"
                wrong.append(f"{route} {asked[0][1]}: {answers}")
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


#: Routes by which an identity with a role in the hidden project may change its rows.
ALLOWED = {
    # A member may work on another member's sweep.
    "token to send": {
        "POST /api/v1/sweeps/{sweep_id}/claims",
        "PUT /api/v1/sweeps/{sweep_id}/claims/{number}",
        "POST /api/v1/sweeps/{sweep_id}/claims/{number}/end",
        "POST /api/v1/sweeps/{sweep_id}/claims/{number}/return",
    },
}


@pytest.mark.only_on("sqlite")
@pytest.mark.parametrize("name", CALLERS)
def test_no_valid_request_changes_what_an_identity_may_not_change(
    app: FastAPI,
    settings: Settings,
    database: Database,
    installed: Installation,
    name: str,
    record_property: Callable[[str, object], None],
) -> None:
    """A valid request of another identity to a writing route changes no hidden row."""
    rows = valid_requests.add_rows(database, installed.hidden)
    caller = IDENTITIES[name](app, database, installed)
    hidden = replace(installed.hidden, runs=[*installed.hidden.runs, *rows.runs])
    changes_nothing = name.startswith(CHANGE_NOTHING)
    but = 0 if changes_nothing or caller.user is None else caller.user.id
    snapshot = valid_requests.Snapshot(settings)
    before = rows_of(database, hidden, but=but)
    mine = [] if caller.user is None else _account_of(database, caller.user)
    requests, succeeded, wrong = 0, 0, []
    for route in valid_requests.writing_routes(app):
        if route.path in PUBLIC:
            continue
        snapshot.restore()
        address, options = valid_requests.request_of(app, route, hidden, rows)
        answer = caller.request(route.method, address, **options)
        requests += 1
        said = f"{route} {options}: {answer.status_code} {answer.text[:300]}"
        is_allowed = str(route) in ALLOWED.get(name, ())
        if answer.status_code < 400 and not _is_sign_in(answer):
            succeeded += 1
        if not is_allowed:
            sent = address + str(options)
            wrong += [f"{why}: {said}" for why in _faults(caller, route, answer, sent)]
            if snapshot.has_changed() and rows_of(database, hidden, but=but) != before:
                wrong.append(f"changes a hidden row: {said}")
        is_own = changes_nothing and caller.user is not None and snapshot.has_changed()
        if is_own and _account_of(database, caller.user) != mine:
            wrong.append(f"changes the account: {said}")
    record_property("requests", requests)
    record_property("succeeded", succeeded)
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
    assert requests > 160


def _is_sign_in(answer: Any) -> bool:
    """Return whether a response redirects to the sign-in."""
    return answer.status_code == 303 and "/sign-in" in answer.headers.get("location", "")


def _faults(caller: Caller, route: Any, answer: Any, sent: str) -> Iterator[str]:
    if answer.status_code >= 500:
        yield "a server's error"
    if MARK in answer.text and not caller.sees:
        yield "shows a hidden text"
    if FILE_MARK in answer.text and not (caller.user and caller.user.name.startswith(MARK)):
        yield "shows a hidden file"
    is_named = HIDDEN in answer.text and HIDDEN not in sent
    if is_named and route.method in SAFE and not caller.sees:
        yield "shows a hidden project's name"
    if caller.is_refused:
        if not _is_sign_in(answer) and answer.status_code not in (401, 404, 405):
            yield "lets in one who may not"
    elif (
        not caller.sees
        and route.method not in SAFE
        and "run_id" in route.path
        and answer.status_code not in (401, 403, 404, 422)
    ):
        yield "is done to a hidden run"


def _account_of(database: Database, user: User) -> list[tuple[Any, ...]]:
    """Return the rows that are a user's own and outlive a request."""
    names = ("channels", "alert_rules", "api_tokens", "shared_links", "saved_views", "presets")
    with database.reading() as session:
        return [
            (table.name, *(value for key, value in row.items() if key != "used_at"))
            for table in tables()
            if table.name in (*names, "memberships", "users", "sessions")
            for row in session.execute(select(table).order_by(*table.primary_key)).mappings()
            if row.get("user_id", row.get("id")) == user.id
        ]
