"""Attacks on files outside of the run's folder, by the run or by the service."""

import os
import select
import subprocess

import pytest

from tests.marks import extended
from tests.worker.sandbox.target import PLAIN, PLAIN_USER, ROOT, RUN_USERS, Target, worker_kind

pytestmark = pytest.mark.slow

#: Where a folder with links may be moved to: the service's own folders of a run.
PLACES = (
    ("quarantine-{attempt}", "log"),
    ("log", "quarantine-{attempt}"),
    ("artifacts", "checkpoints"),
    ("spool", "incoming"),
    ("supervisor-{attempt}.log", "outcome-{attempt}.json"),
)


@worker_kind(RUN_USERS)
@pytest.mark.parametrize("ends_by_signal", [False, *extended([True])])
def test_the_service_writes_no_file_for_a_run(target: Target, ends_by_signal: bool) -> None:
    """Links in folders that a run has moved misdirect neither logs nor quarantine nor owners."""
    ids = {}
    for names in PLACES:
        there = target.private / "-".join(names).format(attempt=1)
        there.mkdir(exist_ok=True)
        targets = [str(there / each) for each in ("log", "frames", "made")]
        for each in targets[:2]:
            target.write(type(there)(each), "as it was\n")
        target.give(there)
        plan = {"names": names, "targets": targets, "ends_by_signal": ends_by_signal}
        ids[target.attack("rename.py", plan=plan)] = there
    before = target.snapshot()
    target.wait(*ids)
    assert target.difference(before) == {}


@worker_kind(ROOT)
def test_a_run_changes_nothing_about_files_of_others(target: Target) -> None:
    """A run can change neither mode, owner, times nor attributes of files outside its folder. A
    set-user-ID program in its folder has no effect, and no other user reaches it.
    """
    victim = target.victim
    worn = target.write(target.public / "worn", "x", mode=0o644)
    paths = [target.key, target.canary, worn, target.private, target.site.data]
    paths += [target.folder / "halfstep.db", target.home, target.public / "victim"]
    others = [victim["folder"], victim["cwd"], f"{victim['cwd']}/private.py"]
    plan = {"paths": [*map(str, paths), *others], "owner": PLAIN_USER + 1}
    before = target.snapshot(victim["cwd"])
    run_id = target.attack("metadata.py", plan=plan)
    target.wait(run_id)
    result = target.result(run_id)
    assert result["changed"] == {}
    stranger = {"user": PLAIN_USER + 2, "group": PLAIN_USER + 2, "extra_groups": []}
    listed = subprocess.run(["ls", target.site.scratch(run_id)], capture_output=True, **stranger)
    assert listed.returncode != 0
    assert target.difference(before, victim["cwd"]) == {}


@worker_kind(PLAIN)
def test_a_run_opens_no_terminal_of_others(target: Target) -> None:
    """A run opens no terminals, of others or of the worker's user, and no other devices."""
    terminal, slave = os.openpty()
    path = os.ttyname(slave)
    os.fchown(slave, target.user, target.user)
    try:
        os.write(terminal, b"password\n")
        run_id = target.attack("terminals.py", plan={"terminals": [path]})
        assert target.result(run_id) == {"opened": []}
        assert select.select([slave], [], [], 0)[0]
        assert b"printed" not in os.read(terminal, 1000)
    finally:
        os.close(terminal)
        os.close(slave)
