"""Changes what Landlock does not protect: modes, owners, times and attributes."""

# ruff: noqa: B023, PTH101, PTH104, PTH108, PTH116
import ctypes
import mmap
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import list_succeeded, outcome, plan, report, writable_folders

libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD, AT_EMPTY_PATH = -100, 0x1000
SYS_LCHOWN, SYS_FCHMODAT2, SYS_SETXATTRAT = 94, 452, 463
SYS_IO_URING_SETUP, SYS_IO_URING_ENTER, OP_SETXATTR = 425, 426, 42


def check_result(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "it failed")


def syscall(*words: Any) -> None:
    check_result(libc.syscall(*words))


def by_descriptor(path: str, flags: int, action: Callable[[int], Any]) -> None:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    try:
        action(descriptor)
    finally:
        os.close(descriptor)


def by_32_bits(number: int, path: str, *values: int) -> None:
    """Make a call by the 32-bit entry, which a seccomp filter may overlook."""
    code = bytes.fromhex("53 89f8 89f3 87d1 cd80 5b c3")
    area = mmap.mmap(-1, 8192, prot=7, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40)
    area[: len(code)] = code
    area[4096 : 4096 + len(path) + 1] = path.encode() + b"\0"
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int] * 4)(start)
    child = os.fork()  # a kernel without this entry kills who uses it
    if child == 0:
        result = function(number, start + 4096, *values, *[0] * (2 - len(values)))
        os._exit(0 if result >= 0 else 1)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise PermissionError("32 bits")


def by_ring(path: str) -> None:
    """Set an attribute by io_uring, which a seccomp filter does not see."""
    parameters = bytearray(120)
    raw = (ctypes.c_char * 120).from_buffer(parameters)
    ring = libc.syscall(SYS_IO_URING_SETUP, 4, raw)
    check_result(ring)
    try:
        size = 4096 * 4
        queue = mmap.mmap(ring, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, 3, offset=0)
        entries = mmap.mmap(ring, 4096, mmap.MAP_SHARED | mmap.MAP_POPULATE, 3, offset=0x10000000)
        _head, tail, _mask, _count, _flags, _dropped, array = struct.unpack_from(
            "7I", parameters, 40
        )
        completions = struct.unpack_from("6I", parameters, 80)[5]
        texts = [
            ctypes.create_string_buffer(each) for each in (b"user.attack", b"x", path.encode())
        ]
        name, value, place = map(ctypes.addressof, texts)
        entry = struct.pack("<BBHiQQIIQ", OP_SETXATTR, 0, 0, 0, value, name, 1, 0, 7)
        entries[: len(entry)] = entry
        entries[48:56] = struct.pack("<Q", place)
        struct.pack_into("I", queue, array, 0)
        struct.pack_into("I", queue, tail, 1)
        syscall(SYS_IO_URING_ENTER, ring, 1, 1, 1, None, 0)
        result = struct.unpack_from("<Qi", queue, completions)[1]
        if result < 0:
            raise OSError(-result, "it failed")
    finally:
        os.close(ring)


def attempts(path: str, owner: int) -> dict[str, Callable[[], Any]]:
    """Return attempts that each make a file readable for others or change its owner."""
    held = "/proc/self/fd/{}"
    x86 = os.uname().machine == "x86_64"
    return {
        "chmod": lambda: os.chmod(path, 0o777),
        "setuid": lambda: os.chmod(path, 0o4755),
        "chown": lambda: os.chown(path, owner, owner),
        "chgrp": lambda: os.chown(path, -1, owner),
        "lchown": lambda: syscall(SYS_LCHOWN, path.encode(), owner, owner) if x86 else 1 / 0,
        "utime": lambda: os.utime(path, (1, 1)),
        "setxattr": lambda: os.setxattr(path, "user.attack", b"x"),
        "capability": lambda: os.setxattr(path, "security.capability", b"\1\0\0\2" + b"\xff" * 16),
        "acl": lambda: os.setxattr(path, "system.posix_acl_access", acl()),
        "setxattrat": lambda: setxattrat(path),
        "io_uring": lambda: by_ring(path),
        "truncate": lambda: os.truncate(path, 1),
        "fchmod": lambda: by_descriptor(path, os.O_RDONLY, lambda fd: os.fchmod(fd, 0o777)),
        "fchown": lambda: by_descriptor(path, os.O_RDONLY, lambda fd: os.fchown(fd, owner, owner)),
        "futimens": lambda: by_descriptor(path, os.O_RDONLY, lambda fd: os.utime(fd, (1, 1))),
        "fsetxattr": lambda: by_descriptor(
            path, os.O_RDONLY, lambda fd: os.setxattr(fd, "user.attack", b"x")
        ),
        "fchmodat2 of O_PATH": lambda: by_descriptor(
            path,
            os.O_PATH,
            lambda fd: syscall(SYS_FCHMODAT2, fd, b"", 0o777, AT_EMPTY_PATH),
        ),
        "chmod by /proc": lambda: by_descriptor(
            path, os.O_PATH, lambda fd: os.chmod(held.format(fd), 0o777)
        ),
        "chown by /proc": lambda: by_descriptor(
            path, os.O_PATH, lambda fd: os.chown(held.format(fd), owner, owner)
        ),
        "fchownat of O_PATH": lambda: by_descriptor(
            path,
            os.O_PATH,
            lambda fd: check_result(libc.fchownat(fd, b"", owner, owner, AT_EMPTY_PATH)),
        ),
        "rename": lambda: os.rename(path, f"{path}.moved"),
        "unlink": lambda: os.unlink(path),
        "hard link": lambda: os.link(path, Path(os.environ["TMPDIR"], "hard")),
        "32-bit chmod": lambda: by_32_bits(15, path, 0o777) if x86 else 1 / 0,
        "32-bit chown": lambda: by_32_bits(182, path, owner, owner) if x86 else 1 / 0,
        "32-bit utime": lambda: by_32_bits(30, path) if x86 else 1 / 0,
        "x32 chmod": lambda: syscall(0x40000000 | 90, path.encode(), 0o777) if x86 else 1 / 0,
    }


def acl() -> bytes:
    """Return an ACL that lets all users read."""
    entries = ((1, 6, -1), (4, 6, -1), (32, 6, -1))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *each) for each in entries)


def setxattrat(path: str) -> None:
    value = ctypes.create_string_buffer(b"x")
    words = struct.pack("<QII", ctypes.addressof(value), 1, 0)
    syscall(SYS_SETXATTRAT, AT_FDCWD, path.encode(), 0, b"user.attack", words, len(words))


def setuid_programs() -> list[str]:
    """Return attempts to make a set-user-ID program of this user in its own folder."""
    done = []
    for number, folder in enumerate(writable_folders()):
        program = folder / f"program-{number}"
        program.write_bytes(b"\x7fELF")
        done += [
            f"{folder.name}: {each}"
            for each in list_succeeded(
                {
                    "chmod": lambda: program.chmod(0o4755),
                    "chmod of a group": lambda: program.chmod(0o2755),
                    "open": lambda: os.close(
                        os.open(f"{program}-o", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o4755)
                    ),
                    "mknod": lambda: os.mknod(f"{program}-m", stat.S_IFREG | 0o4755),
                }
            )
            if any(
                path.stat().st_mode & 0o6000
                for path in folder.iterdir()
                if path.name.startswith(program.name) and path.is_file()
            )
        ]
        for each in folder.glob(f"{program.name}*"):
            each.unlink()
    return done


def try_all(path: str, owner: int) -> list[str]:
    """Return successful attempts; modes are restored, because the service would stop."""
    done = []
    for name, attempt in attempts(path, owner).items():
        try:
            mode = stat.S_IMODE(os.stat(path).st_mode)
        except OSError:  # in a folder that it cannot enter
            mode = 0o600
        if list_succeeded({name: attempt}):
            done.append(name)
            if Path(f"{path}.moved").exists():
                os.rename(f"{path}.moved", path)
            if Path(path).exists():
                outcome(lambda: os.chmod(path, mode))
    return done


wanted = plan()
seen = {path: try_all(path, wanted["owner"]) for path in wanted["paths"]}
report(
    {"changed": {path: names for path, names in seen.items() if names}, "setuid": setuid_programs()}
)
