"""The ranks of one node: a process a device, each tied to our life as we are to our supervisor's.

Imports nothing heavy: the ranks load torch, and nobody else need.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from halfstep.telemetry.attempt_files import AttemptFiles

LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class NodeRank:
    """A node's place among those of its attempt: node 0 has the first ranks."""

    devices: int = 1  # of each node
    nodes: int = 1
    node: int = 0

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.nodes * self.devices


def start_ranks(files: AttemptFiles, place: NodeRank) -> int:
    """Start a rank a device and wait; return an exit code that is not 0 if any rank has one.

    One that ends so ends them all: the others could only wait for it. Restarts are the lease's.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "WORLD_SIZE": str(place.world_size)}
    argv = [sys.executable, "-m", "trainer.process", str(files.folder), str(files.attempt)]
    stops = _Stops()
    for local in range(place.devices):
        own = {"RANK": str(place.node * place.devices + local), "LOCAL_RANK": str(local)}
        stops.pass_on_to(subprocess.Popen(argv, env=environment | own))
    ranks = stops.ranks
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [code for code in codes if code]
        if failed or None not in codes:
            break
        time.sleep(LOOK_SECONDS)
    for rank in ranks:
        rank.kill()
        rank.wait()
    if any(code < 0 for code in failed):
        # When one rank is killed the others raise, and say so in the outcome. The cause is the
        # signal, so this process dies of one too, for the supervisor to see.
        os.kill(os.getpid(), signal.SIGKILL)
    return next(iter(failed), 0)


class _Stops:
    """Passes SIGTERM and SIGINT on, also to ranks that are started after they have come."""

    def __init__(self) -> None:
        self.ranks: list[subprocess.Popen[bytes]] = []
        self._has_come = False
        signal.signal(signal.SIGTERM, self._receive)
        signal.signal(signal.SIGINT, self._receive)

    def pass_on_to(self, rank: subprocess.Popen[bytes]) -> None:
        self.ranks.append(rank)
        if self._has_come:
            rank.terminate()

    def _receive(self, _number: int, _frame: object) -> None:
        self._has_come = True
        for rank in self.ranks:
            rank.terminate()
