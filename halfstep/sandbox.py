"""Landlock sandbox of a run's process: restricts its access to files and processes.

No privilege is needed, and all child processes inherit it. Everything is denied except what a rule
allows:

- Writing: the run's own folder, folders that the operator has configured, and a few devices.
  Nothing can be written that another process executes or reads as configuration.
- Reading: everything except private paths and devices. A rule covers everything below a folder, so
  folders above a private path get a rule for each entry that they have at the time.

Processes outside the sandbox cannot be read or traced, nor, since Linux 6.12, signalled. It is a
second barrier behind `halfstep.namespaces`, and the only one where the system permits none of them.
"""

import ctypes
import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from halfstep import namespaces
from halfstep.namespaces import DEV, KERNEL, PROC, SHARED_MEMORY, View

#: Prefix of variables that a user has set, until the sandbox is active: LD_PRELOAD, for example,
#: would load the user's code into the process that has yet to apply it.
DEFERRED = "HALFSTEP_DEFERRED_"
#: Landlock versions: the first with all required features, Linux 6.2, and the first with signals,
#: 6.12.
NEEDED_VERSION, WITH_SIGNALS = 3, 6

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
ASK_VERSION, PATH_BENEATH = 1, 1  # linux/landlock.h, like all below
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
MAKE_SYM, REFER, TRUNCATE = 1 << 12, 1 << 13, 1 << 14
#: Folders may be listed: Python searches for modules in those above private paths.
ALL = (1 << 15) - 1 & ~READ_DIR
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
READ = EXECUTE | READ_FILE
DEVICE = READ_FILE | WRITE_FILE
#: Excludes links and files moved from other folders, which would lead a reader elsewhere.
WITHOUT_LINKS = ALL & ~(MAKE_SYM | REFER)
#: Devices that runs may open without namespaces: no terminal, which may be another user's.
DEVICES = tuple(name for name in namespaces.DEVICES if name != "tty")
SCOPES = 1 | 2  # abstract sockets, signals
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38  # linux/prctl.h
CAPABILITIES, CAPABILITY_VERSION = range(64), 0x20080522  # linux/capability.h
#: Capability that root keeps: to open files of others, within the sandbox.
RETAINED = 1 << 1  # DAC_OVERRIDE


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scopes", ctypes.c_uint64),
    )


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


@dataclass(frozen=True)
class Sandbox:
    """File access of a run's process."""

    private: list[str]  # paths that it may neither read nor write, except those in the other fields
    free: list[str]  # folders that it may write, first its own
    shared: list[str]  # folders that all runs write, without links
    read: list[str]  # private paths that it may read
    services: list[str]  # folders with sockets of services that would start programs for it
    needed: list[str]  # what it may read in them
    names_threads: bool = False  # whether it may name its threads, as CUDA does

    def view(self, temporary: str, places: Sequence[str]) -> View:
        """Return the same access as what a process in namespaces sees."""
        writable = [*self.free, *self.shared]
        readable = [*self.read, *self.needed]
        return View([*self.private, *self.services], readable, writable, temporary, places)

    def rules(self, places: Sequence[str], user: int | None, *, in_namespaces: bool) -> int:
        """Return the rules for `enforce`, as an open file descriptor. Raises OSError.

        places: further folders that it may write.  user: the id of the user that the process will
        have; None: its own.
        """
        attributes = _Ruleset(ALL, 0, SCOPES if version() >= WITH_SIGNALS else 0)
        size = ctypes.sizeof(attributes)
        ruleset = _syscall(CREATE_RULESET, ctypes.byref(attributes), size, 0)
        try:
            for place in _paths_except([DEV, *map(Path, self.private)]):
                _allow(ruleset, place, READ)
            if in_namespaces:
                _allow(ruleset, DEV, DEVICE)
                _allow(ruleset, PROC, WRITE_FILE | TRUNCATE)
            else:
                for device in (path for name in DEVICES for path in DEV.glob(name)):
                    _allow(ruleset, device, DEVICE)
                if self.names_threads:
                    _allow(ruleset, _folder_of_threads(user), WRITE_FILE | TRUNCATE)
            for folder in (str(SHARED_MEMORY.resolve()), *self.free, *places):
                _allow(ruleset, Path(folder), ALL)
            for folder in self.shared:
                _allow(ruleset, Path(folder), WITHOUT_LINKS)
            for file in self.read:
                _allow(ruleset, Path(file), READ)
        except OSError:
            os.close(ruleset)
            raise
        return ruleset


def defer(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables under names that have no effect before `apply_deferred`."""
    return {f"{DEFERRED}{name}": value for name, value in variables.items()}


def apply_deferred(environment: MutableMapping[str, str]) -> None:
    """Set the variables of `defer` under their own names, once the sandbox is active."""
    for name in [name for name in environment if name.startswith(DEFERRED)]:
        environment[name.removeprefix(DEFERRED)] = environment.pop(name)


def enforce(rules: int) -> None:
    """Apply `Sandbox.rules` to this thread and everything that it starts. Raises OSError."""
    try:
        _syscall(RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def is_supported() -> bool:
    """Return whether this kernel has the required Landlock version."""
    return version() >= NEEDED_VERSION


def version() -> int:
    """Return the kernel's Landlock version, 0 without Landlock."""
    try:
        return _syscall(CREATE_RULESET, None, 0, ASK_VERSION)
    except OSError:
        return 0


def give_up_privileges() -> None:
    """Drop root's capabilities except those for files: others could bypass the sandbox."""
    libc = _libc()
    for capability in CAPABILITIES:
        if not RETAINED >> capability & 1:
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    held = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice 32 of them
    if libc.capget(header, held) == 0:
        reduced = (ctypes.c_uint32 * 6)(*(bits & RETAINED for bits in held[:3]), 0, 0, 0)
        libc.capset(header, reduced)


def _paths_except(private: Iterable[Path]) -> Iterable[Path]:
    """Yield all paths except private ones and the folders above them."""
    closed = {path.resolve() for path in private}
    leading = {folder for path in closed for folder in path.parents}
    for folder in leading - closed:
        if not any(parent in closed for parent in folder.parents):
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                yield from (path for path in folder.iterdir() if path not in closed | leading)


def _folder_of_threads(user: int | None) -> Path:
    """Return the folder below which threads can be named: /proc/PID/task/ID/comm.

    Landlock knows no patterns. With /proc, the programs that a process starts can use a GPU as
    well; what belongs to processes outside of the sandbox stays closed, but for some settings of
    processes of the same user, such as oom_score_adj. Root could change the kernel there: it gets
    the threads of the process alone, unless those files are read-only, as in a container.
    """
    is_root = (os.geteuid() if user is None else user) == 0
    is_open = is_root and any(os.access(PROC / name, os.W_OK) for name in KERNEL)
    return PROC / "self/task" if is_open else PROC


def _allow(ruleset: int, place: Path, rights: int) -> None:
    """Add a rule for a path if it exists; symbolic links are ignored."""
    if place.is_symlink():
        return
    try:
        opened = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # deleted since, or not accessible
        return
    try:
        rule = _Beneath(rights if place.is_dir() else rights & OF_FILES, opened)
        _syscall(ADD_RULE, ruleset, PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(opened)


def _syscall(*arguments: object) -> int:
    libc = _libc()
    result = int(libc.syscall(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
