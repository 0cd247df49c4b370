"""One process of a loop that several train together, over gloo.

    python -m tests.diagnosis.rank LOOP PROCESSES RANK STORE RESULT [RUNS]

RUNS: the folder that the watched run is written to; left out or empty, nothing is watched.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.diagnosis.loops import LOOPS
from tests.diagnosis.unwatched import Unwatched, run


def main() -> None:
    """Train, and leave how it ended in the file RESULT."""
    name, processes, rank, store, result, runs = [*sys.argv[1:], ""][:6]
    os.environ |= {"RANK": rank, "WORLD_SIZE": processes, "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(processes)
    )
    if runs:
        from tests.diagnosis.trial import watched_run

        ended = watched_run(LOOPS[name], Path(runs))
    else:
        ended = run(LOOPS[name], Unwatched())
    torch.save(ended, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
