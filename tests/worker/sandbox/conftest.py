"""Workers under attack."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.sandbox.target import KINDS, Target
from tests.worker.sandbox.test_isolation import python as python_of_all_users

__all__ = ["python_of_all_users"]


@pytest.fixture(params=KINDS)
def target(
    request: pytest.FixtureRequest, python_of_all_users: Path, sqlite_template: Path
) -> Iterator[Target]:
    """A worker of each kind, with secrets."""
    if os.geteuid() != 0:
        pytest.skip("only root can start workers of several users")
    made = Target(request.param, python_of_all_users, sqlite_template)
    try:
        yield made
    finally:
        made.close()
