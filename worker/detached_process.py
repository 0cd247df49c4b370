"""A process that is nobody's child, so that whatever ends with its starter does not end it.

A shell starts it in a session of its own and ends. It keeps neither the wish that it be killed
first when memory runs out, which Ray gives all that it starts, nor a standard input.
"""

import os
import signal
import subprocess
from pathlib import Path

from halfstep.process import lives, started

LAUNCH = """
echo 0 2>/dev/null >/proc/self/oom_score_adj
log=$1; shift
"$@" </dev/null >>"$log" 2>&1 & echo $!
"""


class Detached:
    """One such process, by whoever started it. log: what it prints is added to."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        told = subprocess.run(
            ["sh", "-c", LAUNCH, "sh", str(log), *command],
            env=environment,
            stdout=subprocess.PIPE,
            start_new_session=True,
            check=True,
        )
        self._log = log
        self._pid = int(told.stdout)
        self._started = started(self._pid)

    @property
    def is_alive(self) -> bool:
        """Tell whether it goes on."""
        return lives(self._pid, self._started)

    def stop(self) -> None:
        """Ask it to end, if it is still there."""
        if self.is_alive:
            os.kill(self._pid, signal.SIGTERM)

    def printed(self, most_bytes: int) -> str:
        """Return the end of what it has printed."""
        return self._log.read_bytes()[-most_bytes:].decode(errors="replace")
