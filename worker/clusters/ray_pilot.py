"""What runs in Ray's own processes on a node: an actor that starts a worker and answers for it.

When Ray's head dies, everything that Ray started and its children go with it, a minute later. So
the worker is no child of the actor's. It inherits what Ray gave that, its GPUs above all, but not
its single thread.
"""

import os
import subprocess
import threading
import time
from pathlib import Path

import ray

from worker.detached_process import Detached

LOOK_SECONDS = 0.5
LOG_BYTES = 64 * 1024


class Pilot:
    """One node's worker; the actor ends with it."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        own = _environment(environment) | {"HALFSTEP_WORKER_NAME": name}
        log = Path(own["HALFSTEP_DATA"]) / "placements" / f"{name}.log"
        self._worker = Detached(command, own, log)
        self._actor = ray.get_runtime_context().current_actor
        threading.Thread(target=self._end_with_it, daemon=True).start()

    def look(self) -> str:
        """Return where this is."""
        return str(ray.util.get_node_ip_address())

    def stop(self) -> None:
        """Have the worker leave a checkpoint and end."""
        self._worker.stop()

    def log(self) -> str:
        """Return the end of what the worker has printed."""
        return self._worker.printed(LOG_BYTES)

    def _end_with_it(self) -> None:
        while self._worker.is_alive:
            time.sleep(LOOK_SECONDS)
        ray.kill(self._actor)


def printed(command: list[str], environment: dict[str, str]) -> list[str]:
    """Return the lines that a command prints here, or the last one of its complaint."""
    done = subprocess.run(
        command, env=_environment(environment), capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines() or done.stderr.splitlines()[-1:]


def _environment(told: dict[str, str]) -> dict[str, str]:
    """Return a worker's environment here: the node's own, and what it lacks of the placer's."""
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**told, **own}
