"""Isolates a run's process: namespaces, own user, limits, sandbox.

    python -I -m halfstep.isolation PROGRAM WORD...

The process of a run calls `Isolation.apply` before it loads any code of a recipe or a script; other
programs are started as above. Nothing can undo it.
"""

import os
import resource
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from halfstep import namespaces, sandbox
from halfstep.process import end_with_parent, open_to_others
from halfstep.sandbox import Sandbox, apply_deferred

VARIABLE = "HALFSTEP_ISOLATION"
#: Process id of the supervisor, with which its processes end.
PARENT = "HALFSTEP_PARENT_PID"


@dataclass(frozen=True)
class Isolation:
    """Isolation of a run's process."""

    sandbox: Sandbox | None = None  # None: it may access what its user may
    in_namespaces: bool = False  # with a sandbox; where the system permits it
    temporary: str = ""  # its temporary folder
    places: tuple[str, ...] = ()  # folders that it sees replaced by the temporary one
    user: int | None = None  # user id to switch to; None: no change
    processes: int = 0  # limit of its user, including threads; 0: none
    group: str = ""  # folder of the cgroup to join, or ""

    def variable(self) -> dict[str, str]:
        """Return the environment variable that describes the isolation."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> Self:
        """Remove the description from the environment and return it."""
        text = environment.pop(VARIABLE, "{}")
        return msgspec.json.decode(text, type=cls)

    def apply(self) -> None:
        """Isolate this process, which must have one thread. Raises OSError.

        In namespaces it continues as another process, whose parent ends with it and like it.
        """
        if self.group:
            Path(self.group, "cgroup.procs").write_text(str(os.getpid()))
        if self.sandbox and self.in_namespaces:
            self._enter_namespaces(self.sandbox)
        # Opened before switching: only root can open the paths.
        rules = self._rules()
        if self.processes:
            resource.setrlimit(resource.RLIMIT_NPROC, (self.processes, self.processes))
        if self.user is not None:
            os.setgroups([])
            os.setresgid(self.user, self.user, self.user)
            os.setresuid(self.user, self.user, self.user)
        if rules is not None:
            sandbox.give_up_privileges()
            sandbox.enforce(rules)
        open_to_others()  # the process is the run's; a change of the user has closed it

    def _enter_namespaces(self, sandbox: Sandbox) -> None:
        """Continue in namespaces, whose processes end with this process and its parent."""
        parent = os.environ.get(PARENT)
        if parent:
            end_with_parent()
            if int(parent) != os.getppid():
                sys.exit(f"the supervisor, process {parent}, is gone")
        namespaces.enter(sandbox.view(self.temporary, self.places))
        if parent:
            os.environ[PARENT] = str(os.getpid())  # ranks cannot see processes outside

    def _rules(self) -> int | None:
        """Return the rules of the sandbox as an open file descriptor, if there is one."""
        if self.sandbox is None:
            return None
        places = self.places if self.in_namespaces else ()
        return self.sandbox.rules(places, self.user, in_namespaces=self.in_namespaces)


def main() -> None:
    """Isolate this process, and execute the program on the command line."""
    Isolation.from_environment(os.environ).apply()
    apply_deferred(os.environ)
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - the worker wrote the command


if __name__ == "__main__":
    main()
