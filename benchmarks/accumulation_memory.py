"""Host memory of a step that accumulates 16 micro-batches, compared with one.

Each loop trains in its own process and in one thread, with a network whose activations are several
times its weights. Memory is the process's largest resident set, less its size before training. A
setting of glibc returns freed memory to the system at once, because the benchmark does not measure
how much of it the allocator keeps.
"""

import os
import resource
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, ClassVar

import psutil
import torch
from torch import Tensor, nn

from benchmarks.report import report
from halfstep.recipe import Loss, Recipe
from halfstep.run_config import RunConfig, parse_config
from trainer.loop import train
from trainer.setup import prepare_run

WIDTH, LAYERS, BATCH_SIZE = 256, 32, 4096
MICRO_BATCHES = (1, 16)
BAR = 1.1
#: Size from which glibc requests each piece from the system, and returns it.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class Deep(Recipe):
    """A network of narrow layers for large batches of random numbers."""

    name: ClassVar = "deep"
    title: ClassVar = "Deep"
    description: ClassVar = "For the benchmark."
    defaults: ClassVar = {"precision": "fp32", "training": {"batch_size": BATCH_SIZE}}

    def __init__(self, config: RunConfig[Any], device: torch.device) -> None:
        self.train_size = BATCH_SIZE * max(MICRO_BATCHES)
        layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.modules = {"model": nn.Sequential(*layers)}
        self.optimizers = {"adam": torch.optim.Adam(self.modules["model"].parameters(), fused=True)}

    def batch(self, indices: Tensor, generator: torch.Generator) -> Tensor:
        """Return inputs (B, width)."""
        return torch.randn(len(indices), WIDTH, generator=generator)

    def training_step(self, batch: Tensor) -> Iterator[Loss]:
        """Yield the mean square of the outputs."""
        yield Loss(self.modules["model"](batch).square().mean(), "adam")


def largest(accumulation_steps: int) -> float:
    """Train for three steps; return the memory used in MiB."""
    values = {
        "training": {"steps": 3, "accumulation_steps": accumulation_steps},
        "evaluation": {"every_steps": None},
    }
    before = psutil.Process().memory_info().rss
    train(
        prepare_run(
            Deep,
            parse_config(Deep, values),
            device=torch.device("cpu"),
            on_steps=lambda _steps: None,
            on_event=lambda _event: None,
        )
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    return float(peak - before) / 2**20


def alone(accumulation_steps: int) -> float:
    """Measure the memory in its own process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(largest, accumulation_steps).result()


def main() -> None:
    """Print the table."""
    os.environ |= ENVIRONMENT
    memory = {count: alone(count) for count in MICRO_BATCHES}
    one, many = memory.values()
    report(
        "accumulation_memory",
        f"16 micro-batches take ≤ {BAR:g} × the memory of one",
        ("micro-batches a step", "memory, MiB", "× that of one"),
        [(count, f"{mib:.0f}", f"{mib / one:.3f}") for count, mib in memory.items()],
        measured=f"{many / one:.3f}",
        passed=many / one <= BAR,
    )


if __name__ == "__main__":
    main()
