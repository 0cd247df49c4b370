"""Leaves torch as it was, whatever a framework does."""

from collections.abc import Iterator

import pytest

from halfstep import watching


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """No test leaves a run to the next."""
    yield
    if watching._active is not None:
        watching._active.finish()
