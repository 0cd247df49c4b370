"""Mount, process and user namespaces of a run, which hide what it may not reach.

In the run's mount namespace the system is read-only, the data folder and credentials are replaced
by empty ones, and /dev, /dev/shm, /dev/pts, /tmp and /proc are its own. A process that is not root
needs a user namespace for that, in which it keeps its user id.

The calling process stays outside of the process namespace. It waits for the run's process, passes
signals on, and ends like it; every process of the run ends with it.
"""

import ctypes
import os
import signal
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.process import end_as, open_to_others

OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442  # the same on every architecture
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x8000000, 0x10000000  # linux/sched.h
CLONE_NEWPID = 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8  # linux/mount.h, like the following
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 1 << 18
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = 1, 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
DEV, PROC, SHARED_MEMORY = Path("/dev"), Path("/proc"), Path("/dev/shm")  # noqa: S108
#: Devices that a run has: random numbers, its own terminal, and accelerators.
DEVICES = (
    *("null", "zero", "full", "random", "urandom", "tty"),
    *("nvidia*", "dri", "kfd", "infiniband", "dxg", "accel"),
)
LINKS = {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
#: What root could change of the kernel, also in /proc of a process namespace.
KERNEL = ("sys", "sysrq-trigger", "irq", "bus", "fs")
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class View:
    """Files that a run's processes see, except those that everyone may read."""

    hidden: Sequence[str]  # replaced by empty files and folders; those that do not exist are left
    readable: Sequence[str]  # files and folders in hidden ones that stay, read-only
    writable: Sequence[str]  # folders that stay writable
    temporary: str  # folder that becomes /tmp and /var/tmp, or ""
    places: Sequence[str]  # which of the two


def enter(view: View) -> None:
    """Continue in a new process in namespaces of its own. Raises OSError.

    This process must have one thread; it ends as the new one does, in which this returns.
    """
    try:
        _unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC)
    except PermissionError:
        _unshare_as_user()
    folder = Path.cwd()
    _build(view)
    try:
        os.chdir(folder)  # resolved again: the working folder may be hidden now
    except OSError:
        os.chdir("/")
    reaper = _start_reaper()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    pid = os.fork()
    if pid:
        _follow(pid, reaper)
    os.setsid()  # signals to its process group reach no process outside
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    _close_files()
    _mount_processes()


def _close_files() -> None:
    """Close all open files but the standard streams: the run inherits none of the service's."""
    for number in map(int, os.listdir(PROC / "self" / "fd")):  # noqa: PTH208 - numbers
        if number > 2:
            with suppress(OSError):  # that of the list itself
                os.close(number)


def _unshare_as_user() -> None:
    """Create the namespaces in a user namespace, in which this user has the same id."""
    user, group = os.geteuid(), os.getegid()
    open_to_others()  # otherwise the files below belong to root
    _unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC)
    own = PROC / "self"
    (own / "setgroups").write_text("deny")
    (own / "uid_map").write_text(f"{user} {user} 1")
    (own / "gid_map").write_text(f"{group} {group} 1")


def _build(view: View) -> None:
    """Mount what the run sees."""
    before = os.umask(0o022)  # for folders above what a user of the run's own may enter
    _mount("none", "/", flags=MS_REC | MS_PRIVATE)
    kept = [path for path in (*view.readable, *view.writable) if Path(path).exists()]
    trees = [(path, _clone(path)) for path in kept]
    trees += [(place, _clone(view.temporary)) for place in view.places]
    devices = [(path, _clone(str(path))) for name in DEVICES for path in DEV.glob(name)]
    _restrict("/", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV, recursive=True)
    covers = [path for path in map(os.path.realpath, view.hidden) if _cover(path)]
    for path, tree in trees:
        if any(Path(path).is_relative_to(cover) for cover in covers):
            _make_place(Path(path), is_folder=_is_folder(tree))
    for cover in covers:
        _restrict(cover)
    for path, tree in trees:
        _attach(tree, path)
        _restrict(path, 0 if path in (*view.writable, *view.places) else MOUNT_ATTR_RDONLY)
    _build_devices(devices)
    os.umask(before)


def _mount_processes() -> None:
    """Mount a /proc of this namespace's processes, in which the kernel's settings are read-only."""
    _mount("proc", str(PROC), "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name in KERNEL:
        if (PROC / name).exists():
            place = str(PROC / name)
            _mount(place, place, flags=MS_BIND)
            _restrict(place)


def _cover(path: str) -> bool:
    """Replace a file or folder by an empty one; return whether it exists."""
    place = Path(path)
    try:
        is_folder = stat.S_ISDIR(place.lstat().st_mode)
    except OSError:
        return False
    if is_folder:
        _mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    else:
        _mount("/dev/null", path, flags=MS_BIND)
    return True


def _make_place(path: Path, *, is_folder: bool) -> None:
    """Create the file or folder on which a tree is mounted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_folder:
        path.mkdir(exist_ok=True)
    else:
        path.touch()


def _build_devices(devices: Iterable[tuple[Path, int]]) -> None:
    _mount("tmpfs", str(DEV), "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=1m")
    for path, tree in devices:
        _make_place(path, is_folder=_is_folder(tree))
        _attach(tree, str(path))
    for name, target in LINKS.items():
        (DEV / name).symlink_to(PROC / "self" / target)
    SHARED_MEMORY.mkdir()
    _mount("tmpfs", str(SHARED_MEMORY), "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    (DEV / "pts").mkdir()
    options = "newinstance,ptmxmode=0666,mode=620"
    _mount("devpts", str(DEV / "pts"), "devpts", MS_NOSUID | MS_NOEXEC, options)
    (DEV / "ptmx").symlink_to("pts/ptmx")
    _restrict(str(DEV))


def _start_reaper() -> int:
    """Start the first process of the namespace, with which all others end; return its id.

    It ends with this process, which keeps the other end of its pipe. The kernel reaps its orphans.
    """
    source, _end = os.pipe()
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # inherited: orphans leave no zombies
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        actions = [(os.POSIX_SPAWN_DUP2, source, 0), (os.POSIX_SPAWN_DUP2, null, 1)]
        pid = os.posix_spawnp("cat", ["cat"], {"PATH": os.defpath}, file_actions=actions)
        os.close(null)
    finally:
        signal.signal(signal.SIGCHLD, before)
    os.close(source)
    return pid


def _follow(pid: int, reaper: int) -> None:
    """Pass signals on to the run's process, and end as it does."""

    def forward(number: int, _frame: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    while True:
        ended, status = os.wait()
        if ended == pid:
            break
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(reaper, signal.SIGKILL)
        os.waitpid(reaper, 0)  # until every process of the namespace has ended
    end_as(os.waitstatus_to_exitcode(status))


def _clone(path: str) -> int:
    """Return a copy of the mounts at a path, as an open descriptor."""
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC | AT_RECURSIVE
    return _syscall(OPEN_TREE, AT_FDCWD, os.fsencode(path), flags)


def _is_folder(tree: int) -> bool:
    return stat.S_ISDIR(os.fstat(tree).st_mode)


def _attach(tree: int, path: str) -> None:
    """Mount a copy of `_clone` at a path, and close it."""
    words = (b"", AT_FDCWD, os.fsencode(path), MOVE_MOUNT_F_EMPTY_PATH)
    _syscall(MOVE_MOUNT, tree, *words)
    os.close(tree)


def _restrict(path: str, more: int = MOUNT_ATTR_RDONLY, *, recursive: bool = False) -> None:
    """Ignore set-user-ID bits in the mount at a path, and by default make it read-only."""
    attributes = _MountAttributes(MOUNT_ATTR_NOSUID | more, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    words = (flags, ctypes.byref(attributes), ctypes.sizeof(attributes))
    _syscall(MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), *words)


def _mount(source: str, place: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = (source.encode(), os.fsencode(place), kind.encode() or None)
    result = _libc().mount(*words, ctypes.c_ulong(flags), options.encode() or None)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: mount {kind or source}", place)


def _unshare(flags: int) -> None:
    if _libc().unshare(flags) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: unshare")


def _syscall(number: int, *words: object) -> int:
    result = int(_libc().syscall(number, *words))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
