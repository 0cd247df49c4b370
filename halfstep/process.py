"""Which process it is, over the life of the machine, who may look into it, and what ends it."""

import ctypes
import signal
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4  # linux/prctl.h


def close_to_others() -> None:
    """Let no other process of our user read our memory and environment, which hold passwords."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0)


def end_with_parent() -> None:
    """Be killed when the parent ends: its thread, to be exact, that started this process."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def started(pid: int) -> int | None:
    """Return when a process began, in the kernel's ticks since its own start; None: it is gone."""
    try:
        # Its name stands in brackets, and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # of 3 and 22, in proc(5)


def lives(pid: int, since: int | None) -> bool:
    """Return whether this very process goes on; since: when it began, as `started` says."""
    return since is not None and started(pid) == since


def pid_space() -> str | None:
    """Return in which boot and PID namespace this process's PIDs are valid; None: unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None
