"""Valid and invalid requests to every operation of the API description, as each kind of user.

`make test-all` sends more than a thousand requests; `make test-security` sends enough on each
database to show a memory leak of the server.
"""

import gc
import os
from collections.abc import Callable
from itertools import cycle
from typing import Any

import psutil
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as trying
from schemathesis import Case, GenerationMode
from starlette.testclient import TestClient

from app.http.openapi_docs import describe
from db.access import accounts, projects
from db.access.permissions import MAINTAINER, MEMBER, VIEWER
from db.database import Database
from db.settings import Settings
from db.tables import CONTROL, FULL, ONE_RUN, READ, SUBMIT, WRITE, Run, User
from tests.db.conftest import make_watched
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record

pytestmark = [pytest.mark.slow, pytest.mark.extended]

ROUNDS = int(os.environ.get("HALFSTEP_FUZZ_ROUNDS", "1"))
IS_FULL = ROUNDS > 1
MIB = 2**20
#: By role, and kind of the token.
ANY_GROUP = [
    ("stranger", ""),
    ("viewer", FULL),
    ("member", SUBMIT),
    ("maintainer", CONTROL),
    ("maintainer", WRITE),
    ("maintainer", ONE_RUN),
    ("operator", READ),
    ("operator", FULL),
]
#: Bodies that schemathesis knows no form of: it sends them as they are.
RAW = ["application/x-ndjson", "image/png", "image/jpeg", "image/gif", "image/webp"]
schemathesis.serializer.alias(RAW, "application/octet-stream")
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
#: The requests are the same each time, but for the long way.
configured = trying(
    max_examples=len(ANY_GROUP),
    phases=[Phase.generate],
    database=None,
    derandomize=not IS_FULL,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def people(database: Database, ada: User) -> dict[str, User]:
    """Ada, who is an admin, and a user of each role."""
    found = {"operator": ada}
    with database.writing() as session:
        for role in (VIEWER, MEMBER, MAINTAINER):
            found[role] = accounts.make_user(session, role)
            projects.set_role(session, found[role], projects.DEFAULT, role)
    return found


def _operations(app: FastAPI) -> list[Any]:
    schema = schemathesis.openapi.from_dict(describe(app))
    # A stream has no end, and what is done to accounts is tests/app/auth/test_users_pages.py's.
    left_out = ("/live", "/users/{user_id}/{change}")
    found = [each.ok() for each in schema.get_all_operations()]
    return [each for each in found if not each.path.endswith(left_out)]


def _headers(database: Database, people: dict[str, User], name: str, kind: str) -> dict[str, str]:
    if name == "stranger":
        return {}
    with database.writing() as session:
        user = people[name]
        run_id = make_watched(session, user).run_id if kind == ONE_RUN else None
        token, _row = accounts.make_api_token(session, user, "fuzz", kind, run_id=run_id)
    return {"Authorization": f"Bearer {token}"}


def test_every_response_is_documented(
    app: FastAPI, settings: Settings, database: Database, people: dict[str, User], running: Run
) -> None:
    """Every response has a documented status that is no 5xx, for any user.

    The server's memory does not grow during a long test.
    """
    if database.engine.dialect.name != "sqlite" and not IS_FULL:
        pytest.skip("`make test-security` does it on PostgreSQL too")
    settings.data.mkdir(exist_ok=True)  # as a server has it, which keeps its key of secrets there
    record(database, running, make_steps([1.0, 2.0]), events=[make_metric(1, 1.0)])
    everybody = cycle([_headers(database, people, *each) for each in ANY_GROUP])
    wrong: list[str] = []
    sizes, count = [], 0
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:

        def send(operation: Any, case: Case) -> None:
            nonlocal count
            count += 1
            asked = case.as_transport_kwargs("http://localhost", next(everybody))
            asked.pop("cookies", None)
            if isinstance(asked.get("data"), bytes | str):
                asked["content"] = asked.pop("data")
            answer = client.request(**asked)
            documented = {int(status) for status in operation.definition.raw["responses"]}
            if answer.status_code >= 500 or answer.status_code not in documented:
                body = str(asked.get("json", ""))[:200]
                text = f"{answer.status_code} {answer.request.method} {answer.request.url} {body}"
                wrong.append(f"{text}: {answer.text[:200]}")

        senders = [
            _sender(operation, mode, send) for operation in _operations(app) for mode in MODES
        ]
        for _round in range(ROUNDS):
            for sender in senders:
                sender()
            gc.collect()
            sizes.append(psutil.Process().memory_info().rss)
    assert "\n".join(wrong) == ""
    assert count >= 1000 * ROUNDS
    assert sizes[-1] - sizes[len(sizes) // 3] < 64 * MIB


def _sender(
    operation: Any, mode: GenerationMode, send: Callable[[Any, Case], None]
) -> Callable[[], None]:
    """Return a test that sends valid or invalid requests to an operation as each kind of user."""

    @configured
    @given(case=operation.as_strategy(generation_mode=mode))
    def sender(case: Case) -> None:
        send(operation, case)

    return sender
