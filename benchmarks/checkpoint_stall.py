"""Time for which a checkpoint of 1 GiB holds the loop, and host memory that it takes.

    python -m benchmarks.checkpoint_stall [--gib 1.0]

The service's own loop trains a network whose weights and Adam moments are that large, in one
thread, and saves at an interval of steps. The stall is measured from outside: from the step
boundary, where the loop asks for requests, to the next forward pass, less the same time in steps
without a save. The comparison is the former way to save the same state on the same disk:
`torch.save`, then SHA-256 of the file, without an fsync. Memory is the process's largest resident
set, less that of another process with the same loop and no checkpoint. Steps are slower while
another thread hashes and writes; that is not part of the stall but has its own column.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch
from msgspec import UnsetType
from torch import Tensor, nn

from benchmarks.report import report
from halfstep.recipe import Loss, Recipe
from halfstep.run_config import RunConfig, parse_config
from halfstep.telemetry.events import Checkpoint, Event
from trainer.checkpoints import checkpoint
from trainer.checkpoints.files import checksum
from trainer.distributed.ranks import Control
from trainer.loop import train
from trainer.setup import prepare_run

LAYERS = 24
BYTES_A_WEIGHT = 12  # in fp32, with Adam's two moments
STEPS, EVERY_STEPS = 90, 30
BAR_STALL, BAR_MEMORY = 0.10, 1.1
SAMPLE_SECONDS = 0.005


class Wide(Recipe):
    """A recipe with square layers of one size and random numbers, which records forward times."""

    name: ClassVar = "wide"
    title: ClassVar = "Wide"
    description: ClassVar = "For the benchmark."
    defaults: ClassVar = {"precision": "fp32", "training": {"batch_size": 2}}
    width: ClassVar = 0
    forwards: ClassVar[list[float]] = []

    def __init__(self, config: RunConfig[Any], device: torch.device) -> None:
        self.train_size = 64
        self.inputs = torch.randn(self.train_size, self.width)
        layers = [nn.Linear(self.width, self.width, bias=False) for _ in range(LAYERS)]
        self.modules = {"model": nn.Sequential(*layers)}
        self.optimizers = {"adam": torch.optim.Adam(self.modules["model"].parameters(), fused=True)}

    def batch(self, indices: Tensor, generator: torch.Generator) -> Tensor:
        """Return inputs (B, width)."""
        return self.inputs[indices]

    def training_step(self, batch: Tensor) -> Iterator[Loss]:
        """Yield the mean square of the outputs."""
        self.forwards.append(time.perf_counter())
        yield Loss(self.modules["model"](batch).square().mean(), "adam")


@dataclass(frozen=True)
class Told:
    """Measurements of a loop. forwards, boundaries: when each step began and ended.

    saves: the checkpoints' events, with when they came.  peak_bytes: of the process's memory.
    """

    forwards: list[float]
    boundaries: list[float]
    saves: list[tuple[float, Checkpoint]]
    peak_bytes: int


class Peak(threading.Thread):
    """The peak resident set in bytes, sampled while this context is open."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.size_bytes, self._over = 0, threading.Event()

    def __enter__(self) -> "Peak":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Sample until the context is closed."""
        process = psutil.Process()
        while not self._over.wait(SAMPLE_SECONDS):
            self.size_bytes = max(self.size_bytes, process.memory_info().rss)


def loop(width: int, steps: int, folder: Path | None) -> Told:
    """Train for some steps, with saves to the folder if one is given."""
    boundaries: list[float] = []
    saves: list[tuple[float, Checkpoint]] = []
    Wide.width, Wide.forwards = width, []

    def control() -> Control:
        boundaries.append(time.perf_counter())
        return Control()

    def on_event(event: Event) -> None:
        if isinstance(event, Checkpoint):
            saves.append((time.perf_counter(), event))

    values = {
        "training": {"steps": steps, "threads": 1},
        "checkpoints": {"every_steps": EVERY_STEPS},
        "evaluation": {"every_steps": None},
        "diagnosis": {"replay_skips": 0},
    }
    with Peak() as peak:
        train(
            prepare_run(
                Wide,
                parse_config(Wide, values),
                device=torch.device("cpu"),
                on_steps=lambda _steps: None,
                on_event=on_event,
                checkpoint_folder=folder,
            ),
            control=control,
        )
    return Told(Wide.forwards, boundaries, saves, peak.size_bytes)


def alone(width: int, steps: int, folder: Path | None) -> Told:
    """Run a loop in a new process without earlier memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(loop, width, steps, folder).result()


def in_line(path: Path, folder: Path) -> float:
    """Return seconds to save and hash a checkpoint's state, the median of three."""
    state = checkpoint.load(path, is_checked=True)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        torch.save(state, folder / "in_line.pt")
        checksum(folder / "in_line.pt")
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="of state")
    options = parser.parse_known_args()[0]
    width = int((options.gib * 2**30 / BYTES_A_WEIGHT / LAYERS) ** 0.5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bare, saving = alone(width, STEPS, None), alone(width, STEPS, folder)
        newest = folder / f"step-{STEPS:08d}.pt"
        size_bytes = newest.stat().st_size
        seconds_in_line = in_line(newest, folder)

    # From the boundary of step n to the forward pass of step n + 1.
    saves = saving.saves
    gaps = [after - at for at, after in zip(saving.boundaries, saving.forwards[1:], strict=False)]
    saved = {event.step for _told, event in saves}
    usual = statistics.median(gap for step, gap in enumerate(gaps, 1) if step not in saved)
    stalls = [gaps[step - 1] - usual for step in sorted(saved) if step < STEPS]
    share = statistics.median(stalls) / seconds_in_line
    steps = list(zip(saving.forwards, saving.boundaries, strict=True))
    writes = [
        (saved_at, event.write_seconds)
        for saved_at, event in saves
        if not isinstance(event.write_seconds, UnsetType)
    ]
    spans = [(saved_at - seconds, saved_at) for saved_at, seconds in writes]
    beside, undisturbed = (
        [end - at for at, end in steps if any(a <= at <= b for a, b in spans) == is_beside]
        for is_beside in (True, False)
    )
    slower = statistics.median(beside) / statistics.median(undisturbed) - 1
    memory = (saving.peak_bytes - bare.peak_bytes) / size_bytes
    writing = statistics.median(seconds for _saved_at, seconds in writes)
    report(
        "checkpoint_stall",
        f"≤ {BAR_STALL:.0%} of torch.save and SHA-256 in line; ≤ {BAR_MEMORY} × the state more "
        "host memory",
        (
            "state, MiB",
            "in line, s",
            "stalls, s",
            "share, of the median",
            "write, s, beside",
            "steps beside a write, slower by",
            "more memory, × state",
        ),
        [
            (
                f"{size_bytes / 2**20:.0f}",
                f"{seconds_in_line:.2f}",
                ", ".join(f"{stall:.3f}" for stall in stalls),
                f"{share:.1%}",
                f"{writing:.2f}",
                f"{slower:.0%}",
                f"{memory:.2f}",
            )
        ],
        measured=f"{share:.1%}, {memory:.2f} ×",
        passed=share <= BAR_STALL and memory <= BAR_MEMORY,
    )


if __name__ == "__main__":
    main()
