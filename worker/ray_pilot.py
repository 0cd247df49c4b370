"""What runs in Ray's own processes on a node: an actor that starts a worker and answers for it.

When Ray's head dies, everything that Ray started and its children go with it, a minute later. So
the worker is nobody's child: a shell starts it in a session of its own and ends. It inherits what
Ray gave the actor, its GPUs above all, but neither Ray's wish that it be killed first when memory
runs out nor its single thread.
"""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import ray

from halfstep.process import lives, started

LOOK_SECONDS = 0.5
LOG_BYTES = 64 * 1024
LAUNCH = """
echo 0 2>/dev/null >/proc/self/oom_score_adj
log=$1; shift
"$@" </dev/null >>"$log" 2>&1 & echo $!
"""


class Pilot:
    """One node's worker; the actor ends with it."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        own = _environment(environment) | {"HALFSTEP_WORKER_NAME": name}
        self._log = Path(own["HALFSTEP_DATA"]) / "placements" / f"{name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        told = subprocess.run(
            ["sh", "-c", LAUNCH, "sh", str(self._log), *command],
            env=own,
            stdout=subprocess.PIPE,
            start_new_session=True,
            check=True,
        )
        self._pid = int(told.stdout)
        self._started = started(self._pid)
        self._actor = ray.get_runtime_context().current_actor
        threading.Thread(target=self._end_with_it, daemon=True).start()

    def look(self) -> str:
        """Return where this is."""
        return str(ray.util.get_node_ip_address())

    def stop(self) -> None:
        """Have the worker leave a checkpoint and end."""
        if lives(self._pid, self._started):
            os.kill(self._pid, signal.SIGTERM)

    def log(self) -> str:
        """Return the end of what the worker has printed."""
        return self._log.read_bytes()[-LOG_BYTES:].decode(errors="replace")

    def _end_with_it(self) -> None:
        while lives(self._pid, self._started):
            time.sleep(LOOK_SECONDS)
        ray.kill(self._actor)


def printed(command: list[str], environment: dict[str, str]) -> list[str]:
    """Return the lines that a command prints here."""
    done = subprocess.run(
        command, env=_environment(environment), capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines() or done.stderr.splitlines()[-1:]


def _environment(told: dict[str, str]) -> dict[str, str]:
    """Return a worker's environment here: the node's own, and what it lacks of the placer's."""
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**told, **own}
