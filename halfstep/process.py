"""Identity, memory protection, signals and garbage collection of processes."""

import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4  # linux/prctl.h
MOST_SHEBANG_BYTES = 256  # that Linux reads


def close_to_others() -> None:
    """Hide memory and environment, which hold passwords, from other processes of the user."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0)


def open_to_others() -> None:
    """Undo `close_to_others`, which a change of the user also does, as a new program does."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 1)


def end_with_parent() -> None:
    """Kill this process when its parent ends: strictly, the parent's thread that started it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def outlive_parent() -> None:
    """Undo `end_with_parent`."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, 0)


def end_as(code: int) -> NoReturn:
    """End like a process with this exit code, negative for a signal; without a core dump."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def script_problem(program: str, folder: Path) -> str | None:
    """Return why the first line of a script names no interpreter; None if it does, or has none.

    The error of Linux is then that there is no such file, as if the script were missing.
    """
    with suppress(OSError), Path(folder, program).open("rb") as file:
        line = file.readline(MOST_SHEBANG_BYTES)
        if not line.startswith(b"#!"):
            return None
        if line.endswith((b"\r\n", b"\r")):
            end = "the first line ends with a carriage return"
            return f"{program}: {end}; convert the file to Unix line ends"
        interpreter = line[2:].split()[:1]
        if interpreter and not Path(os.fsdecode(interpreter[0])).exists():
            return (
                f"{program}: there is no {os.fsdecode(interpreter[0])}, which its first line names"
            )
    return None


def on_signals(handler: Callable[..., object] | signal.Handlers) -> None:
    """Handle SIGINT, SIGTERM and SIGHUP, unless they are ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, handler)


@contextmanager
def loading_modules() -> Iterator[None]:
    """Turn garbage collection off, which takes a fifth of the time of a large import."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def read_start_ticks(pid: int) -> int | None:
    """Return a process's start time in kernel ticks since boot; None if it is gone."""
    try:
        # The name is in parentheses, and may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # fields 3 and 22 of proc(5)


def lives(pid: int, since: int | None) -> bool:
    """Return whether the process is still alive. since: its start time, from `read_start_ticks`."""
    return since is not None and read_start_ticks(pid) == since


def pid_space() -> str | None:
    """Return the boot and PID namespace in which this process's PIDs are valid; None: unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None
