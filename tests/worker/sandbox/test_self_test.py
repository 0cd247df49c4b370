"""The self-test of the sandbox, by a worker that is root, one that is not, and one with users."""

import pytest

from db.queue import workers
from tests.worker.sandbox.target import RUN_USERS, Target

pytestmark = pytest.mark.slow


def test_each_kind_of_worker_has_a_working_sandbox(target: Target) -> None:
    """None of the probe's attacks succeeds in the sandbox of any kind of worker."""
    with target.database.reading() as session:
        [(row, _)] = workers.all_workers(session)
        assert row.is_sandboxed, row.sandbox
        assert row.sandbox == ({"users": ""} if target.kind == RUN_USERS else {})
