"""The warm process of a worker, which forks its training processes: trainer.warm_process."""

import logging
import math
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from db.settings import Settings
from halfstep.fork_server import (
    REPLY_SECONDS,
    Forked,
    ForkFailed,
    ForkServer,
    Request,
    current_umask,
)
from worker import gpus
from worker.sandbox import run_environment
from worker.sandbox.sandbox import CACHES

logger = logging.getLogger(__name__)

MEMORY_SECONDS = 60.0  # between two measurements of its memory

#: Variables of a run that nothing reads before the fork; of all others the warm process has the
#: values that the run gets. tests/trainer/test_warm_process.py checks what its imports read.
READ_LATE = {"TMPDIR", "HOME", "USER", "LOGNAME", "CUDA_VISIBLE_DEVICES", *CACHES}


def environment(settings: Settings) -> dict[str, str]:
    """Return the environment of a training process, without the variables of its run."""
    own = {**gpus.environment(), "OMP_NUM_THREADS": "1"}
    return run_environment.of_recipes(settings) | own


def differs_early(settings: Settings, of_run: dict[str, str]) -> set[str]:
    """Return the variables of a run that the warm process has read with another value."""
    ours = environment(settings)
    names = {name for name in {*ours, *of_run} if ours.get(name) != of_run.get(name)}
    return {name for name in names - READ_LATE if not name.startswith("HALFSTEP_")}


class WarmProcess:
    """Starts the warm process, and again if it ends, unless it cannot be forked at all."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._memory_bytes: int | None = None
        self._start()

    def _start(self) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when it ends
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainer.warm_process"],
                env=environment(self._settings),
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
            )
        self._server = ForkServer(ours)
        self._has_forked = self._has_been_ready = False
        self._measured_at = -math.inf

    def connect(self) -> socket.socket | None:
        """Return the socket of a new client, or None if the process is not about to fork for it."""
        self._has_been_ready |= self._server.is_ready
        if self._server.is_ready or self._has_forked:
            try:
                return self._server.connect()
            except ForkFailed as error:
                self._has_forked = False
                logger.warning("a training starts without the warm process: %s", error)
        return None

    def fork(self, program: str, files: Sequence[int], patience: float = 0.0) -> Forked | None:
        """Have a program of the trainer forked, or return None if that is not possible.

        files: its output and errors.
        patience: seconds to wait for a process that is loading.
        """
        request = Request([program], environment(self._settings), str(Path.cwd()), current_umask())
        try:
            client = self._server.connect() if patience else self.connect()
            if client is None:
                return None
            forked = Forked(client, request, files, patience or REPLY_SECONDS)
            forked.begin()
        except ForkFailed as error:
            logger.warning("%s starts without the warm process: %s", program, error)
            return None
        self._has_forked = True
        return forked

    def memory_bytes(self) -> int | None:
        """Return its proportional set size, measured once a minute; None unless it is ready.

        A page that n processes share counts as an nth. Takes about 10 ms.
        """
        if not self._server.is_ready or self._process.returncode is not None:
            return None
        if time.monotonic() >= self._measured_at + MEMORY_SECONDS:
            try:
                info = psutil.Process(self._process.pid).memory_full_info()
            except psutil.Error:
                info = None
            self._memory_bytes = getattr(info, "pss", None)  # not every kernel reports it
            self._measured_at = time.monotonic()
        return self._memory_bytes

    def check(self) -> None:
        """Start the process again if it has ended; if it never was ready, only log that."""
        if self._process.returncode is not None or self._process.poll() is None:
            return
        self._has_been_ready |= self._server.is_ready
        self._errors.seek(0)
        errors = self._errors.read(4000).decode(errors="replace").strip()
        logger.warning("the warm process ended with %s: %s", self._process.returncode, errors)
        if self._has_been_ready:
            self.release()
            self._start()

    def close(self) -> None:
        """End the process; all trainings of this worker have ended."""
        self._process.kill()
        self._process.wait()
        self.release()

    def release(self) -> None:
        """Close the files of this process, or of its fork."""
        self._server.close()
        self._errors.close()
