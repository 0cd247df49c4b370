"""torchrun launcher: starts one process per device in any environment that has torch.

    python <this file> DEVICES [-m] SCRIPT ARGUMENT…

It imports nothing from halfstep, so any environment's Python can run it by its path.
"""

import os
import signal
import sys
from pathlib import Path


def start_ranks(devices: int, words: list[str]) -> None:
    """Start one rank per device and wait; without restarts, which the lease handles."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    ranks = ["--standalone", f"--nproc-per-node={devices}", "--max-restarts=0"]
    try:
        torchrun([*ranks, *words])
    except ChildFailedError as error:
        # When one rank is killed, the others raise, and report that as the outcome. The cause is
        # the signal, so this process kills itself with one too, which the supervisor sees.
        if any(failure.exitcode < 0 for failure in error.failures.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(1)


if __name__ == "__main__":
    here = Path(__file__).parent  # its modules could shadow those that torch imports
    sys.path[:] = [path for path in sys.path if Path(path) != here]
    start_ranks(int(sys.argv[1]), sys.argv[2:])
