"""Code in Ray's processes on a node: an actor that starts a worker and monitors it.

A minute after Ray's head dies, all processes that Ray started are killed with their children. So
the worker is not a child of the actor. It inherits the actor's environment, above all its GPUs, but
not the limit to one thread.
"""

import os
import subprocess
import threading
import time
from pathlib import Path

import ray

from worker.detached_process import Detached

POLL_SECONDS = 0.5
LOG_BYTES = 64 * 1024


class Pilot:
    """Actor for one node's worker; it ends with the worker."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        own = _environment(environment) | {"HALFSTEP_WORKER_NAME": name}
        log = Path(own["HALFSTEP_DATA"]) / "placements" / f"{name}.log"
        self._worker = Detached(command, own, log)
        self._actor = ray.get_runtime_context().current_actor
        threading.Thread(target=self._end_with_it, daemon=True).start()

    def poll(self) -> str:
        """Return the node's address."""
        return str(ray.util.get_node_ip_address())

    def stop(self) -> None:
        """Request the worker to save a checkpoint and end."""
        self._worker.stop()

    def log(self) -> str:
        """Return the end of the worker's output."""
        return self._worker.read_output(LOG_BYTES)

    def _end_with_it(self) -> None:
        while self._worker.is_alive:
            time.sleep(POLL_SECONDS)
        ray.kill(self._actor)


def read_output(command: list[str], environment: dict[str, str]) -> list[str]:
    """Run a command here; return its output lines, else the last line of its errors."""
    done = subprocess.run(
        command, env=_environment(environment), capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines() or done.stderr.splitlines()[-1:]


def _environment(placers: dict[str, str]) -> dict[str, str]:
    """Return a worker's environment: the node's own, completed by the placer's."""
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**placers, **own}
