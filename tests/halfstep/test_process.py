"""Which process it is."""

import os
import subprocess
import sys

from halfstep import process
from tests.site import until


def test_a_process_lives_until_it_has_died() -> None:
    """Also before its exit code is read; another process with the same number does not count."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    since = process.started(child.pid)
    assert process.lives(child.pid, since)
    assert not process.lives(os.getpid(), since)
    child.kill()
    until(lambda: not process.lives(child.pid, since))
    child.communicate()
    assert process.started(child.pid) is None
    assert not process.lives(child.pid, None)
