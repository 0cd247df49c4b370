"""Attacks on other processes and on the machine."""

import ctypes
import os
import secrets
import signal
import socket
from typing import Any

import psutil
import pytest

from halfstep import sandbox
from tests.marks import extended
from tests.worker.sandbox.target import PLAIN, PLAIN_USER, ROOT, Target, worker_kind

pytestmark = pytest.mark.slow
SYS_ADD_KEY, SYS_KEYCTL, KEYCTL_UNLINK, USER_KEYRING = 248, 250, 9, -4


@pytest.fixture
def reached(target: Target) -> dict[str, Any]:
    """Attack worker, supervisor, another run and this process; return the successful attacks."""
    libc = ctypes.CDLL(None)
    name = f"halfstep-{secrets.token_hex(8)}"
    key = -1
    if target.kind == ROOT:  # the worker's user is this process's
        key = libc.syscall(SYS_ADD_KEY, b"user", name.encode(), b"secret", 6, USER_KEYRING)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        neighbour = psutil.Process(target.victim["pid"])
        pids = {"worker": target.worker.pid, "victim": neighbour.pid, "test": os.getpid()}
        others = {each.pid for each in target.worker.children(recursive=True)}
        others -= {each.pid for each in (*neighbour.children(recursive=True), neighbour)}
        pids |= {f"child {number}": pid for number, pid in enumerate(sorted(others))}
        plan = {"pids": pids, "secret": str(target.key), "other_user": PLAIN_USER + 1}
        plan |= {"socket": name, "key": name}
        try:
            result: dict[str, Any] = target.result(target.attack("processes.py", plan=plan))
        finally:
            if key >= 0:
                libc.syscall(SYS_KEYCTL, KEYCTL_UNLINK, key, USER_KEYRING)
    return result


@worker_kind(ROOT)
def test_a_run_reaches_no_other_process(target: Target, reached: dict[str, Any]) -> None:
    """A run can neither read, trace, signal nor change another process, nor gain privileges."""
    reached.pop("burdened")
    reached = {name: value for name, value in reached.items() if value}
    capabilities = int(reached.pop("capabilities")[0].split()[1], 16)
    assert capabilities & ~(1 << 1) == 0  # DAC_OVERRIDE
    if target.kind == ROOT:  # shares the kernel's keyring of its user: docs/explanation/security.md
        reached["privileges"] = [each for each in reached["privileges"] if each != "key"]
        reached = {name: value for name, value in reached.items() if value}
    if sandbox.version() < sandbox.WITH_SIGNALS:
        for names in reached.get("processes", {}).values():
            names[:] = [each for each in names if not each.startswith("signal")]
    assert reached == {}


@pytest.mark.extended
def test_a_run_slows_no_other_process(reached: dict[str, Any]) -> None:
    """A run cannot change another process's limits, priority or CPU affinity."""
    assert reached["burdened"] == {}


@worker_kind(PLAIN)
@pytest.mark.parametrize("holds_output", [True, *extended([False])])
def test_nothing_of_a_run_outlives_it(target: Target, holds_output: bool) -> None:
    """A run that kills its parent and leaves processes ends, and none of them survive.

    holds_output: whether they keep the pipes open from which the supervisor reads.
    """
    mark = f"survivor-{secrets.token_hex(8)}"
    plan = {"mark": mark, "holds_output": holds_output}
    target.wait(target.attack("survivor.py", plan=plan))
    target.wait(target.submit("true"))
    left = [each for each in psutil.process_iter() if mark in _command(each)]
    try:
        assert left == []
    finally:
        for each in left:
            each.send_signal(signal.SIGKILL)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
