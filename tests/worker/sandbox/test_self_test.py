"""The sandbox's self-test by workers as root, as a user, and with users for runs."""

import pytest

from db.queue import workers
from tests.worker.sandbox.target import RUN_USERS, Target

pytestmark = pytest.mark.slow


def test_each_kind_of_worker_has_a_working_sandbox(target: Target) -> None:
    """No attack of the probe succeeds in the sandbox, for any kind of worker."""
    with target.database.reading() as session:
        [(row, _)] = workers.all_workers(session)
        assert row.is_sandboxed, row.sandbox
        assert row.sandbox == ({"users": ""} if target.kind == RUN_USERS else {})
