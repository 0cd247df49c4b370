"""The engine: how a worker starts supervisors and finds them again. The only one is the subprocess.

A cluster's engine would offer the same five calls. A supervisor is named after its run and attempt;
it outlives the worker that launched it, and is never launched twice.
"""

import json
import os
import signal
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfstep.process import started


class AlreadyLaunched(RuntimeError):
    """This attempt has a supervisor, or had one: it is never started a second time."""


@dataclass(frozen=True)
class Handle:
    """A launched supervisor. The others tell it from a later process with the same pid.

    started_ticks: of the machine's clock since its boot, which nobody can set.
    """

    pid: int
    started_ticks: int
    boot_id: str

    def as_dict(self) -> dict[str, Any]:
        """Return what the database keeps."""
        return asdict(self)


class SubprocessEngine:
    """Launch supervisors as processes of this machine, each in a session of its own."""

    def __init__(self) -> None:
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def launch(self, folder: Path, attempt: int, argv: list[str], env: dict[str, str]) -> Handle:
        """Start the supervisor of an attempt. Raises AlreadyLaunched."""
        folder.mkdir(parents=True, exist_ok=True)
        claim = folder / f"supervisor-{attempt}.json"
        log = folder / f"supervisor-{attempt}.log"
        try:
            claim.touch(exist_ok=False)
        except FileExistsError as error:
            raise AlreadyLaunched(f"{claim} exists: attempt {attempt} was launched") from error
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a Ctrl-C is the worker's to pass on
            )
        self._children[process.pid] = process
        handle = Handle(process.pid, started(process.pid) or 0, _boot_id())
        claim.write_text(json.dumps(handle.as_dict()))
        return handle

    def adopt(self, folder: Path, attempt: int) -> Handle:
        """Find a supervisor that an earlier worker launched, dead or alive."""
        try:
            handle = Handle(**json.loads((folder / f"supervisor-{attempt}.json").read_text()))
            if isinstance(handle.pid, int) and isinstance(handle.started_ticks, int):
                return handle
        except (OSError, ValueError, TypeError):
            pass  # it never came to a launch, or the run's recipe wrote over it
        return Handle(pid=0, started_ticks=0, boot_id="")

    def is_alive(self, handle: Handle) -> bool:
        """Tell whether the supervisor still runs."""
        if child := self._children.get(handle.pid):
            return child.poll() is None
        return handle.boot_id == _boot_id() and handle.started_ticks == started(handle.pid)

    def signal(self, handle: Handle, number: signal.Signals) -> None:
        """Send a signal to the supervisor, if it is still there."""
        if self.is_alive(handle):
            os.kill(handle.pid, number)

    def release(self, handle: Handle) -> None:
        """Forget a supervisor that has ended."""
        self._children.pop(handle.pid, None)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
