"""Opens devices and terminals, and types into them."""

# ruff: noqa: B023, PTH116
import fcntl
import os
import select
import stat
import termios
from pathlib import Path

from common import outcome, plan, report

TIOCLINUX = 0x541C
#: What a run needs, and accelerators.
HARMLESS = (
    "null",
    "zero",
    "full",
    "random",
    "urandom",
    "ptmx",
    "pts/ptmx",  # of its own instance
    "nvidia",
    "dri",
    "kfd",
    "dxg",
    "accel",
    "infiniband",
)

wanted = plan()
done = []


def try_all(path: str) -> None:
    for flags, how in (
        (os.O_RDONLY, "read"),
        (os.O_WRONLY, "write"),
        (os.O_RDWR, "read and write"),
    ):
        try:
            descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            continue
        done.append(f"{path}: {how}")
        can_read = flags != os.O_WRONLY and path in wanted["terminals"]
        if can_read and select.select([descriptor], [], [], 0)[0] and os.read(descriptor, 100):
            done.append(f"{path}: saw what was typed")
        if flags != os.O_RDONLY and path in wanted["terminals"]:
            if outcome(lambda: os.write(descriptor, b"printed")) == "done":
                done.append(f"{path}: printed")
            if outcome(lambda: fcntl.ioctl(descriptor, termios.TIOCSTI, b"x")) == "done":
                done.append(f"{path}: typed")
            if outcome(lambda: fcntl.ioctl(descriptor, TIOCLINUX, b"\3")) == "done":
                done.append(f"{path}: pasted")
            if outcome(lambda: fcntl.ioctl(descriptor, termios.TIOCSCTTY, 1)) == "done":
                done.append(f"{path}: controls")
        os.close(descriptor)


for path in wanted["terminals"]:
    try_all(path)
    # The same by a path that is not below /dev.
    try_all(f"/proc/{os.getpid()}/root{path}")
for path in map(str, Path("/dev").rglob("*")):
    try:
        mode = os.stat(path).st_mode
    except OSError:
        continue
    name = path.removeprefix("/dev/")
    is_own = path.startswith(("/dev/shm", "/dev/fd", "/dev/std")) or name.startswith(HARMLESS)
    if (
        (stat.S_ISCHR(mode) or stat.S_ISBLK(mode))
        and not is_own
        and path not in wanted["terminals"]
    ):
        try_all(path)
report({"opened": done})
