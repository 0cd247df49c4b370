"""Uploads of large checkpoints to a bucket, if the sender dies or the bucket fails."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from sqlalchemy import select

from db.files import checkpoints
from db.files.object_store import get_file, open_store
from db.settings import Settings
from db.tables import ENDED, RunNode, Status
from tests.buckets import Bucket
from tests.faults.conftest import COUNTS, IS_FULL
from tests.site import Site, is_running, until

IS_LONG = os.environ.get("HALFSTEP_CLUSTERS") == "yes"
pytestmark = [
    pytest.mark.xdist_group("bucket"),
    pytest.mark.skipif(not (IS_FULL or IS_LONG), reason="a minute: make test-faults"),
]
#: Of 16 MiB each; all are 3 GiB in `make test-clusters`.
LAYERS = 192 if IS_LONG else 4
SECONDS = 1800 if IS_LONG else 240
MOST_MEMORY = 400 * 2**20


def test_a_cut_upload_and_a_bucket_that_fails_cost_an_attempt(
    site: Site, bucket: Bucket, tmp_path: Path
) -> None:
    """The lease is renewed during an upload; after a kill attempt 2 continues with all files."""
    bucket.proxy.most_parts = 2
    config = {
        "precision": "fp32",
        "recipe": {"width": 2048, "layers": LAYERS, "batches": 1},
        "training": {"steps": 2, "batch_size": 1},
        "checkpoints": {"every_steps": 1, "keep_last": 5},
        "evaluation": {"every_steps": None},
    }
    run_id = site.submit(recipe="gated_mlp", config=config)
    with site.start_gated_worker():
        until(lambda: bucket.proxy.requests["part"] > 2, SECONDS)
        before = lease(site)
        until(lambda: lease(site) > before)
        supervisor = psutil.Process(site.supervisor_pid(run_id))
        memory = peak_bytes(supervisor.pid)
        os.kill(supervisor.pid, signal.SIGKILL)
        until(lambda: not is_running(supervisor))
        site.open_gate()
        bucket.proxy.is_broken = True
        bucket.proxy.release()
        so_far = bucket.proxy.requests.total()
        until(lambda: bucket.proxy.requests.total() > so_far + 3)
        bucket.proxy.is_broken = False
        until(lambda: site.run(run_id).status in ENDED, SECONDS)
    run = site.run(run_id)
    assert (run.status, run.attempt, run.resumed_step) == (Status.FINISHED, 2, 1)
    assert memory < MOST_MEMORY
    with site.database.reading() as session:
        saved = checkpoints.of_run(session, run_id)
    store = open_store(Settings(data=tmp_path / "other", storage_url=bucket.url))
    for row in saved:
        get_file(store, row.key, tmp_path / "copy", sha256=row.sha256)
        (tmp_path / "copy").unlink()
    assert bucket.keys() == sorted(row.key for row in saved)
    assert {row.step for row in saved} == {1, 2}
    size = max(row.size_bytes for row in saved) / 2**20
    COUNTS.append(f"{size:.0f} MiB cut on the way: whole in attempt 2, by {memory / 2**20:.0f} MiB")


def lease(site: Site) -> float:
    with site.database.reading() as session:
        return session.scalars(select(RunNode.lease_expires_at)).one()


def peak_bytes(pid: int) -> int:
    """Return the peak memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    [peak] = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak) * 1024
