"""The monotonic clock of durations."""

import os
import subprocess
import sys
from pathlib import Path

from halfstep.clock import clock
from tests.faults.clocks_made import HOUR, fake_clock, jump

READ = "import time; from halfstep.clock import clock; print(time.time(), clock(), flush=True)"


def test_a_duration_does_not_follow_a_clock_that_jumps(tmp_path: Path) -> None:
    """Setting the wall clock back an hour between two readings does not change a duration."""
    offset = tmp_path / "offset"
    jump(offset, 0)
    command = [sys.executable, "-c", f"{READ}; input(); {READ.partition(';')[2]}"]
    process = subprocess.Popen(
        command,
        env={**os.environ, **fake_clock(offset)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    wall, before = map(float, process.stdout.readline().split())
    jump(offset, -HOUR)
    rest, _ = process.communicate("\n")
    wall_after, after = map(float, rest.split())
    assert wall_after < wall - HOUR / 2  # so the clock did jump
    assert 0 <= after - before < HOUR / 2


def test_all_processes_of_a_machine_share_the_clock() -> None:
    """A reading in another process is between two readings in this one."""
    before = clock()
    result = subprocess.run(
        [sys.executable, "-c", READ], check=True, capture_output=True, text=True
    ).stdout
    assert before <= float(result.split()[1]) <= clock()
