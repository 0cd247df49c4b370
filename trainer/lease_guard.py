"""Ends the training when its lease expires, in case the supervisor is stopped or stuck.

After each renewal of the lease the supervisor writes two times by the machine's clock to
lease-<attempt>.json: when to request a checkpoint and an end, and when to kill the process.
"""

import os
import signal
import threading
import time

from halfstep.clock import clock
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.attempt_messages import Lease, read_message

POLL_SECONDS = 0.2


class Guard(threading.Thread):
    """Thread that kills this process when its lease expires; inactive without a lease file."""

    def __init__(self, files: AttemptFiles) -> None:
        super().__init__(daemon=True)
        self._path = files.lease
        self._asks = False

    def asks(self) -> bool:
        """Return whether it is time to save a checkpoint and end."""
        return self._asks

    def run(self) -> None:
        """Poll the lease file; the database is not needed."""
        while self._path.exists():
            lease = read_message(self._path, Lease)
            if clock() > lease.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            self._asks = clock() > lease.ask
            time.sleep(POLL_SECONDS)
