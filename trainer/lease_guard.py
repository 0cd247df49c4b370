"""The training's own watch on its lease, for when its supervisor is stopped, stuck or gone astray.

The supervisor writes two moments of the machine's clock into lease-<attempt>.json each time that it
has renewed the lease: when to ask for a checkpoint and an end, and when to be dead.
"""

import json
import os
import signal
import threading
import time

from halfstep.clock import clock
from halfstep.telemetry.attempt_files import AttemptFiles

LOOK_SECONDS = 0.2


class Guard(threading.Thread):
    """Kills this process when its lease is as good as lost; does nothing without a lease file."""

    def __init__(self, files: AttemptFiles) -> None:
        super().__init__(daemon=True)
        self._path = files.lease
        self._asks = False

    def asks(self) -> bool:
        """Return whether it is time to save a checkpoint and end."""
        return self._asks

    def run(self) -> None:
        """Look again and again, without a glance at the database."""
        while self._path.exists():
            lease = json.loads(self._path.read_text())
            if clock() > lease["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            self._asks = clock() > lease["ask"]
            time.sleep(LOOK_SECONDS)
