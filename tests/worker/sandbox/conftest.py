"""Fixtures of workers under attack."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

import pytest

from tests.worker.sandbox.target import KINDS, Target, attacked
from tests.worker.sandbox.test_isolation import python as python_of_all_users

__all__ = ["python_of_all_users"]


@pytest.fixture(scope="session")
def targets(python_of_all_users: Path, sqlite_template: Path) -> Iterator[Callable[[str], Target]]:
    """Return a function that starts a worker of a kind, once for all attacks on it."""
    if os.geteuid() != 0:
        pytest.skip("only root can start workers of several users")
    with ExitStack() as stack:

        @cache
        def start(kind: str) -> Target:
            made = Target(kind, python_of_all_users, sqlite_template)
            stack.enter_context(closing(made))
            stack.enter_context(made.run_worker())
            return made

        yield start


@pytest.fixture(params=[attacked(kind) for kind in KINDS])
def target(request: pytest.FixtureRequest, targets: Callable[[str], Target]) -> Target:
    """A worker of each kind, with secrets."""
    return targets(request.param)
