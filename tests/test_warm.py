"""Tests' processes are forked, which saves time only."""

import os
from pathlib import Path

import pytest

from tests.site import Site

pytestmark = pytest.mark.slow


@pytest.mark.skipif(os.environ.get("HALFSTEP_COLD") == "yes", reason="nothing is forked")
@pytest.mark.only_on("postgresql")
def test_a_worker_forks_although_its_listener_thread_waits(site: Site) -> None:
    """A worker with a waiting listener thread forks supervisors, with torch already loaded."""
    run_id = site.submit(recipe="gated")
    with site.start_gated_worker():
        site.wait_for_step(run_id, 1)
        maps = Path(f"/proc/{site.supervisor_pid(run_id)}/maps").read_text()
        site.open_gate()
        site.wait(run_id)
    assert "libtorch" in maps
