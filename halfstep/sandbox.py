"""The sandbox of a run's process, by Landlock: the files and processes that it reaches.

The process applies it before it loads any code of a recipe or a script. It takes no privilege, and
all child processes inherit it. Everything is denied but what a rule allows:

- Writing: the run's own folders, folders that the operator has named, and a few devices. Nothing
  that another process executes or reads as configuration can be written.
- Reading: everything but private paths and devices. A rule covers all that is below a folder, so
  the folders that lead to a private path have a rule for each entry that they hold at the time.

Processes outside the sandbox can be neither read, traced nor, from Linux 6.12, signalled.
"""

import ctypes
import json
import os
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

VARIABLE = "HALFSTEP_WALL"  # of a run's process; it is taken from there when the wall is built
#: Prefix of variables that a user has set, until the sandbox stands: LD_PRELOAD, for one, would
#: load code of the user's into the process that has yet to apply it.
DEFERRED = "HALFSTEP_DEFERRED_"
#: The first with all that a wall needs, Linux 6.2, and the first that holds signals off, 6.12.
NEEDED_VERSION, WITH_SIGNALS = 3, 6

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
ASK_VERSION, PATH_BENEATH = 1, 1  # linux/landlock.h, as all that follows
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
MAKE_SYM, REFER, TRUNCATE = 1 << 12, 1 << 13, 1 << 14
#: Of a folder its names may be listed: Python looks for modules in those that lead to private ones.
ALL = (1 << 15) - 1 & ~READ_DIR
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
READ = EXECUTE | READ_FILE
DEVICE = READ_FILE | WRITE_FILE
#: Nothing there leads a reader elsewhere: neither links nor files moved in from other folders.
WITHOUT_LINKS = ALL & ~(MAKE_SYM | REFER)
DEV, SHARED_MEMORY = Path("/dev"), Path("/dev/shm")  # noqa: S108 - not a temporary file
#: Devices that runs may open: terminals, random numbers and accelerators. Never disks or memory.
DEVICES = (
    *("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts"),
    *("nvidia*", "dri", "kfd", "infiniband", "dxg", "accel"),
)
SCOPES = 1 | 2  # abstract sockets, signals
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38  # linux/prctl.h
CAPABILITIES, CAPABILITY_VERSION = range(64), 0x20080522  # linux/capability.h
#: Of what root may: to own and open others' files, where the wall lets it.
KEPT = sum(1 << each for each in (0, 1, 3))  # CHOWN, DAC_OVERRIDE, FOWNER


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
class Wall:
    """What a run's process may open.

    private: paths that it may neither read nor write, but for those that the other fields name.
    own: its folder, where it may make no symbolic links, which readers of the folder would follow.
    free: folders where it may.  shared: folders that all runs write, without links.  read: private
    paths that it may read.
    """

    private: list[str]
    own: str
    free: list[str]
    shared: list[str]
    read: list[str]

    def variable(self) -> dict[str, str]:
        """Return the variable that tells it to the process."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def taken(cls, environment: MutableMapping[str, str]) -> Self | None:
        """Take it from the environment, where one was told."""
        told = environment.pop(VARIABLE, "")
        return cls(**json.loads(told)) if told else None

    def build(self) -> None:
        """Enclose this thread and all that it starts from now on, for good. Raises OSError."""
        rules = self.rules()
        give_up_privileges()
        enforce(rules)

    def rules(self) -> int:
        """Return what it is made of, for `enforce`, a file that is open. Raises OSError."""
        attributes = _Ruleset(ALL, 0, SCOPES if version() >= WITH_SIGNALS else 0)
        size = ctypes.sizeof(attributes)
        ruleset = _called(CREATE_RULESET, ctypes.byref(attributes), size, 0)
        try:
            for place in _around([DEV, *map(Path, self.private)]):
                _allow(ruleset, place, READ)
            for device in (found for name in DEVICES for found in DEV.glob(name)):
                _allow(ruleset, device, DEVICE)
            for folder in (str(SHARED_MEMORY.resolve()), *self.free):
                _allow(ruleset, Path(folder), ALL)
            for folder in (self.own, *self.shared):
                _allow(ruleset, Path(folder), WITHOUT_LINKS)
            for file in self.read:
                _allow(ruleset, Path(file), READ)
        except OSError:
            os.close(ruleset)
            raise
        return ruleset


def deferred(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables under names that have no effect before `apply_deferred`."""
    return {f"{DEFERRED}{name}": value for name, value in variables.items()}


def apply_deferred(environment: MutableMapping[str, str]) -> None:
    """Set the variables of `deferred` under their own names; the sandbox stands by now."""
    for name in [name for name in environment if name.startswith(DEFERRED)]:
        environment[name.removeprefix(DEFERRED)] = environment.pop(name)


def enforce(rules: int) -> None:
    """Enclose this thread and all that it starts from now on by `Wall.rules`. Raises OSError."""
    try:
        _called(RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def can_stand() -> bool:
    """Tell whether this kernel has what a wall is made of."""
    return version() >= NEEDED_VERSION


def version() -> int:
    """Return the kernel's version of Landlock, 0 where there is none."""
    try:
        return _called(CREATE_RULESET, None, 0, ASK_VERSION)
    except OSError:
        return 0


def give_up_privileges() -> None:
    """Keep of root's powers those over files alone; by others it could see through the wall."""
    libc = _libc()
    for each in CAPABILITIES:
        if not KEPT >> each & 1:
            libc.prctl(PR_CAPBSET_DROP, each, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    held = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice 32 of them
    if libc.capget(header, held) == 0:
        kept = (ctypes.c_uint32 * 6)(*(each & KEPT for each in held[:3]), 0, 0, 0)
        libc.capset(header, kept)


def _around(private: Iterable[Path]) -> Iterable[Path]:
    """Yield every place but the private ones and the folders that lead there."""
    closed = {each.resolve() for each in private}
    leading = {folder for each in closed for folder in each.parents}
    for folder in leading - closed:
        if not any(each in closed for each in folder.parents):
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                yield from (each for each in folder.iterdir() if each not in closed | leading)


def _allow(ruleset: int, place: Path, rights: int) -> None:
    """Allow a place, if it is there: a link is nothing by itself."""
    if place.is_symlink():
        return
    try:
        opened = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # gone since, or nobody's to open
        return
    try:
        rule = _Beneath(rights if place.is_dir() else rights & OF_FILES, opened)
        _called(ADD_RULE, ruleset, PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(opened)


def _called(*arguments: object) -> int:
    libc = _libc()
    result = int(libc.syscall(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Go on in the sandbox as the program that the command line names."""
    wall = Wall.taken(os.environ)
    if wall is None:
        sys.exit(f"{VARIABLE} is not set; allowed: what Wall.variable returns")
    wall.build()
    apply_deferred(os.environ)
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - what follows is what the worker wrote


if __name__ == "__main__":
    main()
