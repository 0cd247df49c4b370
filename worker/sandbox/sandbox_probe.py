"""Tries forbidden operations inside a run's sandbox; prints those that succeeded.

    python -I -m halfstep.isolation python -I -m worker.sandbox.sandbox_probe

Nothing is changed: a file is opened for writing but not written, and a created file is deleted.
"""

import json
import os
import secrets
import socket
import stat
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

#: A unique file name.
NAME = f".halfstep-probe-{secrets.token_hex(8)}"
MOST_FILES = 100  # files per folder tried for reading


def can_write(path: str) -> bool:
    """Return whether a file, or a new one in a folder, can be opened for writing."""
    place = Path(path)
    while not _is(place.exists):
        place = place.parent
    if not _is(place.is_dir):
        return _opens(place, os.O_WRONLY)
    created = place / NAME
    if not _opens(created, os.O_WRONLY | os.O_CREAT | os.O_EXCL):
        return False
    created.unlink()
    return True


def can_read(path: str) -> bool:
    """Return whether a file, or one in a folder, can be opened; listing names is allowed."""
    place = Path(path)
    files = islice(place.rglob("*"), MOST_FILES) if _is(place.is_dir) else [place]
    return any(_opens(file, os.O_RDONLY) for file in files if _is(file.is_file))


def can_change(path: str) -> bool:
    """Return whether mode, owner, times or extended attributes can be set, to what they are."""
    try:
        found = os.stat(path)  # noqa: PTH116 - like the following
    except OSError:
        return False
    times = (found.st_atime_ns, found.st_mtime_ns)
    attempts: list[Callable[[], None]] = [
        lambda: os.chmod(path, stat.S_IMODE(found.st_mode)),  # noqa: PTH101
        lambda: os.chown(path, found.st_uid, found.st_gid),
        lambda: os.utime(path, ns=times),
        lambda: os.setxattr(path, f"user.{NAME}", b""),
    ]
    changed = [_succeeds(attempt) for attempt in attempts]
    if changed[-1]:
        os.removexattr(path, f"user.{NAME}")
    return any(changed)


def can_signal(pid: str) -> bool:
    """Return whether a process can be signalled."""
    return _succeeds(lambda: os.kill(int(pid), 0))


def can_connect(path: str) -> bool:
    """Return whether a Unix socket accepts a connection."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
        except OSError:
            return False
        return True


def _is(question: Callable[[], bool]) -> bool:
    """Return the result of a check; False if access is denied."""
    try:
        return question()
    except OSError:
        return False


def _succeeds(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True


def _opens(path: Path, flags: int) -> bool:
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    return True


def cannot_write(path: str) -> bool:
    """Return whether writing to the run's own folder is denied, which would void the probe."""
    return not can_write(path)


TRIALS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "write": ("write", can_write),
    "read": ("read", can_read),
    "change": ("change", can_change),
    "signal": ("signal", can_signal),
    "connect to": ("connect", can_connect),
    "not write its own": ("own", cannot_write),
}


def main() -> None:
    """Print one JSON object: by operation, the paths where it succeeded."""
    request = json.load(sys.stdin)
    results = {verb: list(filter(tried, request[key])) for verb, (key, tried) in TRIALS.items()}
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
