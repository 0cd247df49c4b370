"""Attacks on supervisor and worker that could delay other runs."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.marks import extended
from tests.site import until
from tests.worker.sandbox.target import DEVICES, PATIENCE, PLAIN, RUN_USERS, Target, worker_kind

pytestmark = pytest.mark.slow
READ = (
    *("outcome-{attempt}.json", "lease-{attempt}.json", "job-{attempt}.json", "log", "spool"),
    *("spool/{attempt}-0.spool", "log/attempt-0001-000001.txt", "log/attempt-0001-000007.txt"),
    *("supervisor-{attempt}.json", "control-{attempt}.json", "quarantine-{attempt}"),
    *("asked-{attempt}", "watch-{attempt}.lock", "crash-{attempt}", "rendezvous-{attempt}.json"),
)
LARGEST_GIB = 1.5


@worker_kind(RUN_USERS)
@pytest.mark.parametrize("again", [False, *extended([True])])
@pytest.mark.parametrize("kind", ["fifo", *extended(["folder", "nested", "names"])])
def test_a_run_stops_neither_supervisor_nor_worker(target: Target, kind: str, again: bool) -> None:
    """Whatever a run writes where the service reads, it ends and other runs start.

    again: whether the run is killed and started a second time.
    """
    if target.kind == PLAIN or (again and kind == "names"):
        pytest.skip("as that of root")
    alike = READ if kind in ("fifo", "folder") else ("",)
    groups = [alike[first::DEVICES] for first in range(min(DEVICES, len(alike)))]
    plans = [{"names": each if any(each) else [], "kind": kind, "again": again} for each in groups]
    ids = {target.attack("stall.py", plan=each): each["names"] for each in plans}
    until_ended(target, list(ids))
    stuck = [ids[each] for each in ids if target.site.run(each).ended_at is None]
    try:
        assert stuck == []
        innocent = [target.submit("true") for _ in range(DEVICES)]
        target.wait(*innocent)
    finally:
        release(target.site.data)


@pytest.mark.extended
def test_a_large_source_takes_no_memory_of_the_service(target: Target) -> None:
    """A run's sparse files of gigabytes are not read as a whole."""
    if target.kind == PLAIN:
        pytest.skip("as that of root")
    names = ["x.py", "outcome-{attempt}.json", "supervisor-{attempt}.json"]
    plan = {"names": names, "kind": "sparse", "gib": 3, "again": True}
    run_id = target.attack("stall.py", "x.py", plan=plan)
    most = 0.0

    def has_ended() -> bool:
        nonlocal most
        most = max(most, peak_gib(target.worker))
        return target.site.run(run_id).ended_at is not None

    until(has_ended, PATIENCE)
    assert most < LARGEST_GIB


def until_ended(target: Target, ids: list[int]) -> None:
    """Wait for runs that may be stuck."""
    try:
        target.wait(*ids)
    except AssertionError:
        return


def peak_gib(worker: psutil.Process) -> float:
    """Return the peak memory of the worker's own processes, in GiB."""
    most = 0
    for each in [worker, *worker.children(recursive=True)]:
        try:
            lines = Path(f"/proc/{each.pid}/status").read_text().splitlines()
        except OSError:
            continue
        most = max([most, *(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))])
    return most / 2**20


def release(folder: Path) -> None:
    """Unblock processes that wait for a pipe in a folder."""
    # Not by a recursive function: a run may have made folders in folders.
    words = ["find", str(folder), "-type", "p", "-print0"]
    found = subprocess.run(words, capture_output=True, check=False).stdout
    for path in filter(None, found.split(b"\0")):
        with suppress(OSError):
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
