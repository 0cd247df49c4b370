"""The server's background tasks."""

import logging
from threading import Event

import pytest

from app.periodic_tasks import repeating


def test_a_failing_task_is_repeated_and_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The failing task is logged by name; shutdown ends all tasks and names slow ones."""
    tried, stopping, outlived, done = [], Event(), Event(), Event()

    def breaks() -> None:
        tried.append(1)
        if len(tried) == 3:
            outlived.set()
        raise ValueError("broken")

    def takes_long() -> None:
        stopping.wait()
        done.set()

    with (
        caplog.at_level(logging.ERROR),
        repeating({"breaking": (breaks, 0.0), "slow": (takes_long, 0.0)}, stopping),
    ):
        outlived.wait()
        assert not done.is_set()
    assert done.is_set()
    assert "breaking failed" in caplog.text
