"""One process of a loop that several train together over gloo: unwatched, then watched.

    python tests/diagnosis/rank.py LOOP PROCESSES RANK STORE RESULT [RUNS]

RESULT: a file for how both ended.  RUNS: the folder that the watched run is written to; left out,
the loop is observed instead, as it is and in fp32, and RESULT is what happened in both.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.diagnosis.corpus import LOOPS
from tests.diagnosis.trial import run_watched
from tests.diagnosis.truth import observe
from tests.diagnosis.unwatched import Unwatched, run


def main() -> None:
    """Train twice, and write the results to a file."""
    name, processes, rank, store, result, *runs = sys.argv[1:]
    os.environ |= {"RANK": rank, "WORLD_SIZE": processes}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(processes)
    )
    loop = LOOPS[name]
    if runs:
        both: list[Any] = [run(loop, Unwatched()), run_watched(loop, Path(runs[0]))]
    else:
        both = [observe(loop), observe(loop, fp32=True)]
    torch.save(both, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
