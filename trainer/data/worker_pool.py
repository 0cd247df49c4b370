"""The pool of data-loader workers: the state and liveness of each.

A worker's state is in memory shared with the training, so it can be reported also for a worker that
was killed or hangs.
"""

import faulthandler
import mmap
import os
import signal
import time
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import numpy as np
import psutil
from torch.utils.data import get_worker_info

from halfstep.process import end_with_parent
from trainer.data.examples import NOTHING, DataError

ENDING = (signal.SIGINT, signal.SIGTERM)
STACK_SECONDS = 5.0  # for workers to write their stacks
LOOP = b"_utils/worker.py"  # DataLoader's worker loop, in which a worker runs for all its life
CUT = b"\n  ...\n"  # faulthandler's truncation mark after 100 frames
HINTS: dict[int, str] = {
    signal.SIGKILL: ": perhaps the machine was out of memory",
    signal.SIGBUS: ": perhaps a memory-mapped file was truncated",
}


class WorkerPool:
    """The workers of one loader. Create it before they are forked from this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        shared = mmap.mmap(-1, 16 * size)
        self._seen = np.frombuffer(shared, np.int64).reshape(size, 2)  # process, example
        self._seen[:] = NOTHING
        self._stacks = [os.memfd_create(f"halfstep-stack-{number}") for number in range(size)]
        self._starter = os.getpid()
        self._processes: list[BaseProcess] = []

    def join(self, number: int) -> None:
        """Set up a worker; called in its process."""
        # Its parent thread is the one that forked it, which lives as long as its loader.
        end_with_parent()
        if os.getppid() != self._starter:  # the parent died before the line above
            os._exit(1)
        # A terminal sends SIGINT to all processes, systemd SIGTERM. The training then saves a
        # checkpoint, for which it needs a batch, and ends its workers itself.
        for ending in ENDING:
            signal.signal(ending, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # blocked by the thread that forked us
        faulthandler.register(signal.SIGUSR1, self._stacks[number], all_threads=False)
        self._seen[number, 0] = os.getpid()

    def began(self, example: int) -> None:
        """Record the example that this worker reads; called in its process."""
        worker = get_worker_info()
        if worker is not None:
            self._seen[worker.id, 1] = example

    def remember(self, processes: list[BaseProcess]) -> None:
        """Set the worker processes, once they are started."""
        self._processes = processes

    def check(self) -> None:
        """Raise DataError if a worker is dead."""
        for process in self._processes:
            if process.exitcode is not None:
                raise DataError(f"{self._named(process)} {_death(process.exitcode)}")

    def wait(self, seconds: float) -> None:
        """Wait until a worker is dead, or for a timeout.

        A killed process closes its files a while before its exit code is available.
        """
        closed = wait([process.sentinel for process in self._processes], seconds)
        for process in self._processes:
            if process.sentinel in closed:
                process.join(seconds)

    def stacks(self) -> str:
        """Return all workers' stacks, after at most STACK_SECONDS."""
        before = [os.fstat(file).st_size for file in self._stacks]
        for process in self._processes:
            if process.exitcode is None and self._number(process) is not None:
                with suppress(ProcessLookupError):  # it has ended since
                    os.kill(process.pid or 0, signal.SIGUSR1)
        until = time.monotonic() + STACK_SECONDS
        while not all(self._has_written(process, before) for process in self._processes):
            if time.monotonic() >= until:
                break
            time.sleep(0.01)
        return "\n".join(self._stack(process, before) for process in self._processes)

    def kill(self) -> None:
        """Kill all workers: they hold nothing that has to be written."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def end(self) -> None:
        """Kill the remaining workers, and release the pool's resources."""
        self.kill()
        for stack in self._stacks:
            os.close(stack)
        self._stacks = []

    def _has_written(self, process: BaseProcess, before: list[int]) -> bool:
        number = self._number(process)
        if process.exitcode is not None or number is None:
            return True
        stack = os.pread(self._stacks[number], 2**16, before[number])
        return LOOP in stack or CUT in stack

    def _stack(self, process: BaseProcess, before: list[int]) -> str:
        number = self._number(process)
        if process.exitcode is not None:
            return f"{self._named(process)} {_death(process.exitcode)}"
        if number is None:
            return f"{self._named(process)} has not begun"
        stack = os.pread(self._stacks[number], 2**16, before[number])
        # Frames below are those of the fork, the same for all workers.
        frames = stack.partition(LOOP)[0].rpartition(b"\n")[0].decode(errors="replace")
        if not frames:  # e.g. it waits for a disk, and handles no signal
            with suppress(psutil.Error):
                state = psutil.Process(process.pid).status()
                frames = f"no response; its process state is {state}"
        return f"{self._named(process)}:\n{frames}"

    def _named(self, process: BaseProcess) -> str:
        number = self._number(process)
        if number is None:
            return f"a data worker (process {process.pid})"
        example = int(self._seen[number, 1])
        place = "" if example == NOTHING else f", at example {example}"
        return f"data worker {number} (process {process.pid}{place})"

    def _number(self, process: BaseProcess) -> int | None:
        matches = np.flatnonzero(self._seen[:, 0] == process.pid)
        return int(matches[0]) if len(matches) else None


def _death(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was killed by {signal.Signals(-exit_code).name}{HINTS.get(-exit_code, '')}"
