"""A process that is nobody's child."""

import os
from pathlib import Path

import psutil
import pytest

from tests.site import until
from worker.detached import Detached


@pytest.fixture
def detached(tmp_path: Path) -> Detached:
    script = "echo $NAME $PPID $$; read line || echo no input; exec sleep 1000"
    own = {"PATH": os.environ["PATH"], "NAME": "w1"}
    return Detached(["sh", "-c", script], own, tmp_path / "logs" / "w1.log")


def test_it_is_no_child_of_its_starters(detached: Detached) -> None:
    """In a session of its own; it ends when it is asked, and only then."""
    try:
        until(lambda: "no input" in detached.printed(1000))
        name, parent, pid = detached.printed(1000).split()[:3]
        assert name == "w1"
        assert int(parent) != os.getpid()
        assert psutil.Process(int(pid)) not in psutil.Process().children(recursive=True)
        assert os.getsid(int(pid)) != os.getsid(0)
        assert detached.is_alive
    finally:
        detached.stop()
    until(lambda: not detached.is_alive)
    detached.stop()
    assert detached.printed(6) == "input\n"
