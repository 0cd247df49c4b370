"""Isolates a run's process before it starts: own user, private /tmp, limits, sandbox.

    python -I -m halfstep.isolation PROGRAM WORD...

It replaces itself by the program, with the same PID and without root's privileges.
"""

import ctypes
import json
import os
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from halfstep import sandbox
from halfstep.sandbox import Sandbox

VARIABLE = "HALFSTEP_ISOLATION"
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 1 << 18  # linux/mount.h


@dataclass(frozen=True)
class Isolation:
    """Isolation of a run's process."""

    user: int | None = None  # user id to switch to; None: no change
    temporary: str = ""  # a folder mounted at each of `places`
    places: tuple[str, ...] = ()
    processes: int = 0  # limit of its user, including threads; 0: none
    group: str = ""  # folder of the cgroup to join, or ""

    def variable(self) -> dict[str, str]:
        """Return the environment variable that describes the isolation."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Self:
        """Remove the description from the environment and return it."""
        return cls(**json.loads(os.environ.pop(VARIABLE)))

    def build(self) -> None:
        """Isolate this process. Raises OSError."""
        if self.group:
            Path(self.group, "cgroup.procs").write_text(str(os.getpid()))
        if self.user is None:
            return
        described = Sandbox.from_environment(os.environ)
        # Opened before switching: only root can open the paths.
        rules = described.rules(self.user) if described else None
        self._hide_temporary_files()
        if self.processes:
            resource.setrlimit(resource.RLIMIT_NPROC, (self.processes, self.processes))
        os.setgroups([])
        os.setresgid(self.user, self.user, self.user)
        os.setresuid(self.user, self.user, self.user)
        sandbox.give_up_privileges()
        if rules is not None:
            sandbox.enforce(rules)

    def _hide_temporary_files(self) -> None:
        if self.places:
            _checked(_libc().unshare(CLONE_NEWNS))
            _mount("none", "/", MS_REC | MS_PRIVATE)
            for place in self.places:
                _mount(self.temporary, place, MS_BIND)


def _mount(source: str, place: str, flags: int) -> None:
    words = source.encode(), place.encode()
    _checked(_libc().mount(*words, None, ctypes.c_ulong(flags), None))


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Isolate this process, and execute the program on the command line."""
    Isolation.from_environment().build()
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606 - the supervisor wrote the command


if __name__ == "__main__":
    main()
