"""Shared helpers of the tests of kills."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests import warm
from tests.site import Site, answers, until


@contextmanager
def serving(site: Site, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `halfstep server`, and wait until it responds."""
    process = warm.Popen(
        [sys.executable, "-m", "halfstep.cli.main", "server"],
        env={**os.environ, **site.environment, "HALFSTEP_PORT": str(port)},
        stdout=subprocess.DEVNULL,
    )
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}"))
        yield process
    finally:
        process.terminate()
        process.wait()
