"""Time for which the host is held in each step between the ring and the spool.

    python -m benchmarks.loop_hold [--steps 20000]

There is no model. Rows are written, ticked, drained, interpreted and appended to a spool on this
disk; one in a thousand is a skip with culprits. The figure includes all that the host does for
telemetry except the step's own norms and flags, which telemetry_cost.py measures. The longest step
is one that drains, because 512 rows or 0.3 s are handed over at once.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from halfstep.clock import clock
from halfstep.config_groups import Diagnosis, Training
from halfstep.telemetry.spool import SpoolWriter
from trainer import machine
from trainer.optimizers import StepResult, Update, watch_optimizers
from trainer.telemetry import Telemetry

PARAMETERS = 29  # as many as in telemetry_cost's tiny GPT


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = torch.nn.ModuleList(
        torch.nn.Linear(2, 2, bias=False, device=device) for _ in range(PARAMETERS)
    )
    optimizers = watch_optimizers(
        {"model": layers}, {"adamw": torch.optim.AdamW(layers.parameters())}
    )
    one, zero = torch.ones((), device=device), torch.zeros((), device=device)
    applied = Update(zero, [one] * PARAMETERS, one)
    skipped = Update(one, [one * torch.inf] * PARAMETERS, one)
    microseconds = np.zeros(options.steps)
    with tempfile.TemporaryDirectory() as folder:
        spool = SpoolWriter(Path(folder), 1)
        telemetry = Telemetry(
            optimizers, device, Training(), Diagnosis(), spool.steps, spool.event, clock()
        )
        for index in range(options.steps):
            update = skipped if index % 1000 == 999 else applied
            result = StepResult(one, one, {"adamw": update}, {"adamw"}, 1e-3)
            started = time.perf_counter()
            telemetry.before_step(index + 1)
            telemetry.after_step(result)
            telemetry.tick()
            microseconds[index] = (time.perf_counter() - started) * 1e6
        telemetry.drain()
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    print(f"{machine.device_name(device)}, {machine.versions()}, 1 thread, {device.type}")
    print(
        f"{options.steps} steps, {PARAMETERS} parameters, {size / options.steps:.0f} bytes a step"
    )
    for name, value in (
        ("mean", microseconds.mean()),
        ("median", np.median(microseconds)),
        ("99 %", np.quantile(microseconds, 0.99)),
        ("longest", microseconds.max()),
    ):
        print(f"{name:<10}{value:10.1f} µs a step")


if __name__ == "__main__":
    main()
