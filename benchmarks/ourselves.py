"""The work of peer.py, through trainer.telemetry and halfstep.telemetry.spool.

    python -m benchmarks.ourselves 2000 busy <folder>

The script prints two lists of nanoseconds per step as JSON. The first is the whole time. The second
is the way to the spool alone: ticking, and at intervals draining, interpreting and appending. It
leaves out the row, which the host reads on a CPU and only queues on a GPU.
"""

import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.peer import step_itself
from halfstep.clock import clock
from halfstep.config_groups import Diagnosis, Training
from halfstep.telemetry.spool import SpoolWriter
from trainer.optimizers import StepResult, Update, watch_optimizers
from trainer.telemetry import Telemetry


def result_of(*, is_skipped: bool) -> StepResult:
    """Return a step's result with new tensors, as the loop makes it."""
    loss, scale, factor = torch.ones(()), torch.ones(()), torch.ones(())
    if is_skipped:
        norms = [torch.full((), torch.inf)]
        update = Update(torch.ones(()), norms, factor, counts={0: (4, 0)})
    else:
        update = Update(torch.zeros(()), [torch.ones(())], factor)
    return StepResult(loss, scale, {"adamw": update}, {"adamw"}, 1e-3)


def main() -> None:
    """Log the requested number of steps, with every 500th skipped."""
    steps, kind, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    device = torch.device("cpu")
    layer = torch.nn.Linear(2, 2, bias=False)
    optimizers = watch_optimizers(
        {"model": layer}, {"adamw": torch.optim.AdamW(layer.parameters())}
    )
    spool = SpoolWriter(folder, 1)
    telemetry = Telemetry(
        optimizers, device, Training(), Diagnosis(), spool.steps, spool.event, clock()
    )
    spooled, whole = [], []
    for step in range(1, steps + 1):
        result = result_of(is_skipped=step % 500 == 0)
        telemetry.before_step(step)
        started = time.perf_counter_ns()
        telemetry.after_step(result)
        written = time.perf_counter_ns()
        telemetry.tick(0.0)
        ticked = time.perf_counter_ns()
        spooled.append(ticked - written)
        whole.append(ticked - started)
        step_itself(kind)  # type: ignore[no-untyped-call]
    telemetry.drain()
    print(json.dumps([whole, spooled]))


if __name__ == "__main__":
    main()
