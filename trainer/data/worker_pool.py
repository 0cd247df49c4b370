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
STACK_SECONDS = 5.0  # they have for the telling of their stacks
LOOP = b"_utils/worker.py"  # DataLoader's, in which a worker stands for all its life
CUT = b"\n  ...\n"  # faulthandler's, below its first 100 frames
HINTS: dict[int, str] = {
    signal.SIGKILL: ": the machine was short of memory, perhaps",
    signal.SIGBUS: ": a file that it had mapped was cut short, perhaps",
}


class WorkerPool:
    """The workers of one loader. Make it before they are forked from this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        shared = mmap.mmap(-1, 16 * size)
        self._seen = np.frombuffer(shared, np.int64).reshape(size, 2)  # process, example
        self._seen[:] = NOTHING
        self._stacks = [os.memfd_create(f"halfstep-stack-{number}") for number in range(size)]
        self._starter = os.getpid()
        self._processes: list[BaseProcess] = []

    def join(self, number: int) -> None:
        """Become a worker; in its process."""
        # By its thread that forked us, which lives as long as its loader.
        end_with_parent()
        if os.getppid() != self._starter:  # it had died before the line above
            os._exit(1)
        # A terminal sends the one to all processes, systemd the other. The training leaves a
        # checkpoint then, for which it needs a batch, and says itself when it wants no more.
        for ending in ENDING:
            signal.signal(ending, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # which whoever forked us had blocked
        faulthandler.register(signal.SIGUSR1, self._stacks[number], all_threads=False)
        self._seen[number, 0] = os.getpid()

    def began(self, example: int) -> None:
        """Note what this worker reads; in its process."""
        worker = get_worker_info()
        if worker is not None:
            self._seen[worker.id, 1] = example

    def remember(self, processes: list[BaseProcess]) -> None:
        """Remember the processes, now that they are there."""
        self._processes = processes

    def check(self) -> None:
        """Raise DataError if a worker is dead."""
        for process in self._processes:
            if process.exitcode is not None:
                raise DataError(f"{self._named(process)} {_death(process.exitcode)}")

    def wait(self, seconds: float) -> None:
        """Wait until a worker is dead, or for so long.

        One that is being killed has closed its files a while before its exit code is to be had.
        """
        closed = wait([process.sentinel for process in self._processes], seconds)
        for process in self._processes:
            if process.sentinel in closed:
                process.join(seconds)

    def stacks(self) -> str:
        """Have all workers tell where they stand; return it, after STACK_SECONDS at most."""
        before = [os.fstat(file).st_size for file in self._stacks]
        for process in self._processes:
            if process.exitcode is None and self._number(process) is not None:
                with suppress(ProcessLookupError):  # it has ended since
                    os.kill(process.pid or 0, signal.SIGUSR1)
        until = time.monotonic() + STACK_SECONDS
        while not all(self._has_told(each, before) for each in self._processes):
            if time.monotonic() >= until:
                break
            time.sleep(0.01)
        return "\n".join(self._stack(each, before) for each in self._processes)

    def kill(self) -> None:
        """Kill all, whatever they do: they hold nothing that has to be written."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def end(self) -> None:
        """Kill who has not ended by then, and give back what this process holds of the crew."""
        self.kill()
        for each in self._stacks:
            os.close(each)
        self._stacks = []

    def _has_told(self, process: BaseProcess, before: list[int]) -> bool:
        number = self._number(process)
        if process.exitcode is not None or number is None:
            return True
        told = os.pread(self._stacks[number], 2**16, before[number])
        return LOOP in told or CUT in told

    def _stack(self, process: BaseProcess, before: list[int]) -> str:
        number = self._number(process)
        if process.exitcode is not None:
            return f"{self._named(process)} {_death(process.exitcode)}"
        if number is None:
            return f"{self._named(process)} has not begun"
        told = os.pread(self._stacks[number], 2**16, before[number])
        # Below stands how it was forked, which is the same of all.
        frames = told.partition(LOOP)[0].rpartition(b"\n")[0].decode(errors="replace")
        if not frames:  # it waits for a disk, say, and hears no signal
            with suppress(psutil.Error):
                state = psutil.Process(process.pid).status()
                frames = f"it does not answer, and is in the state {state}"
        return f"{self._named(process)}:\n{frames}"

    def _named(self, process: BaseProcess) -> str:
        number = self._number(process)
        if number is None:
            return f"a data worker (process {process.pid})"
        example = int(self._seen[number, 1])
        place = "" if example == NOTHING else f", at example {example}"
        return f"data worker {number} (process {process.pid}{place})"

    def _number(self, process: BaseProcess) -> int | None:
        found = np.flatnonzero(self._seen[:, 0] == process.pid)
        return int(found[0]) if len(found) else None


def _death(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was killed by {signal.Signals(-exit_code).name}{HINTS.get(-exit_code, '')}"
