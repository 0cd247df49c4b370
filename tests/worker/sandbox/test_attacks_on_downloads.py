"""Attacks by files that the server sends."""

from collections.abc import Iterator

import pytest
from anyio.from_thread import start_blocking_portal
from sqlalchemy import select
from starlette.testclient import TestClient

from app.main import create_app
from db.access import accounts
from db.settings import Settings
from db.tables import Artifact
from tests.marks import extended
from tests.site import until
from tests.worker.sandbox.target import PATIENCE, ROOT, Target, worker_kind

pytestmark = pytest.mark.slow
#: 400 tries against a server that checks before it opens sometimes show nothing; full: 2000.
TRIES = [200, *extended([2000])]


@pytest.fixture
def client(target: Target) -> Iterator[TestClient]:
    """A client with Mallory's token."""
    settings = Settings(data=target.site.data, database_url=target.site.url)
    with target.database.writing() as session:
        token, _row = accounts.make_api_token(session, target.mallory, "script")
    headers = {"Authorization": f"Bearer {token}"}
    app = create_app(settings, target.database)
    with (
        start_blocking_portal() as portal,
        TestClient(
            app, base_url="http://localhost", headers=headers, raise_server_exceptions=False
        ) as client,
    ):
        assert portal
        yield client


@worker_kind(ROOT)
@pytest.mark.parametrize("tries", TRIES)
def test_a_download_sends_no_file_of_others(target: Target, client: TestClient, tries: int) -> None:
    """The download of a file that its run swaps with a link never has the link's target."""
    secret = target.secrets["key"]
    gate = target.public / "downloaded"
    plan = {"secret": str(target.key), "size": len(secret), "gate": str(gate)}
    run_id = target.attack("swap.py", plan=plan)
    target.result(run_id)
    number = artifact_of(target, run_id)
    if number is not None:
        address = f"/runs/{run_id}/artifacts/{number}/download"
        for each in range(tries):
            assert secret not in client.get(address).text, f"in try {each}"
    gate.touch()
    target.wait(run_id)
    assert secret not in client.get(f"/runs/{run_id}/log/download").text
    assert target.key.read_text() == secret


def artifact_of(target: Target, run_id: int) -> int | None:
    """Wait until a run's artifact is recorded; return None if it was refused."""
    found: list[int] = []

    def has_come() -> bool:
        with target.database.reading() as session:
            found.extend(session.scalars(select(Artifact.id).where(Artifact.name == "x.txt")))
        return bool(found) or target.site.run(run_id).ended_at is not None

    until(has_come, PATIENCE)
    return found[0] if found else None
