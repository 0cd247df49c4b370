"""The pytest fixture `halfstep_check`, which fails a test whose training makes a mistake of AMP."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from halfstep.check.session import CheckedLoop

Check = Callable[..., AbstractContextManager["CheckedLoop"]]


@pytest.fixture
def halfstep_check() -> Check:
    """Return a context manager in which a training loop is checked.

        def test_training(halfstep_check):
            with halfstep_check(steps=20):
                train()

    steps: to check, 0 for all; the loop goes on after them.  every: only each n-th.
    allow: kinds of mistakes that do not fail the test, as "update_lost".
    Yields the check, whose `report()` has all findings.
    """
    return _check_loop


@contextmanager
def _check_loop(
    *, steps: int = 0, every: int = 1, allow: tuple[str, ...] = ()
) -> "Iterator[CheckedLoop]":
    from halfstep.check.report import as_text
    from halfstep.check.session import CheckedLoop, CheckedSteps  # imports torch

    with CheckedLoop(CheckedSteps(steps=steps, every=every)) as loop:
        yield loop
    report = loop.report("training")
    if not report.steps:
        pytest.fail("halfstep_check: no optimizer stepped", pytrace=False)
    if any(row.is_fault and row.kind not in allow for row in report.rows):
        pytest.fail("\n".join(as_text(report)), pytrace=False)
