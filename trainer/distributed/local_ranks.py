"""Starts the ranks of one node, one process per device, which end with this process.

Imports nothing heavy: only the ranks need torch.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from halfstep.telemetry.attempt_files import AttemptFiles

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class NodeRank:
    """Position of a node in its attempt: node 0 has the first ranks."""

    devices: int = 1  # per node
    nodes: int = 1
    node: int = 0

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.nodes * self.devices


def start_ranks(files: AttemptFiles, place: NodeRank) -> int:
    """Start one rank per device and wait; return a nonzero exit code if any rank has one.

    When one rank fails, all are killed, because the others would wait for it forever. There are no
    restarts here: the lease handles them.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "WORLD_SIZE": str(place.world_size)}
    argv = [sys.executable, "-m", "trainer.process", str(files.folder), str(files.attempt)]
    if files.control_folder:
        argv += ["--control-folder", str(files.control_folder)]
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
        time.sleep(POLL_SECONDS)
    for rank in ranks:
        rank.kill()
        rank.wait()
    if any(code < 0 for code in failed):
        # When one rank is killed, the others raise, and report that as the outcome. The cause is
        # the signal, so this process kills itself with one too, which the supervisor sees.
        os.kill(os.getpid(), signal.SIGKILL)
    return next(iter(failed), 0)


class _Stops:
    """Forwards SIGTERM and SIGINT, also to ranks that are started after the signal."""

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
