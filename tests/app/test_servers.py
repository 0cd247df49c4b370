"""Several server processes behind one address, with one database."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx2
import pytest
from sqlalchemy import select, text, update

from db.access import accounts
from db.access.login_attempts import FREE_ATTEMPTS
from db.errors import Conflict
from db.queue import claims, queue
from db.tables import LoginAttempts
from tests import warm
from tests.app.conftest import CONFIG, offer_digits
from tests.db.telemetry.telemetry_made import make_steps, record
from tests.site import SECONDS, Site, answers, free_port, until

PASSWORD = "a long secret"
PUBLIC = "http://halfstep.example"


@contextmanager
def server(site: Site) -> Iterator[httpx2.Client]:
    """Start a server, and return a browser that reaches it as through a load balancer."""
    port = free_port()
    environment = {**os.environ, **site.environment, "HALFSTEP_PORT": str(port)}
    environment |= {"HALFSTEP_PUBLIC_URL": PUBLIC, "HALFSTEP_HOST_NAMES": "halfstep.example"}
    process = warm.Popen([sys.executable, "-m", "halfstep.cli.main", "server"], env=environment)
    base = f"http://127.0.0.1:{port}"
    headers = {"Host": "halfstep.example", "Origin": PUBLIC}
    try:
        until(lambda: answers(base))
        with httpx2.Client(base_url=base, headers=headers, timeout=60) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


@pytest.mark.only_on("postgresql")
def test_two_servers_are_as_one(site: Site) -> None:
    """Two servers share sessions and failed sign-ins, and each shows the other's changes live."""
    offer_digits(site.database)
    with site.database.writing() as session:
        accounts.set_password(session, session.merge(site.owner), PASSWORD)
    with ExitStack() as stack:
        a, b = (stack.enter_context(server(site)) for _ in range(2))
        assert a.post("/sign-in", data={"name": "ada", "password": PASSWORD}).status_code == 303
        [(name, secret)] = a.cookies.items()
        cookie = {"Cookie": f"{name}={secret}"}
        page = b.get("/account", headers=cookie)
        assert page.status_code == 200
        token = page.text.partition('name="csrf-token" content="')[2].partition('"')[0]
        run = {"recipe": "digits", "config": CONFIG}
        made = a.post("/api/v1/runs", json=run, headers=cookie | {"X-CSRF-Token": token})
        assert made.status_code == 201
        with site.database.writing() as session:
            limits = {"precisions": ["fp16"], "free_devices": [0], "lease_seconds": 60.0}
            running = claims.claim(session, 1, recipes=["digits"], **limits)
            assert running is not None
            queue.seconds_since_start(session, running)
            queue.start(session, running.id, 1)
        with b.stream("GET", "/api/v1/runs/1/live?parts=steps", headers=cookie) as stream:
            lines = stream.iter_lines()
            record(site.database, running, make_steps([1.0, 2.0]))
            for line in lines:
                result = json.loads(line[6:]) if line.startswith("data: ") else {}
                if result.get("steps"):
                    break
            assert result["steps"]["step"] == [1, 2]

        guess = {"name": "ada", "password": "wrong"}
        both = [a, b] * FREE_ATTEMPTS["name"]
        free = [each.post("/sign-in", data=guess) for each in both[: FREE_ATTEMPTS["name"]]]
        assert [each.status_code for each in free] == [401] * FREE_ATTEMPTS["name"]
        with site.database.writing() as session:
            counted = session.scalars(
                select(LoginAttempts.count).where(LoginAttempts.kind == "name")
            ).all()
            assert counted == [FREE_ATTEMPTS["name"]]
            # However slow the machine is, the wait has not passed by the next try.
            session.execute(update(LoginAttempts).values(open_at=LoginAttempts.open_at + 3600))
        assert [each.post("/sign-in", data=guess).status_code for each in (a, b)] == [429, 429]


def test_a_server_whose_database_is_migrated_stops_with_one_sentence(site: Site) -> None:
    """A server whose database a newer version migrates ends with one sentence, since each request
    would fail.
    """
    environment = {**os.environ, **site.environment, "HALFSTEP_PORT": str(free_port())}
    process = warm.Popen(
        [sys.executable, "-m", "halfstep.cli.main", "server"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: answers(f"http://127.0.0.1:{environment['HALFSTEP_PORT']}"))
    _set_revision(site, "9999")
    _out, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    [sentence] = [line for line in said.splitlines() if "9999" in line]
    assert "was migrated to revision 9999 by another version of Halfstep" in sentence
    assert "Traceback" not in said


def test_a_worker_whose_database_is_migrated_stops_with_one_sentence(site: Site) -> None:
    """A worker whose database was migrated ends at its next heartbeat with one sentence."""
    worker = site.idle_worker()
    _set_revision(site, "9999")
    with pytest.raises(Conflict, match="migrated to revision 9999 by another version"):
        worker._send_heartbeat()


def _set_revision(site: Site, revision: str) -> None:
    with site.database.writing() as session:
        session.execute(text(f"UPDATE alembic_version SET version_num = '{revision}'"))
