"""A detached process, unaffected by the end of the process that starts it.

A shell starts it in a session of its own and exits. It has no standard input, and a neutral OOM
score: Ray raises that of all its processes, to be killed first when memory runs out.
"""

import os
import signal
import subprocess
from pathlib import Path

from halfstep.process import lives, read_start_ticks

LAUNCH = """
echo 0 2>/dev/null >/proc/self/oom_score_adj
log=$1; shift
"$@" </dev/null >>"$log" 2>&1 & echo $!
"""


class Detached:
    """A detached process, for its starter. log: its output is appended to this file."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        launched = subprocess.run(
            ["sh", "-c", LAUNCH, "sh", str(log), *command],
            env=environment,
            stdout=subprocess.PIPE,
            start_new_session=True,
            check=True,
        )
        self._log = log
        self._pid = int(launched.stdout)
        self._started = read_start_ticks(self._pid)

    @property
    def is_alive(self) -> bool:
        """Whether the process is alive."""
        return lives(self._pid, self._started)

    def stop(self) -> None:
        """Send SIGTERM, if it is alive."""
        if self.is_alive:
            os.kill(self._pid, signal.SIGTERM)

    def read_output(self, most_bytes: int) -> str:
        """Return the end of its output."""
        return self._log.read_bytes()[-most_bytes:].decode(errors="replace")
