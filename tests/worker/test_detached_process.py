"""A process that is detached from the service."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.site import until
from worker.detached_process import Detached

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h


@pytest.fixture
def no_adoption() -> Iterator[None]:
    """Let orphans of this process go to init, unlike tests.warm."""
    prctl, did = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(did))
    prctl(PR_SET_CHILD_SUBREAPER, 0)
    yield
    prctl(PR_SET_CHILD_SUBREAPER, did)


@pytest.fixture
def detached(tmp_path: Path, no_adoption: None) -> Detached:
    script = "echo $NAME $PPID $$; read line || echo no input; exec sleep 1000"
    own = {"PATH": os.environ["PATH"], "NAME": "w1"}
    return Detached(["sh", "-c", script], own, tmp_path / "logs" / "w1.log")


def test_it_is_no_child_of_its_starters(detached: Detached) -> None:
    """A detached process has its own session, and ends only on request."""
    try:
        until(lambda: "no input" in detached.read_output(1000))
        name, parent, pid = detached.read_output(1000).split()[:3]
        assert name == "w1"
        assert int(parent) != os.getpid()
        assert psutil.Process(int(pid)) not in psutil.Process().children(recursive=True)
        assert os.getsid(int(pid)) != os.getsid(0)
        assert detached.is_alive
    finally:
        detached.stop()
    until(lambda: not detached.is_alive)
    detached.stop()
    assert detached.read_output(6) == "input\n"
