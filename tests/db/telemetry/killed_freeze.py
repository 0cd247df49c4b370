"""Program that freezes runs, each in a process that kills itself at some point."""

import os
import signal
import sys
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any

import pyarrow.parquet  # noqa: F401 - loaded once, not by each process
from obstore.store import LocalStore

from db.database import Database
from db.files.step_files import StepFiles
from db.telemetry import freeze

freeze.GROUP_STEPS, freeze.BATCH_ROWS, freeze.LEAST_STEPS = 64, 50, 10


def frozen(url: str, folder: str, run_id: int, point: int) -> int:
    """Freeze a run and return the number of points: calls that db.telemetry.freeze makes.

    point: at which the process kills itself; 0 for none.
    """
    store, count = LocalStore(folder), 0

    def watch(frame: FrameType, _event: str, _argument: Any) -> None:
        nonlocal count
        if frame.f_code.co_filename == freeze.__file__:
            count += 1
            if count == point:
                os.kill(os.getpid(), signal.SIGKILL)

    database = Database(url, StepFiles(lambda: store))
    sys.setprofile(watch)
    freeze.freeze(database, store, run_id, folder=Path(folder), stopping=Event())
    sys.setprofile(None)
    database.dispose()
    return count


def main() -> None:
    """Read runs and points, one a line; print the number of points or the signal."""
    for line in sys.stdin:
        run_id, point = map(int, line.split())
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, str(frozen(*sys.argv[1:3], run_id, point)).encode())
            os._exit(0)
        os.close(writer)
        _, status = os.waitpid(child, 0)
        with os.fdopen(reader) as result:
            text = result.read()
        print(text or os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
