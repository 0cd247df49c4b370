"""Attacks on other processes and on privileges."""

# ruff: noqa: PTH101, PTH102, PTH115, PTH116, PTH119, PTH120, PTH123, PTH208
import ctypes
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import list_succeeded, outcome, plan, report

libc = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE, PTRACE_DETACH = 0x4206, 17
SYS_PROCESS_VM_READV, SYS_IOPRIO_SET, SYS_KCMP = 310, 251, 312
SYS_PIDFD_OPEN, SYS_PIDFD_GETFD, SYS_PIDFD_SEND_SIGNAL = 434, 438, 424
SYS_KEYCTL, SYS_OPEN_TREE, SYS_SETNS = 250, 428, 308
SYS_NAME_TO_HANDLE, SYS_OPEN_BY_HANDLE = 303, 304
CLONE_NEWUSER, CLONE_NEWNS, MS_BIND = 0x10000000, 0x20000, 0x1000


def check_result(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "it failed")
    return result


def syscall(*words: Any) -> int:
    return check_result(libc.syscall(*words))


def read(path: str) -> None:
    with open(path, "rb") as file:
        file.read(1)


def write(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY))


def in_child(action: Callable[[], Any]) -> None:
    """Run an attack in a child process, which ends with its changes."""
    child = os.fork()
    if child == 0:
        os._exit(0 if outcome(action) == "done" else 1)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise PermissionError("in a child")


def trace(pid: int) -> None:
    check_result(libc.ptrace(PTRACE_SEIZE, pid, 0, 0))
    libc.ptrace(PTRACE_DETACH, pid, 0, 0)


def peek(pid: int) -> None:
    """Read one byte of memory where programs usually are."""
    with open(f"/proc/{pid}/maps") as file:
        start = int(file.readline().partition("-")[0], 16)
    here = ctypes.create_string_buffer(8)
    pieces = [struct.pack("QQ", each, 8) for each in (ctypes.addressof(here), start)]
    syscall(SYS_PROCESS_VM_READV, pid, pieces[0], 1, pieces[1], 1, 0)


def take(pid: int) -> None:
    syscall(SYS_PIDFD_GETFD, syscall(SYS_PIDFD_OPEN, pid, 0), 0, 0)


def of_process(pid: int, secret: str) -> dict[str, Callable[[], Any]]:
    """Return attempts to read, trace or signal a process, all without effect."""
    place = f"/proc/{pid}"
    return {
        "signal": lambda: os.kill(pid, 0),
        "signal by pidfd": lambda: signal.pidfd_send_signal(os.pidfd_open(pid), 0),
        "trace": lambda: in_child(lambda: trace(pid)),
        "memory": lambda: peek(pid),
        "descriptor": lambda: take(pid),
        "compare": lambda: syscall(SYS_KCMP, pid, pid, 0, 0, 0),
        "environ": lambda: read(f"{place}/environ"),
        "mem": lambda: read(f"{place}/mem"),
        "maps": lambda: read(f"{place}/maps"),
        "auxv": lambda: read(f"{place}/auxv"),
        "fd": lambda: os.readlink(f"{place}/fd/0"),
        "fd opened": lambda: write(f"{place}/fd/1"),
        "fdinfo": lambda: read(f"{place}/fdinfo/0"),
        "cwd": lambda: os.listdir(f"{place}/cwd"),
        "root": lambda: read(f"{place}/root{secret}"),
        "stack": lambda: read(f"{place}/stack"),
        "clear_refs": lambda: write(f"{place}/clear_refs"),
        "oom_score_adj": lambda: write(f"{place}/oom_score_adj"),
        "comm": lambda: write(f"{place}/comm"),
        "coredump_filter": lambda: write(f"{place}/coredump_filter"),
        "namespace": lambda: syscall(SYS_SETNS, os.open(f"{place}/ns/mnt", os.O_RDONLY), 0),
    }


def list_burdens(pid: int) -> dict[str, Callable[[], Any]]:
    """Return attempts to change a process's limits and scheduling."""
    return {
        "limits": lambda: resource.prlimit(
            pid, resource.RLIMIT_CORE, resource.prlimit(pid, resource.RLIMIT_CORE)
        ),
        "priority": lambda: os.setpriority(
            os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid)
        ),
        "affinity": lambda: os.sched_setaffinity(pid, os.sched_getaffinity(pid)),
        "scheduler": lambda: os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0)),
        "io priority": lambda: syscall(SYS_IOPRIO_SET, 1, pid, 4 | 2 << 13),
    }


def as_own_root(action: Callable[[], Any]) -> None:
    """Act as root of a user namespace."""

    def inside() -> None:
        user, group = os.getuid(), os.getgid()
        check_result(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS))
        outcome(lambda: Path("/proc/self/setgroups").write_text("deny"))
        outcome(lambda: Path("/proc/self/uid_map").write_text(f"0 {user} 1"))
        outcome(lambda: Path("/proc/self/gid_map").write_text(f"0 {group} 1"))
        action()

    in_child(inside)


def mount(source: str, place: str, kind: str | None = None) -> None:
    flags = 0 if kind else MS_BIND
    words = [None if each is None else each.encode() for each in (source, place, kind)]
    check_result(libc.mount(*words, ctypes.c_ulong(flags), None))


def by_tree(secret: str) -> None:
    tree = syscall(SYS_OPEN_TREE, -100, os.path.dirname(secret).encode(), 1)
    os.close(os.open(os.path.basename(secret), os.O_RDONLY, dir_fd=tree))


def by_handle(secret: str) -> None:
    handle = ctypes.create_string_buffer(struct.pack("Ii", 120, 0), 128)
    number = ctypes.c_int()
    syscall(SYS_NAME_TO_HANDLE, -100, secret.encode(), handle, ctypes.byref(number), 0)
    here = os.open(os.environ["TMPDIR"], os.O_RDONLY)
    os.close(syscall(SYS_OPEN_BY_HANDLE, here, handle, os.O_RDONLY))


def made_device(number: int, kind: int) -> None:
    path = Path(os.environ["TMPDIR"], f"device-{number}-{kind}")
    os.mknod(path, kind | 0o600, number)
    try:
        read(str(path))
    finally:
        path.unlink()


def from_key(name: str) -> None:
    for ring in (-4, -5, -3):
        key = libc.syscall(SYS_KEYCTL, 10, ring, b"user", name.encode(), 0)
        if key >= 0:
            syscall(SYS_KEYCTL, 11, key, ctypes.create_string_buffer(100), 100)
            return
    raise PermissionError(name)


def connect(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)


def privileges(wanted: Any) -> dict[str, Callable[[], Any]]:
    """Return attempts to get privileges over the whole machine."""
    secret, temporary = wanted["secret"], os.environ["TMPDIR"]
    folder = os.path.dirname(secret)
    disk = os.stat("/").st_dev
    return {
        "secret": lambda: read(secret),
        "mount": lambda: in_child(lambda: mount(folder, temporary)),
        "unshare": lambda: in_child(lambda: check_result(libc.unshare(CLONE_NEWNS))),
        "chroot": lambda: in_child(lambda: os.chroot(temporary)),
        "setuid": lambda: in_child(lambda: os.setuid(wanted["other_user"])),
        "mount as own root": lambda: as_own_root(lambda: mount("none", temporary, "tmpfs")),
        "proc as own root": lambda: as_own_root(lambda: mount("none", temporary, "proc")),
        "bind as own root": lambda: as_own_root(lambda: mount(folder, temporary)),
        "read as own root": lambda: as_own_root(lambda: read(secret)),
        "chmod as own root": lambda: as_own_root(lambda: os.chmod(secret, 0o600)),
        "tree as own root": lambda: as_own_root(lambda: by_tree(secret)),
        "handle as own root": lambda: as_own_root(lambda: by_handle(secret)),
        "disk as own root": lambda: as_own_root(lambda: made_device(disk, 0o060000)),
        "tree": lambda: by_tree(secret),
        "handle": lambda: by_handle(secret),
        "disk": lambda: made_device(disk, 0o060000),
        "memory": lambda: made_device(os.makedev(1, 1), 0o020000),
        "core_pattern": lambda: write("/proc/sys/kernel/core_pattern"),
        "modprobe": lambda: write("/proc/sys/kernel/modprobe"),
        "sysrq": lambda: write("/proc/sysrq-trigger"),
        "hostname": lambda: write("/proc/sys/kernel/hostname"),
        "uevent": lambda: write("/sys/kernel/uevent_helper"),
        "release agent": lambda: write("/sys/fs/cgroup/memory/release_agent"),
        "cgroup": lambda: write("/sys/fs/cgroup/unified/cgroup.procs"),
        "cgroup v2": lambda: write("/sys/fs/cgroup/cgroup.procs"),
        "new cgroup": lambda: os.mkdir(f"/sys/fs/cgroup/unified/attack-{os.getpid()}"),
        "abstract socket": lambda: connect(f"\0{wanted['socket']}"),
        "key": lambda: from_key(wanted["key"]),
    }


wanted = plan()
opened = {}
for each in os.listdir("/proc/self/fd"):
    with suppress(OSError):  # that of the listing itself
        opened[int(each)] = os.readlink(f"/proc/self/fd/{each}").partition(":")[0]
capabilities = [
    line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff")
]
report(
    {
        "descriptors": sorted(
            f"{number} {name}"
            for number, name in opened.items()
            if number > 2 or name not in ("pipe", "/dev/null")
        ),
        "processes": {
            name: found
            for name, pid in wanted["pids"].items()
            if (found := list_succeeded(of_process(pid, wanted["secret"])))
        },
        "burdened": {
            name: found
            for name, pid in wanted["pids"].items()
            if (found := list_succeeded(list_burdens(pid)))
        },
        "privileges": list_succeeded(privileges(wanted)),
        "capabilities": capabilities,
    }
)
