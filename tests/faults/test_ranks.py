"""Runs of several processes: a kill of any of them leaves none."""

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from db.tables import Status
from tests.faults.conftest import COUNTS, IS_FULL, often
from tests.site import SECONDS, Site, is_running, until


def launcher(family: list[psutil.Process]) -> psutil.Process:
    return family[1]


def rank(family: list[psutil.Process]) -> psutil.Process:
    return family[-1]


def supervisor(family: list[psutil.Process]) -> psutil.Process:
    return family[0]


@pytest.mark.only_on("sqlite")
@pytest.mark.parametrize("victim", [launcher, rank, supervisor] if IS_FULL else [rank])
def test_no_process_of_a_gang_survives(
    site: Site, victim: Callable[[list[psutil.Process]], psutil.Process]
) -> None:
    """5 s after a SIGKILL of the ranks' parent, a rank or the supervisor all have ended, and
    attempt 2 begins.
    """
    run_id = site.submit(steps=10**6, devices_per_node=2)
    with site.worker(HALFSTEP_CPU_DEVICES="2"):
        site.wait_for_step(run_id, 5)
        top = psutil.Process(site.supervisor_pid(run_id))
        family = [top, *top.children(recursive=True)]
        assert len(family) == 4  # supervisor, launcher, two ranks
        os.kill(victim(family).pid, signal.SIGKILL)
        until(lambda: not any(map(is_running, family)), seconds=often(full=5, short=SECONDS))
        site.wait(run_id, Status.STARTING, Status.RUNNING)
    left = sum(map(is_running, family))
    COUNTS.append(f"{victim.__name__} of a gang of two killed: {left} of 4 processes left")
