"""Encloses a run's process before it begins: a user of its own, a private /tmp, limits, its wall.

    python -I -m worker.sandbox.isolation PROGRAM WORD...

It goes on as that program, under the same number, with nothing left of root's privileges.
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
from halfstep.sandbox import Wall

VARIABLE = "HALFSTEP_ISOLATION"
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 1 << 18  # linux/mount.h


@dataclass(frozen=True)
class Isolation:
    """What a run's process is enclosed in.

    user: that it becomes; None: it stays who it is.  temporary: a folder that it sees at each of
    these `places`.  processes: as many as its user may have, threads included; 0: any number.
    group: the cgroup's folder that it joins, or "".
    """

    user: int | None = None
    temporary: str = ""
    places: tuple[str, ...] = ()
    processes: int = 0
    group: str = ""

    def variable(self) -> dict[str, str]:
        """Return the variable that tells it to the process."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def taken(cls) -> Self:
        """Take it from the environment."""
        return cls(**json.loads(os.environ.pop(VARIABLE)))

    def build(self) -> None:
        """Enclose this process. Raises OSError."""
        if self.group:
            Path(self.group, "cgroup.procs").write_text(str(os.getpid()))
        if self.user is None:
            return
        wall = Wall.taken(os.environ)
        rules = wall.rules() if wall else None  # of places that root alone can open
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
    """Enclose ourselves, and go on as the program that the command line names."""
    Isolation.taken().build()
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606 - what follows is what the supervisor wrote


if __name__ == "__main__":
    main()
