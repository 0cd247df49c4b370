"""Start a training once a device, by torchrun, in whichever environment has torch.

    python <this file> DEVICES [-m] SCRIPT ARGUMENT…

It imports nothing of ours, so that any environment's Python can run it by its path.
"""

import os
import signal
import sys
from pathlib import Path


def start_ranks(devices: int, words: list[str]) -> None:
    """Start a rank a device and wait for them; without restarts, which the lease takes care of."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    ranks = ["--standalone", f"--nproc-per-node={devices}", "--max-restarts=0"]
    try:
        torchrun([*ranks, *words])
    except ChildFailedError as error:
        # When one rank is killed the others raise, and say so in the outcome. The cause is the
        # signal, so this process dies of one too, for the supervisor to see.
        if any(failure.exitcode < 0 for failure in error.failures.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(1)


if __name__ == "__main__":
    here = Path(__file__).parent  # whose modules are ours, and no torch's
    sys.path[:] = [path for path in sys.path if Path(path) != here]
    start_ranks(int(sys.argv[1]), sys.argv[2:])
