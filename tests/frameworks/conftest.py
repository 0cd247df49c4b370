"""Leaves torch as it was, whatever a framework does."""

from collections.abc import Iterator

import pytest

from halfstep.session import watch_session


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """No test leaves a run to the next."""
    yield
    if watch_session._active is not None:
        watch_session._active.finish()
